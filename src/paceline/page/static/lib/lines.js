// Lines of charts as data: points of several tasks or runs, put on one axis. Nothing here draws.

const BINS = 600; // what a panel can show

/** A line from the columns of the API: [at, step, generation, value, least, largest]. */
export const lineOf = (label, task, key, points) => ({ label, task, key, points });

/** After a restart, steps are done again: the later value of a step counts. */
export function withoutRedone(points) {
  const kept = [];
  for (const point of points) {
    if (point[1] === null || point[1] === undefined) continue;
    while (kept.length && kept.at(-1)[1] >= point[1]) kept.pop();
    kept.push(point);
  }
  return kept;
}

/** Points of a line as [x, value, least, largest], in the order of x. `axis`: step, time or elapsed. */
export function along(line, axis) {
  const points = axis === "step" ? withoutRedone(line.points) : line.points;
  const origin = axis === "elapsed" ? line.points[0]?.[0] ?? 0 : 0;
  const result = [];
  let before = -Infinity;
  for (const [at, step, , value, least, largest] of points) {
    const x = axis === "step" ? step : at - origin;
    if (!(x > before)) continue; // a clock was set back
    before = x;
    result.push([x, value, least ?? value, largest ?? value]);
  }
  return result;
}

/** An exponential moving average without the bias of its start; `weight` from 0 (none) to 1. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let average = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = average * weight + value * (1 - weight);
    share = share * weight + (1 - weight);
    return average / share;
  });
}

/** All lines over one list of x: as they are if there is one, else in as many intervals as a panel can show. */
export function aligned(tables) {
  const filled = tables.filter((table) => table.length);
  if (!filled.length) return { x: [], columns: tables.map(() => []) };
  if (tables.length === 1 || filled.every((table) => hasSameX(table, filled[0]))) {
    return { x: filled[0].map(([x]) => x), columns: tables.map((table) => (table.length ? table : filled[0].map(() => null))) };
  }
  const least = Math.min(...filled.map((table) => table[0][0]));
  const largest = Math.max(...filled.map((table) => table.at(-1)[0]));
  const distinct = new Set();
  for (const table of filled) for (const [x] of table) if (distinct.size <= BINS) distinct.add(x);
  const places = distinct.size <= BINS ? [...distinct].sort((left, right) => left - right) : null;
  const index = places ? new Map(places.map((x, place) => [x, place])) : null;
  const width = (largest - least) / (BINS - 1) || 1;
  const place = index ? (x) => index.get(x) : (x) => Math.round((x - least) / width);
  const x = places ?? Array.from({ length: BINS }, (_, bin) => least + bin * width);
  const columns = tables.map((table) => {
    const column = new Array(x.length).fill(null);
    for (const point of table) {
      const at = place(point[0]);
      const other = column[at];
      column[at] = other && point[2] !== null ? [x[at], point[1], Math.min(other[2], point[2]), Math.max(other[3], point[3])] : point;
    }
    return column;
  });
  return { x, columns };
}

const hasSameX = (left, right) => left.length === right.length && left.every(([x], index) => x === right[index][0]);

/** The times around a range of the axis: what has to be fetched to show it in detail. */
export function timesOf(lines, axis, [from, to]) {
  let least = Infinity;
  let largest = -Infinity;
  for (const line of lines) {
    const origin = line.points[0]?.[0] ?? 0;
    for (const [at, step] of line.points) {
      const x = axis === "step" ? step : axis === "elapsed" ? at - origin : at;
      if (x !== null && x >= from && x <= to) {
        least = Math.min(least, at);
        largest = Math.max(largest, at);
      }
    }
  }
  if (least > largest) return null;
  const margin = Math.max(5, (largest - least) * 0.1);
  return [least - margin, largest + margin];
}

const quoted = (text) => (/[",\n]/.test(String(text)) ? `"${String(text).replaceAll('"', '""')}"` : String(text));

export function toCsv(name, lines) {
  const rows = ["name,run,task,generation,at,step,value,least,largest"];
  for (const line of lines) {
    for (const [at, step, generation, ...values] of line.points) {
      rows.push([name, line.key, line.task, generation, at, step ?? "", ...values.map((value) => value ?? "")].map(quoted).join(","));
    }
  }
  return `${rows.join("\n")}\n`;
}

// Numbers, times and sizes as text.

const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? "–" : COUNT.format(value));

export const plural = (value, noun, many = `${noun}s`) => `${count(value)} ${value === 1 ? noun : many}`;

/** A metric: four significant digits, no trailing zeros. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return COUNT.format(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** For axes: 1.2k, 3.4M. */
export function short(value) {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return `${Number((value / limit).toPrecision(4))}${unit}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(0).replace("e+", "e") : String(Number(value.toPrecision(4)));
}

/** The texts of an axis: as short as they can be without two of them being the same. */
export function ticks(values) {
  const shown = values.filter((value) => value !== null);
  for (let digits = 1; digits <= 6; digits++) {
    const texts = values.map((value) => (value === null ? "" : Math.abs(value) >= 1e-3 || value === 0 ? short(value) : value.toExponential(digits - 1)));
    if (new Set(texts.filter(Boolean)).size >= new Set(shown).size) return texts;
  }
  return values.map((value) => (value === null ? "" : String(value)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024 || unit === "TiB") return unit === "B" ? `${Math.round(size)} B` : `${size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
    size /= 1024;
  }
  return "";
}

export const rate = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);

export const percent = (share, digits = 1) => (share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)}%`);

export function speed(value) {
  if (!value) return "–";
  if (value >= 100) return `${COUNT.format(value)} steps/s`;
  if (value >= 1) return `${value.toFixed(1)} steps/s`;
  return value >= 1 / 60 ? `${(value * 60).toFixed(1)} steps/min` : `${(value * 3600).toFixed(1)} steps/h`;
}

/** 4.2 s, 3 min 12 s, 5 h 03 min, 12 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const total = Math.max(0, seconds);
  if (total < 10) return `${total.toFixed(total < 1 && total > 0 ? 2 : 1)} s`;
  if (total < 60) return `${Math.round(total)} s`;
  const whole = Math.round(total);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Seconds since 1970 of an ISO text, or of a number. */
export const seconds = (at) => (typeof at === "number" ? at : at ? Date.parse(at) / 1000 : null);

const pad = (value, digits = 2) => String(value).padStart(digits, "0");

/** 14:03:21; with `date`: Nov 18 14:03:21. Local time. */
export function clock(at, { date = false, ms = false } = {}) {
  const value = seconds(at);
  if (value === null || Number.isNaN(value)) return "–";
  const when = new Date(value * 1000);
  const time = `${pad(when.getHours())}:${pad(when.getMinutes())}:${pad(when.getSeconds())}`;
  const text = ms ? `${time}.${pad(when.getMilliseconds(), 3)}` : time;
  return date ? `${when.toLocaleString("en-US", { month: "short", day: "numeric" })} ${text}` : text;
}

/** The time if it was today, else with the date. */
export function when(at) {
  const value = seconds(at);
  if (value === null) return "–";
  const isToday = new Date(value * 1000).toDateString() === new Date().toDateString();
  return isToday ? clock(value) : clock(value, { date: true });
}

export function ago(at, now = Date.now() / 1000) {
  const value = seconds(at);
  if (value === null) return "–";
  const age = now - value;
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  return `${Math.floor(age / 86400)} d ago`;
}

/** How long a run has taken. */
export function runTime(run, now = Date.now() / 1000) {
  const started = seconds(run.started);
  const ended = seconds(run.ended) ?? (run.is_live ? now : null);
  return started === null || ended === null ? null : ended - started;
}

const collator = new Intl.Collator("en", { numeric: true });

/** worker-2 before worker-10. */
export const natural = (left, right) => collator.compare(left, right);

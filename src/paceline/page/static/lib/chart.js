// One chart: a thin layer over uPlot with the colours of the theme, bands, marks and a picture to download.

import { bytes, clock, duration, number, percent, short, ticks } from "./format.js";
import { aligned, along, smoothed } from "./lines.js";
import { colours } from "./kinds.js";

const LINES = 8; // colours
const TIMES = [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]];

const isBytes = (name) => /bytes_per_s$|(^|_)memory(_|$)/.test(name);
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power); // distances of lines at an axis of bytes

/** How values of a series are written. */
export function formatOf(name) {
  if (/bytes_per_s$/.test(name)) return (value) => `${bytes(value)}/s`;
  if (/(^|_)memory(_|$)/.test(name)) return bytes;
  if (/utilization$/.test(name)) return (value) => percent(value, 0);
  return number;
}

export function theme() {
  const names = ["text", "muted", "border", "surface", "k-restarting", ...Array.from({ length: LINES }, (_, index) => `line-${index}`)];
  return colours(names);
}

export const colourName = (index) => `line-${index % LINES}`;

function faded(colour, alpha) {
  const value = parseInt(colour.slice(1), 16);
  return `rgb(${value >> 16} ${(value >> 8) & 255} ${value & 255} / ${alpha})`;
}

function xAxis(axis, palette) {
  const common = { stroke: palette.muted, grid: { stroke: palette.border, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", size: 26, gap: 4 };
  if (axis === "time") return { ...common, values: [[86400, "{MMM} {D}", null, null, null, null, null, null, 1], [3600, "{HH}:{mm}", "\n{MMM} {D}", null, null, null, null, null, 1], [60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1], [0.001, ":{ss}.{fff}", null, null, null, null, null, null, 1]], size: 34 };
  if (axis === "elapsed") {
    return { ...common, values: (_, splits, __, ___, increment) => {
      const [size, unit] = TIMES.findLast(([each]) => increment >= each) ?? TIMES[0];
      return splits.map((value) => `${Number((value / size).toFixed(2))} ${unit}`);
    } };
  }
  return { ...common, values: (_, splits) => splits.map(short) };
}

export const xText = (value, axis) => (axis === "time" ? clock(value, { date: true }) : axis === "elapsed" ? duration(value) : `step ${short(value) === String(value) ? value : Math.round(value).toLocaleString("en-US")}`);

/** What uPlot needs for these lines. `settings`: {axis, smooth, log}. */
export function shaped(lines, settings, palette) {
  const tables = lines.map((line) => along(line, settings.axis));
  const { x, columns } = aligned(tables);
  const data = [x];
  const series = [{}];
  const bands = [];
  const positive = settings.log ? (value) => (value > 0 ? value : null) : (value) => value ?? null;
  lines.forEach((line, index) => {
    const colour = palette[colourName(line.colour ?? index)];
    const values = columns[index].map((point) => (point ? positive(point[1]) : null));
    const hasBand = line.hasBand && columns[index].some((point) => point && point[2] !== point[3]);
    if (hasBand) {
      data.push(columns[index].map((point) => (point ? positive(point[3]) : null)), columns[index].map((point) => (point ? positive(point[2]) : null)));
      series.push(hidden(), hidden());
      bands.push({ series: [data.length - 2, data.length - 1], fill: faded(colour, 0.16) });
    } else if (settings.smooth && lines.length <= 4) {
      data.push(values);
      series.push({ stroke: faded(colour, 0.25), width: 1, spanGaps: true, points: { show: false } });
    }
    line.column = data.length;
    data.push(smoothed(values, settings.smooth));
    series.push({ label: line.label, stroke: colour, width: 1.5, spanGaps: true, points: { show: x.length < 40, size: 5 } });
  });
  return { data, series, bands };
}

const hidden = () => ({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });

export function createChart(uPlot, root, { name, lines, settings, palette, height, marks, onzoom, oncursor, syncKey }) {
  const { data, series, bands } = shaped(lines, settings, palette);
  const format = formatOf(name);
  let isSetUp = false;
  const options = {
    width: Math.max(120, root.clientWidth), height, series, bands, legend: { show: false },
    padding: [10, 8, 0, 0],
    cursor: { sync: syncKey ? { key: syncKey, setSeries: false } : undefined, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, focus: { prox: -1 } },
    scales: { x: { time: settings.axis === "time", range: (_, least, largest) => settings.range ?? (least === largest ? [least - 1, largest + 1] : [least, largest]) }, y: settings.log ? { distr: 3 } : {} },
    axes: [xAxis(settings.axis, palette), {
      stroke: palette.muted, grid: { stroke: palette.border, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", size: (_, values) => Math.max(36, 9 + 6.3 * Math.max(0, ...(values ?? []).map((value) => (value ?? "").length))), gap: 4,
      ...(isBytes(name) && !settings.log ? { incrs: POWERS } : {}),
      values: (_, splits) => (format === number ? ticks(splits) : splits.map((value) => (value === null ? "" : format(value)))),
    }],
    hooks: {
      ready: [() => (isSetUp = true)],
      setCursor: [(chart) => isSetUp && oncursor(chart.cursor.idx)],
      setSelect: [(chart) => {
        if (chart.select.width < 4) return;
        onzoom([chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")]);
        chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
      drawClear: [(chart) => drawMarks(chart, settings.axis === "time" ? marks() : [], palette)],
    },
  };
  const chart = new uPlot(options, data, root);
  chart.over.addEventListener("dblclick", () => onzoom(null));
  return chart;
}

function drawMarks(chart, marks, palette) {
  const { ctx } = chart;
  ctx.save();
  ctx.strokeStyle = palette["k-restarting"];
  ctx.setLineDash([4, 4]);
  ctx.lineWidth = 1;
  for (const at of marks) {
    const x = Math.round(chart.valToPos(at, "x", true)) + 0.5;
    if (x < chart.bbox.left || x > chart.bbox.left + chart.bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, chart.bbox.top);
    ctx.lineTo(x, chart.bbox.top + chart.bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

/** The chart with its title and the names of its lines, as a PNG. */
export function picture(chart, title, lines, palette) {
  const ratio = devicePixelRatio || 1;
  const source = chart.ctx.canvas;
  const rows = Math.min(lines.length, 12);
  const canvas = document.createElement("canvas");
  canvas.width = source.width;
  canvas.height = source.height + (34 + rows * 18) * ratio;
  const context = canvas.getContext("2d");
  context.fillStyle = palette.surface;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 30 * ratio);
  context.scale(ratio, ratio);
  context.fillStyle = palette.text;
  context.font = "600 14px system-ui, sans-serif";
  context.fillText(title, 12, 21);
  context.font = "12px system-ui, sans-serif";
  lines.slice(0, rows).forEach((line, index) => {
    const y = 30 + source.height / ratio + 13 + index * 18;
    context.fillStyle = palette[colourName(line.colour ?? index)];
    context.fillRect(12, y - 5, 14, 3);
    context.fillStyle = palette.muted;
    context.fillText(line.label, 32, y);
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

// Draws bars of tasks over time. It only knows rows, a range of time, and a scroll position.

import { clock, duration } from "./format.js";
import { colours, OVER, TIMELINE } from "./kinds.js";

export const LABELS = 132; // width of the task names
export const HEAD = 46; // height of the axis and of the marks
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const NAMES = [...TIMELINE, "succeeded", "ended"];
const MARKS = { restart: "k-restarting", hang: "k-hang", snapshot: "k-snapshot", evaluated: "k-evaluating", warning: "warn", spike: "warn", "not-finite": "bad", end: "muted", generation: "k-starting", scaled: "accent", paused: "k-paused", resumed: "k-paused" };
const LINES = new Set(["restart", "hang", "end", "paused", "resumed"]); // of all tasks: drawn over their bars

export class TimelineCanvas {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = this.height = 0;
    this.readTheme();
  }

  readTheme() {
    const wanted = ["surface", "bg", "border", "text", "muted", "accent", "hover", "selected", "warn", "bad", "k-paused", ...NAMES.map((kind) => `k-${kind}`)];
    this.colours = colours(wanted);
    this.font = `12px ${getComputedStyle(document.documentElement).getPropertyValue("--sans") || "sans-serif"}`;
  }

  resize(width, height) {
    const ratio = devicePixelRatio || 1;
    if (width === this.width && height === this.height && ratio === this.ratio) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
  }

  get labels() {
    return this.width < 600 ? 84 : LABELS;
  }

  x(at, scene) {
    return this.labels + ((at - scene.from) / (scene.to - scene.from)) * (this.width - this.labels);
  }

  time(x, scene) {
    return scene.from + ((x - this.labels) / (this.width - this.labels)) * (scene.to - scene.from);
  }

  /** `scene`: {from, to, rowHeight, top, names, segments(name), marks, now, hovered, brush}. */
  draw(scene) {
    const { context, width, height, colours: colour } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = colour.surface;
    context.fillRect(0, 0, width, height);
    context.font = this.font;
    this.drawGrid(scene);
    const first = Math.max(0, Math.floor(scene.top / scene.rowHeight));
    const last = Math.min(scene.names.length, Math.ceil((scene.top + height - HEAD) / scene.rowHeight));
    context.save();
    context.beginPath();
    context.rect(0, HEAD, width, height - HEAD);
    context.clip();
    for (let row = first; row < last; row++) this.drawRow(scene, row);
    context.restore();
    this.drawMarks(scene);
    if (scene.brush) {
      context.globalAlpha = 0.18;
      context.fillStyle = colour.accent;
      context.fillRect(Math.min(...scene.brush), HEAD, Math.abs(scene.brush[1] - scene.brush[0]), height - HEAD);
      context.globalAlpha = 1;
    }
  }

  drawGrid(scene) {
    const { context, width, height, colours: colour } = this;
    const span = scene.to - scene.from;
    const wanted = (span * 110) / Math.max(1, width - this.labels);
    const step = STEPS.find((each) => each >= wanted) ?? 86400 * Math.ceil(wanted / 86400);
    const offset = new Date(scene.from * 1000).getTimezoneOffset() * 60;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (let at = Math.ceil((scene.from - offset) / step) * step + offset; at <= scene.to; at += step) {
      const x = Math.round(this.x(at, scene)) + 0.5;
      context.fillStyle = colour.border;
      context.fillRect(x - 0.5, 22, 1, height - 22);
      context.fillStyle = colour.muted;
      const isDay = span > 86400 * 1.5;
      const text = step < 1 ? clock(at, { ms: true }) : isDay ? clock(at, { date: true }).slice(0, -3) : span < 1200 ? clock(at) : clock(at).slice(0, 5);
      if (x + 8 < width - 20) context.fillText(text, x + 4, 12);
    }
    context.fillStyle = colour.muted;
    context.fillText(`${duration(span)}`, 12, 12);
    context.fillStyle = colour.border;
    context.fillRect(0, HEAD - 1, width, 1);
  }

  drawRow(scene, row) {
    const { context, colours: colour, labels } = this;
    const { rowHeight } = scene;
    const y = HEAD + row * rowHeight - scene.top;
    const name = scene.names[row];
    if (row === scene.hovered) {
      context.fillStyle = colour.hover;
      context.fillRect(0, y, this.width, rowHeight);
    }
    const every = Math.ceil(18 / rowHeight); // rows that are too low for a name each
    if (row % every === 0 || rowHeight >= 12) {
      context.fillStyle = row === scene.hovered ? colour.text : colour.muted;
      context.textBaseline = "middle";
      context.fillText(shortened(context, name, labels - 22), 12, y + (rowHeight >= 12 ? rowHeight / 2 : 6) + 1);
    }
    const gap = rowHeight >= 8 ? Math.min(4, rowHeight / 6) : rowHeight >= 3 ? 0.5 : 0;
    const scale = (this.width - labels) / (scene.to - scene.from);
    for (const segment of scene.segments(name)) {
      const [kind, begin, end] = segment;
      if (end < scene.from || begin > scene.to) continue;
      const left = labels + Math.max(0, (begin - scene.from) * scale);
      const right = labels + Math.min(scene.to - scene.from, end - scene.from) * scale;
      context.fillStyle = colour[`k-${kind}`] ?? colour["k-mixed"];
      if (OVER.has(kind)) {
        context.fillRect(left, y + rowHeight / 2 - 1, right - left, rowHeight >= 8 ? 2 : 1);
        if (kind === "failed") context.fillRect(left, y + gap, Math.min(4, right - left), rowHeight - 2 * gap);
      } else {
        context.fillRect(left, y + gap, Math.max(0.75, right - left - (right - left > 3 ? 0.5 : 0)), rowHeight - 2 * gap);
      }
    }
  }

  drawMarks(scene) {
    const { context, colours: colour } = this;
    const drawn = {}; // where the last mark of each kind is: marks that would cover each other are left out
    for (const mark of scene.marks) {
      if (mark.at < scene.from || mark.at > scene.to) continue;
      const x = this.x(mark.at, scene);
      if (x - (drawn[mark.kind] ?? -Infinity) < 8) continue;
      drawn[mark.kind] = x;
      context.fillStyle = colour[MARKS[mark.kind] ?? "muted"] ?? colour.muted;
      context.beginPath();
      if (LINES.has(mark.kind)) {
        context.fillRect(x - 0.75, HEAD - 14, 1.5, this.height - HEAD + 14);
        context.moveTo(x - 5, HEAD - 15);
        context.lineTo(x + 5, HEAD - 15);
        context.lineTo(x, HEAD - 6);
      } else {
        context.arc(x, HEAD - 10, 3.5, 0, 2 * Math.PI);
      }
      context.fill();
    }
  }

  /** What is at this point: {mark}, {row, segment} or {row, isLabel}. */
  at(x, y, scene) {
    if (y < HEAD) {
      const near = scene.marks.filter((mark) => Math.abs(this.x(mark.at, scene) - x) < 6);
      return near.length && y > 20 ? { marks: near } : {};
    }
    const row = Math.floor((y - HEAD + scene.top) / scene.rowHeight);
    const name = scene.names[row];
    if (name === undefined) return {};
    if (x < this.labels) return { row, name, isLabel: true };
    const time = this.time(x, scene);
    const slack = (1.5 * (scene.to - scene.from)) / (this.width - this.labels);
    const segments = scene.segments(name);
    const segment = segments.find(([, begin, end]) => time >= begin && time < end) ?? segments.find(([, begin, end]) => time >= begin - slack && time < end + slack);
    return { row, name, segment, time };
  }
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text;
  while (kept.length > 3 && context.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

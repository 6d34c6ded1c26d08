// The timeline of a run: a bar for each task, zoomed and scrolled, extended while the run lasts.

import { coalesced, debounced, empty, fill, h, problem } from "../lib/dom.js";
import { clock, duration, seconds, when } from "../lib/format.js";
import { bind } from "../lib/keys.js";
import { kindLabel, TIMELINE } from "../lib/kinds.js";
import { runHref } from "../lib/route.js";
import { HEAD, TimelineCanvas } from "../lib/timeline_canvas.js";
import { MOST_ROWS, TimelineData } from "../lib/timeline_data.js";

const ROW = 22;
const REFRESH_MS = 120_000; // what was extended is fetched again, merged to what a pixel shows

export function mount(root, { key, store, params, setParams }) {
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of tasks. The Tasks tab shows what they do now." });
  const space = h("div", { class: "timeline-space" });
  const scroller = h("div", { class: "timeline-scroll", tabindex: "-1" }, h("div", { class: "timeline-sticky" }, canvas), space);
  const tip = h("div", { class: "tip", hidden: true });
  const note = h("div");
  const fit = h("button", { type: "button", text: "Fit all tasks", onclick: () => setFit(!state.fit) });
  const whole = h("button", { type: "button", text: "Whole run", onclick: () => zoom(null, null) });
  root.append(
    h("div", { class: "bar" }, whole, h("button", { type: "button", text: "Last hour", onclick: () => last(3600) }), h("button", { type: "button", text: "Last 10 min", onclick: () => last(600) }),
      h("button", { type: "button", text: "+", "aria-label": "Zoom in", onclick: () => scale(0.5) }), h("button", { type: "button", text: "−", "aria-label": "Zoom out", onclick: () => scale(2) }), fit,
      h("span", { class: "muted hint", text: "Drag to zoom, Shift+drag to pan, double-click to show the whole run. Click a bar for its output." })),
    h("div", { class: "card flush timeline" }, scroller, tip), note,
    h("div", { class: "legend" }, TIMELINE.map((kind) => kindLabel(kind, kind === "mixed" ? "several, too short to show" : kind))));

  const state = {
    from: number(params.get("from")), to: number(params.get("to")), fit: params.get("fit") === "1",
    trailing: number(params.get("last")), top: 0, hovered: -1, brush: null, pan: null,
  };
  const painter = new TimelineCanvas(canvas);
  const data = new TimelineData(key, loaded, (error) => fill(note, problem(error, load)));

  const isLive = () => store.status?.is_live ?? false;
  const now = () => (isLive() ? Math.max(Date.now() / 1000, data.end ?? 0) : data.end);

  function range() {
    const end = now() ?? Date.now() / 1000;
    const begin = data.begin ?? seconds(store.status?.started) ?? end - 60;
    if (state.from !== null && state.to !== null) return [state.from, state.to];
    if (state.trailing) return [end - state.trailing, end];
    return [begin, Math.max(end, begin + 1)];
  }

  /** What is left of the window below the controls and above the legend. */
  const room = () => Math.max(300, innerHeight - scroller.getBoundingClientRect().top - scrollY - 62) - HEAD;

  function rowHeight() {
    return state.fit ? Math.max(room() / MOST_ROWS, Math.min(ROW, room() / Math.max(1, data.total))) : ROW;
  }

  function scene() {
    const [from, to] = range();
    return {
      from, to, rowHeight: rowHeight(), top: state.top, names: data.names, segments: (name) => data.segments.get(name) ?? [],
      marks: data.marks, hovered: state.hovered, brush: state.brush,
    };
  }

  const draw = coalesced(() => {
    if (isLive()) data.advance(Date.now() / 1000);
    const height = rowHeight() * Math.max(1, data.total);
    const shown = Math.min(HEAD + height, HEAD + room());
    scroller.style.height = `${shown}px`;
    space.style.height = `${Math.max(0, HEAD + height - shown)}px`;
    painter.resize(scroller.clientWidth, shown);
    painter.draw(scene());
    fit.setAttribute("aria-pressed", String(state.fit));
    whole.setAttribute("aria-pressed", String(state.from === null && !state.trailing));
    if (!data.isStale && !data.total) fill(note, empty("No task has started yet"));
    canvas.dataset.rows = data.total;
  });

  function visibleRows() {
    const height = rowHeight();
    return [Math.floor(state.top / height), Math.min(data.total || 100, Math.ceil((state.top + room()) / height))];
  }

  function load() {
    note.replaceChildren();
    const [from, to] = range();
    const [first, last] = visibleRows();
    const isWhole = state.from === null && !state.trailing;
    const width = Math.max(200, scroller.clientWidth - 132);
    const span = data.begin === null && isWhole ? (Date.now() / 1000 - (seconds(store.status?.started) ?? Date.now() / 1000 - 3600)) : to - from;
    data.fetch({ from: isWhole ? null : from - span * 0.5, to: isWhole ? null : to + span * 0.5, first, last, resolution: span / width * (state.fit ? 2 : 1) });
  }
  const loadSoon = debounced(load, 150);

  function loaded() {
    draw();
    if (!data.has(...visibleRows())) loadSoon(); // only now it is known how many rows fit
  }

  function zoom(from, to) {
    Object.assign(state, { from, to, trailing: null });
    setParams({ from: from === null ? "" : from.toFixed(2), to: to === null ? "" : to.toFixed(2), last: "" });
    draw();
    loadSoon();
  }

  function last(trailing) {
    Object.assign(state, { from: null, to: null, trailing });
    setParams({ from: "", to: "", last: trailing });
    draw();
    loadSoon();
  }

  function scale(factor, at) {
    const [from, to] = range();
    const centre = at ?? (from + to) / 2;
    const span = Math.max(0.05, (to - from) * factor);
    const begin = data.begin ?? from;
    const end = Math.max(now() ?? to, begin + 1);
    if (span >= end - begin) zoom(null, null);
    else zoom(centre - (centre - from) * (span / (to - from)), centre + (to - centre) * (span / (to - from)));
  }

  function pan(share) {
    const [from, to] = range();
    zoom(from + (to - from) * share, to + (to - from) * share);
  }

  function setFit(isFit) {
    state.fit = isFit;
    setParams({ fit: isFit });
    scroller.scrollTop = state.top = 0;
    draw();
    loadSoon();
  }

  // ---- pointer

  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("pointerdown", (event) => {
    const [x] = point(event);
    if (event.button || x < painter.labels) return;
    canvas.setPointerCapture(event.pointerId);
    if (event.shiftKey) state.pan = { x, range: range() };
    else state.brush = [x, x];
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = point(event);
    if (state.pan) {
      const [from, to] = state.pan.range;
      const by = ((state.pan.x - x) / (painter.width - painter.labels)) * (to - from);
      zoom(from + by, to + by);
      return;
    }
    if (state.brush) state.brush[1] = Math.max(painter.labels, x);
    showTip(x, y);
    draw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = point(event);
    const { brush, pan: panned } = state;
    state.brush = state.pan = null;
    if (brush && Math.abs(brush[1] - brush[0]) > 5) {
      const view = scene();
      const [left, right] = brush.sort((one, two) => one - two);
      zoom(painter.time(left, view), painter.time(right, view));
    } else if (!panned) {
      open(painter.at(x, y, scene()));
    }
    draw();
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    state.hovered = -1;
    draw();
  });
  canvas.addEventListener("dblclick", () => zoom(null, null));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // scrolls the rows
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) scale(event.deltaY > 0 ? 1.25 : 0.8, painter.time(point(event)[0], scene()));
    else pan(event.deltaX / painter.width);
  }, { passive: false });

  let clicks = 0;
  function open(target) {
    if (!target.name) return;
    // The second click of a double-click must not be lost to another page.
    clearTimeout(clicks);
    clicks = setTimeout(() => {
      const at = target.isLabel || !target.time ? "" : new Date(target.time * 1000).toISOString();
      location.hash = runHref(key, "output", { task: target.name, at });
    }, 280);
  }
  canvas.addEventListener("dblclick", () => clearTimeout(clicks));

  function showTip(x, y) {
    const target = painter.at(x, y, scene());
    state.hovered = target.row ?? -1;
    if (target.marks) fill(tip, target.marks.slice(0, 6).map((mark) => [h("strong", { text: mark.text || mark.kind }), h("span", { class: "muted", text: `${mark.kind}, ${when(mark.at)}` })]));
    else if (target.segment) {
      const [kind, begin, end, generation, detail] = target.segment;
      fill(tip, h("strong", {}, `${target.name}: `, kindLabel(kind)), `${duration(end - begin)} · ${clock(begin)} to ${clock(end)}`, h("div", { class: "muted", text: [`generation ${generation}`, detail].filter(Boolean).join(", ") }));
    } else if (target.isLabel) fill(tip, h("strong", { text: target.name }), "Click for its output");
    else {
      tip.hidden = true;
      return;
    }
    tip.hidden = false;
    const left = x + 14 + tip.offsetWidth > painter.width ? x - tip.offsetWidth - 10 : x + 14;
    tip.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, y + 14)}px)`;
  }

  scroller.addEventListener("scroll", () => {
    state.top = scroller.scrollTop;
    draw();
    if (!data.has(...visibleRows())) loadSoon();
  });

  const themed = () => {
    painter.readTheme();
    draw();
  };
  const resized = new ResizeObserver(draw);
  resized.observe(root);
  addEventListener("themechange", themed);
  const ticks = setInterval(() => {
    if (isLive() && !document.hidden && (state.from === null || state.to > (data.end ?? 0))) draw();
    if (data.isStale && data.total) loadSoon();
  }, 1000);
  const refresh = setInterval(() => isLive() && !document.hidden && load(), REFRESH_MS);
  const refreshMarks = debounced(load, 1000);
  const stops = [
    store.on("status", () => draw()),
    store.on("tasks", ({ full, tasks }) => {
      for (const task of tasks) data.extend(task);
      if (full && data.total) loadSoon();
      draw();
    }),
    store.on("events", ({ events }) => events.some(({ event }) => event !== "step" && event !== "resources") && refreshMarks()),
    store.on("end", load),
    bind("Timeline", [
      ["+", "Zoom in", () => scale(0.5)], ["=", "", () => scale(0.5)], ["-", "Zoom out", () => scale(2)], ["0", "The whole run", () => zoom(null, null)],
      ["ArrowLeft", "Earlier", () => pan(-0.25)], ["ArrowRight", "Later", () => pan(0.25)], ["a", "Fit all tasks", () => setFit(!state.fit)],
    ]),
  ];
  load();
  return {
    unmount() {
      for (const stop of stops) stop();
      for (const timer of [ticks, refresh]) clearInterval(timer);
      for (const later of [draw, loadSoon, refreshMarks]) later.cancel();
      data.latest.cancel();
      resized.disconnect();
      removeEventListener("themechange", themed);
    },
  };
}

function number(text) {
  const value = text === null || text === "" ? NaN : Number(text);
  return Number.isFinite(value) ? value : null;
}

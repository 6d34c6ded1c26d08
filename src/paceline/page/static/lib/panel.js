// A panel with the chart of one series: it fetches its lines, adds live points, and offers PNG and CSV.

import { get, inTurn, isAbort, newest, query, runPath } from "./api.js";
import { colourName, createChart, formatOf, picture, shaped, theme, xText } from "./chart.js";
import { coalesced, download, fill, h, setText } from "./dom.js";
import { lineOf, timesOf, toCsv } from "./lines.js";
import { loadUplot } from "./uplot.js";

const HEIGHT = 214;
const MOST_LINES = 16;
const AGAIN_MS = 1000; // the server answers with what it has read so far

export class Panel {
  /** `sources`: [{key, label}]. `settings`: shared by all panels: {axis, smooth, log, task, range}. */
  constructor({ name, title, sources, settings, marks = () => [], onzoom, syncKey, fixedTask }) {
    Object.assign(this, { name, sources, settings, marks, onzoom, syncKey, fixedTask });
    this.lines = [];
    this.chart = null;
    this.isVisible = this.isLoaded = false;
    this.loading = 0;
    this.latest = newest();
    this.format = formatOf(name);
    this.values = h("div", { class: "values" });
    this.plot = h("div", { class: "plot" });
    this.heading = h("h3", { text: title ?? name, title: name });
    this.widen = h("button", { type: "button", class: "quiet", text: "Wide", "aria-pressed": "false", "aria-label": `${name}: wide`, onclick: () => this.setWide() });
    this.element = h("section", { class: "panel", data: { series: name }, "aria-label": name },
      h("header", {}, this.heading, this.widen,
        h("button", { type: "button", class: "quiet", text: "PNG", "aria-label": `${name}: download as PNG`, onclick: () => this.savePicture() }),
        h("button", { type: "button", class: "quiet", text: "CSV", "aria-label": `${name}: download as CSV`, onclick: () => this.saveValues() })),
      this.plot, this.values);
    this.draw = coalesced(() => this.render());
  }

  setVisible(isVisible) {
    if (isVisible === this.isVisible) return;
    this.isVisible = isVisible;
    if (!isVisible) this.dropChart();
    else if (this.isLoaded) this.draw();
    else this.load();
  }

  task() {
    return this.fixedTask ?? this.settings.task;
  }

  async load() {
    if (!this.isVisible) {
      this.isLoaded = false;
      return;
    }
    this.loading += 1;
    clearTimeout(this.again);
    if (!this.lines.length && !this.chart) this.say("Loading…");
    const { range, axis } = this.settings;
    const times = range && this.lines.length ? timesOf(this.lines, axis, range) : null;
    const task = this.task();
    const points = task === "each" ? 300 : 800;
    try {
      const answers = await this.latest((signal) => Promise.all(this.sources.map((source) =>
        inTurn(() => get(runPath(source.key, `/series${query({ name: this.name, task: task === "mean" ? "*" : task === "each" ? [] : task, points, partial: 1, from: times?.[0].toFixed(3), to: times?.[1].toFixed(3) })}`), { signal }), signal)
          .catch((error) => (error.status === 404 ? { lines: [] } : Promise.reject(error))))));
      this.isLoaded = true;
      this.lines = answers.flatMap((answer, index) => this.linesOf(answer, index));
      this.cut = answers.some((answer) => answer.lines.length > MOST_LINES || (task === "each" && answer.total_tasks > answer.lines.length));
      this.isPartial = answers.some((answer) => answer.is_partial);
      if (this.isPartial) this.again = setTimeout(() => this.refresh(), AGAIN_MS);
      this.draw();
    } catch (error) {
      if (!isAbort(error)) this.say(error.message);
    } finally {
      this.loading -= 1;
    }
  }

  /** Fetches again, unless the last request is still on its way: a slow server would never finish one. */
  refresh() {
    if (!this.loading) this.load();
  }

  linesOf(answer, index) {
    const source = this.sources[index];
    const isSeveral = this.sources.length > 1;
    return answer.lines.slice(0, MOST_LINES).map((line, place) => {
      const task = line.task === "*" ? (answer.total_tasks > 1 ? `mean of ${answer.total_tasks} tasks` : this.name) : line.task;
      const label = isSeveral ? (answer.lines.length > 1 ? `${source.label} ${task}` : source.label) : task;
      return { ...lineOf(label, line.task, source.key, line.points), hasBand: line.task === "*" || answer.lines.length === 1, colour: isSeveral ? index : place };
    });
  }

  /** Live points of this series. */
  add(points) {
    if (!this.isLoaded || this.settings.range) return;
    for (const point of points) {
      const line = this.lines.find(({ task }) => task === point.task);
      if (!line || (line.points.at(-1)?.[0] ?? 0) >= point.at) continue;
      line.points.push([point.at, point.step, point.generation, point.value, point.least ?? point.value, point.largest ?? point.value]);
      // Fetched again, with as many points as before: a page that stays open does not grow.
      if (line.points.length > 2400) this.isLoaded = false;
    }
    if (this.isVisible && !this.isLoaded) this.refresh();
    else this.draw();
  }

  async render() {
    if (!this.isVisible) return;
    if (!this.lines.some(({ points }) => points.length)) {
      this.dropChart();
      this.say("No values yet");
      return;
    }
    const { axis, log, smooth } = this.settings;
    const shape = JSON.stringify([axis, log, Boolean(smooth), this.lines.map(({ label }) => label), this.lines.map(({ points }) => points.length < 40)]);
    this.palette ??= theme();
    if (this.chart && shape === this.shape) {
      const next = shaped(this.lines, this.settings, this.palette);
      if (next.data.length === this.chart.data.length) {
        this.chart.setData(next.data);
        this.showValues(null);
        return;
      }
    }
    const uPlot = await loadUplot().catch((error) => this.say(error.message));
    if (!uPlot || !this.isVisible) return;
    this.dropChart();
    this.plot.replaceChildren();
    this.shape = shape;
    this.chart = createChart(uPlot, this.plot, {
      name: this.name, lines: this.lines, settings: this.settings, palette: this.palette, height: this.isWide ? HEIGHT + 190 : HEIGHT,
      marks: this.marks, onzoom: this.onzoom, oncursor: (index) => this.showValues(index), syncKey: this.syncKey,
    });
    this.showValues(null);
  }

  /** The values at the cursor, or the newest ones. */
  showValues(index) {
    const { chart, lines } = this;
    if (!chart) return;
    const head = index === null || index === undefined ? "" : xText(chart.data[0][index], this.settings.axis);
    const texts = lines.map((line) => {
      const column = chart.data[line.column] ?? [];
      const value = index === null || index === undefined ? column.findLast((each) => each !== null) : near(column, index);
      return value === undefined || value === null ? "–" : this.format(value);
    });
    if (this.values.childElementCount !== lines.length + 1) {
      fill(this.values, h("span"), lines.map((line, place) => h("span", {}, h("i", { class: "swatch", style: { "--kind": `var(--${colourName(line.colour ?? place)})` } }), h("em", { class: "sr" }), h("span"), h("b"))));
    }
    setText(this.values.firstChild, head || (this.isPartial ? "still reading" : this.cut ? `first ${MOST_LINES} tasks` : ""));
    lines.forEach((line, place) => {
      const entry = this.values.children[place + 1];
      setText(entry.children[2], lines.length > 1 || line.label !== this.name ? line.label : "");
      setText(entry.children[3], texts[place]);
    });
  }

  setWide() {
    this.isWide = !this.isWide;
    this.element.classList.toggle("wide", this.isWide);
    this.widen.setAttribute("aria-pressed", String(this.isWide));
    this.dropChart();
    this.draw();
  }

  restyle() {
    this.palette = null;
    this.dropChart();
    this.draw();
  }

  resize() {
    if (this.chart) this.chart.setSize({ width: Math.max(120, this.plot.clientWidth), height: this.chart.height });
  }

  say(text) {
    this.dropChart();
    fill(this.plot, h("div", { class: "plot-note", text }));
  }

  dropChart() {
    this.chart?.destroy();
    this.chart = null;
  }

  async savePicture() {
    if (!this.chart) return;
    download(await picture(this.chart, this.name, this.lines, this.palette), `${this.fileName()}.png`);
  }

  saveValues() {
    if (this.sources.length > 1) {
      download(new Blob([toCsv(this.name, this.lines)], { type: "text/csv" }), `${this.fileName()}.csv`);
      return;
    }
    const task = this.task();
    const path = runPath(this.sources[0].key, `/series.csv${query({ name: this.name, task: task === "mean" || task === "each" ? "" : task })}`);
    h("a", { href: path, download: `${this.fileName()}.csv` }).click();
  }

  fileName() {
    return [...this.sources.map(({ label }) => label), this.name].join("-").replace(/[^\w.-]+/g, "_").slice(0, 120);
  }

  close() {
    clearTimeout(this.again);
    this.latest.cancel();
    this.draw.cancel();
    this.isVisible = false;
    this.dropChart();
  }
}

/** The value at this place, or the one before it: lines have no value in every interval. */
function near(column, index) {
  for (let place = index; place >= 0; place--) if (column[place] !== null && column[place] !== undefined) return column[place];
  return null;
}

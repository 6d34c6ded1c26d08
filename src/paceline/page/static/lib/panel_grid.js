// Panels side by side with their common settings: axis, smoothing, logarithmic scale, and which tasks.

import { debounced, empty, fill, h } from "./dom.js";
import { bind } from "./keys.js";
import { setParams } from "./route.js";
import { Panel } from "./panel.js";
import { loadUplot } from "./uplot.js";

const AXES = [["step", "Step"], ["time", "Time"], ["elapsed", "Elapsed"]];

export const settingsOf = (params, axis = "step") => ({
  axis: AXES.some(([id]) => id === params.get("x")) ? params.get("x") : axis,
  smooth: Math.min(0.99, Math.max(0, Number(params.get("smooth")) || 0)),
  log: params.get("log") === "1",
  task: params.get("task") || "mean",
  range: null,
});

/** The controls. `change(changes)` is called with what was changed. */
export function controls(settings, change, { axes = AXES, defaultAxis = "step" } = {}) {
  const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(settings.smooth), "aria-label": "Smoothing" });
  const shown = h("span", { class: "num", text: settings.smooth.toFixed(2) });
  slider.addEventListener("input", () => {
    shown.textContent = Number(slider.value).toFixed(2);
    change({ smooth: Number(slider.value) });
    rememberSmooth({ smooth: Number(slider.value) ? slider.value : "" });
  });
  const buttons = axes.map(([id, name]) => h("button", { type: "button", text: name, "aria-pressed": String(settings.axis === id), onclick: () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === name));
    change({ axis: id, range: null });
    setParams({ x: id === defaultAxis ? "" : id });
  } }));
  const log = h("button", { type: "button", text: "Log scale", "aria-pressed": String(settings.log), onclick: () => {
    const isLog = log.getAttribute("aria-pressed") !== "true";
    log.setAttribute("aria-pressed", String(isLog));
    change({ log: isLog });
    setParams({ log: isLog });
  } });
  const rememberSmooth = debounced(setParams, 200);
  const element = [h("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, buttons), log, h("label", { class: "field" }, "Smoothing", slider, shown)];
  return { element, unbind: bind("Curves", [["l", "Logarithmic scale", () => log.click()], ["x", "Next horizontal axis", () => buttons[(buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true") + 1) % buttons.length].click()], ["0", "Whole range", () => change({ range: null })]]) };
}

export class PanelGrid {
  /** `panels()` options: see Panel. `onvisible(names)`: which series are on the screen. */
  constructor(root, settings, { onvisible = () => {}, marks } = {}) {
    Object.assign(this, { root, settings, marks });
    this.panels = new Map(); // by series and task
    loadUplot().catch(() => {}); // while the first values are fetched
    this.tellVisible = debounced(() => onvisible(this.visible().map((panel) => panel.name)), 200);
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) target.panel?.setVisible(isIntersecting);
      this.tellVisible();
    }, { rootMargin: "150px" });
    this.onresize = debounced(() => this.panels.forEach((panel) => panel.resize()), 100);
    this.onthemechange = () => this.panels.forEach((panel) => panel.restyle());
    addEventListener("resize", this.onresize);
    addEventListener("themechange", this.onthemechange);
    this.reload = debounced(() => this.panels.forEach((panel) => panel.load()), 250);
  }

  /** `groups`: [[title, [{name, title, sources, fixedTask}]]]. Panels that stay keep their data. */
  show(groups, nothing = empty("No curves yet", "Programs report numbers with paceline.report(step=..., loss=...).")) {
    const kept = new Set();
    const sections = groups.filter(([, list]) => list.length).map(([title, list]) => {
      const elements = list.map((options) => {
        const id = `${options.name} ${options.fixedTask ?? ""}`;
        kept.add(id);
        if (!this.panels.has(id)) this.create(id, options);
        return this.panels.get(id).element;
      });
      return [title ? h("h2", { class: "group-title", text: title }) : null, h("div", { class: "panels" }, elements)];
    });
    for (const [id, panel] of this.panels) {
      if (kept.has(id)) continue;
      this.observer.unobserve(panel.element);
      panel.close();
      this.panels.delete(id);
    }
    fill(this.root, sections.length ? sections : nothing);
  }

  create(id, options) {
    const panel = new Panel({ ...options, settings: this.settings, marks: this.marks, syncKey: "panels", onzoom: (range) => this.change({ range }) });
    panel.element.panel = panel;
    this.panels.set(id, panel);
    this.observer.observe(panel.element);
  }

  change(changes) {
    Object.assign(this.settings, changes);
    for (const panel of this.panels.values()) {
      if ("axis" in changes || "log" in changes) panel.dropChart();
      panel.draw();
    }
    if ("range" in changes || "task" in changes) this.reload();
  }

  add(points) {
    for (const panel of this.panels.values()) {
      const mine = points.filter(({ name }) => name === panel.name);
      if (mine.length) panel.add(mine);
    }
  }

  visible() {
    return [...this.panels.values()].filter((panel) => panel.isVisible);
  }

  close() {
    this.observer.disconnect();
    this.reload.cancel();
    this.tellVisible.cancel();
    this.onresize.cancel();
    removeEventListener("resize", this.onresize);
    removeEventListener("themechange", this.onthemechange);
    for (const panel of this.panels.values()) panel.close();
  }
}

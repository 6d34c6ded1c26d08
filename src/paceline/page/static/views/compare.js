// Several runs over each other: their curves, their numbers, and what differs in their plans.

import { get, runPath } from "../lib/api.js";
import { empty, fill, h, problem } from "../lib/dom.js";
import { count, duration, number, percent, runTime, speed, when } from "../lib/format.js";
import { controls, PanelGrid, settingsOf } from "../lib/panel_grid.js";
import { colourName } from "../lib/chart.js";
import { compareHref, runHref } from "../lib/route.js";

const MOST = 8; // runs: as many as there are colours
const REFRESH_MS = 10_000;
const MOST_DIFFERENCES = 200;
const FACTS = [
  ["Status", (run) => h("span", { class: `status ${run.status}`, text: run.status })],
  ["Steps", (run) => count(run.steps)],
  ["Speed", (run) => speed(run.steps_per_s)],
  ["Goodput", (run) => percent(run.goodput?.share)],
  ["Restarts", (run) => (run.restarts?.length ? `${run.restart_count ?? run.restarts.length}: ${[...new Set(run.restarts.map(({ cause }) => cause))].join(", ")}` : "0")],
  ["Tasks", (run) => count(run.task_count)],
  ["Duration", (run) => duration(runTime(run))],
  ["Started", (run) => when(run.started)],
  ["Who", (run) => run.who ?? "–"],
  ["Where", (run) => run.where ?? "–"],
];

export function mount(root, route) {
  const keys = [...new Set(route.params.getAll("run"))].slice(0, MOST);
  const settings = settingsOf(route.params, "step");
  const facts = h("div", { class: "card flush scroll-x", tabindex: "0", role: "region", "aria-label": "Numbers of the runs" }, h("p", { class: "loading", text: "Loading…" }));
  const panels = h("div", { class: "stack" });
  const differences = h("section", { class: "card" }, h("h2", { text: "Differences between the plans" }), h("p", { class: "muted", text: "Loading…" }));
  const grid = new PanelGrid(panels, settings);
  const { element, unbind } = controls(settings, (changes) => grid.change(changes));
  const closeAll = () => {
    clearInterval(timer);
    unbind();
    grid.close();
  };
  let timer = 0;
  if (keys.length < 1) {
    fill(root, empty("No runs to compare", h("a", { href: "#/", text: "Choose some in the list of runs" })));
    return { unmount: closeAll };
  }
  root.append(h("h1", { text: "Compare" }), facts, h("div", { class: "bar" }, element), panels, differences);
  let runs = [];

  async function load() {
    try {
      runs = await Promise.all(keys.map((key) => get(runPath(key)).catch((error) => ({ key, run: key, error }))));
      showFacts();
      const listed = await Promise.all(keys.map((key) => get(runPath(key, "/series")).catch(() => ({ series: [] }))));
      showCurves(listed.map(({ series }) => series));
    } catch (error) {
      fill(facts, problem(error, load));
    }
  }

  function showFacts() {
    const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.metrics ?? {})))];
    const rows = [...FACTS, ...metrics.map((name) => [name, (run) => number(run.metrics?.[name])])];
    const cells = (run) => rows.map(([name, value]) => h("td", { class: "num nowrap" }, run.error ? (name === "Status" ? run.error.message : "–") : value(run)));
    fill(facts, h("table", { class: "compare" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "Run" }), rows.map(([name]) => h("th", { scope: "col", text: name })), h("th", {}, h("span", { class: "sr", text: "Remove" })))),
      h("tbody", {}, runs.map((run, index) => h("tr", {},
        h("th", { scope: "row" }, h("span", { class: "kind", style: { "--kind": `var(--${colourName(index)})` } }, h("a", { href: runHref(run.key ?? keys[index]), text: run.run }))),
        cells(run),
        h("td", {}, keys.length > 1 ? h("a", { class: "muted", href: compareHref(keys.filter((key) => key !== keys[index])), "aria-label": `Remove ${run.run}`, text: "✕" }) : null))))));
  }

  function showCurves(lists) {
    const order = { metric: 0, evaluation: 1, progress: 2 };
    const kinds = new Map(lists.flat().filter(({ kind }) => kind in order).map(({ name, kind }) => [name, kind]));
    const names = [...kinds.keys()].sort((left, right) => order[kinds.get(left)] - order[kinds.get(right)]);
    const sources = keys.map((key, index) => ({ key, label: runs[index].run }));
    grid.show([["Curves", names.map((name) => ({ name, sources, fixedTask: "mean" }))]]);
  }

  async function compare() {
    const plans = await Promise.all(keys.map((key) => get(runPath(key, "/plan")).then(({ plan }) => flat(plan)).catch(() => new Map())));
    const paths = [...new Set(plans.flatMap((plan) => [...plan.keys()]))];
    const rows = paths.filter((path) => new Set(plans.map((plan) => plan.get(path))).size > 1);
    fill(differences, h("h2", { text: "Differences between the plans" }), rows.length
      ? h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Differences between the plans" }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, h("th", { text: "Setting" }), keys.map((key) => h("th", { text: key })))),
        h("tbody", {}, rows.slice(0, MOST_DIFFERENCES).map((path) => h("tr", {}, h("td", { text: path }), plans.map((plan) => h("td", { text: plan.get(path) ?? "–" })))))))
      : h("p", { class: "muted", text: "None." }),
      rows.length > MOST_DIFFERENCES ? h("p", { class: "muted", text: `and ${count(rows.length - MOST_DIFFERENCES)} more` }) : null);
  }

  timer = setInterval(async () => {
    if (document.hidden || !runs.some((run) => run.is_live)) return;
    await load();
    if (!settings.range) for (const panel of grid.visible()) panel.refresh();
  }, REFRESH_MS);
  load();
  compare();
  return { unmount: closeAll };
}

/** Leaves of a nested object by their path. The name of the run and what is derived from it always differ. */
function flat(value, path = "", into = new Map()) {
  if (value !== null && typeof value === "object") {
    for (const [name, each] of Object.entries(value)) flat(each, path ? `${path}.${name}` : name, into);
  } else if (into.size < 20_000) into.set(path, JSON.stringify(value));
  return into;
}

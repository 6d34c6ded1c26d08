// Curves of a run: each reported metric, the evaluator's, and the speed.

import { get, runPath } from "../lib/api.js";
import { debounced, fill, h, problem } from "../lib/dom.js";
import { seconds } from "../lib/format.js";
import { controls, PanelGrid, settingsOf } from "../lib/panel_grid.js";
import { compareHref } from "../lib/route.js";

const GROUPS = [["metric", "Metrics"], ["evaluation", "Evaluation"], ["progress", "Progress"]];
const LIST_MS = 20_000; // programs may begin to report another metric

export function mount(root, { key, store, params, setParams }) {
  const settings = settingsOf(params);
  const note = h("p", { class: "muted", hidden: true });
  const panels = h("div", { class: "stack" });
  const grid = new PanelGrid(panels, settings, {
    marks: () => (store.status?.restarts ?? []).map(({ at }) => seconds(at)),
    onvisible: subscribe,
  });
  const filter = h("input", { type: "search", value: params.get("only") ?? "", placeholder: "Filter curves", "aria-label": "Filter curves", "data-search": "", oninput: () => {
    setParams({ only: filter.value });
    show();
  } });
  const tasks = h("select", { "aria-label": "Tasks", onchange: () => {
    setParams({ task: tasks.value === "mean" ? "" : tasks.value });
    grid.change({ task: tasks.value });
    subscribe(grid.visible().map(({ name }) => name));
  } });
  const others = h("datalist", { id: "other-runs" });
  const other = h("input", { type: "search", list: "other-runs", placeholder: "Compare with a run", "aria-label": "Compare with a run", autocomplete: "off", onfocus: listOthers, onchange: () => {
    if ([...others.children].some((option) => option.value === other.value)) location.hash = compareHref([key, other.value]);
  } });
  const { element, unbind } = controls(settings, (changes) => grid.change(changes));
  root.append(h("div", { class: "bar" }, filter, h("label", { class: "field" }, "Tasks", tasks), element, other, others), note, panels);

  let series = [];
  function show() {
    const text = filter.value.toLowerCase();
    const chosen = series.filter(({ name }) => name.toLowerCase().includes(text));
    grid.show(GROUPS.map(([kind, title]) => [title, chosen.filter((each) => each.kind === kind).map(({ name, tasks: names }) => ({
      name, title: name === "steps_per_s" ? "steps per second" : name, sources: sources(),
      fixedTask: names.length === 1 ? names[0] : kind === "evaluation" ? "mean" : undefined,
    }))]), note.hidden ? undefined : []);
  }

  const sources = () => [{ key, label: store.status?.run ?? key }];

  function showTasks() {
    const names = [...new Set(series.filter(({ kind }) => kind !== "evaluation").flatMap(({ tasks: list }) => list))];
    const options = [["mean", "Mean and range of all"], ["each", "Each task"], ...names.map((name) => [name, name])];
    const text = JSON.stringify(options);
    if (tasks.dataset.shown === text) return;
    tasks.dataset.shown = text;
    fill(tasks, options.map(([value, name]) => h("option", { value, text: name })));
    tasks.value = options.some(([value]) => value === settings.task) ? settings.task : "mean";
    settings.task = tasks.value;
  }

  const list = () => get(runPath(key, "/series")).then((data) => {
    const isSame = JSON.stringify(data.series) === JSON.stringify(series);
    if (isSame && panels.childElementCount) return;
    series = data.series;
    note.textContent = data.note;
    note.hidden = !data.note;
    showTasks();
    show();
  }).catch((error) => series.length || fill(panels, problem(error, list)));

  function subscribe(names) {
    const task = settings.task;
    const live = names.filter(Boolean);
    store.subscribe(live.length ? { series: [...new Set(live)].sort(), task: task === "mean" ? "*" : task === "each" ? [] : task } : null);
  }

  async function listOthers() {
    const data = await get("api/runs").catch(() => ({ runs: [] }));
    fill(others, data.runs.filter((run) => run.key !== key).slice(0, 200).map((run) => h("option", { value: run.key, text: `${run.job} ${run.status}` })));
  }

  const soon = debounced(list, 2000);
  const stops = [
    store.on("points", (points) => grid.add(points)),
    store.on("again", () => grid.reload()),
    store.on("end", () => grid.reload()),
    store.on("events", ({ events }) => events.some(({ event }) => event === "evaluated") && (soon(), grid.reload())),
  ];
  const timer = setInterval(() => store.status?.is_live && !document.hidden && list(), LIST_MS);
  list();
  return {
    changed(next) {
      if ((next.get("only") ?? "") !== filter.value) {
        filter.value = next.get("only") ?? "";
        show();
      }
    },
    unmount() {
      clearInterval(timer);
      soon.cancel();
      unbind();
      for (const stop of stops) stop();
      grid.close();
    },
  };
}

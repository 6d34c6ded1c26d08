// All runs of this machine and of clusters: filtered, sorted, and chosen for a comparison.

import { post } from "../lib/api.js";
import { coalesced, command, debounced, empty, fill, h, keyed, setText } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { bind } from "../lib/keys.js";
import { compareHref, runHref, setParams } from "../lib/route.js";
import { Stream } from "../lib/stream.js";
import { COLUMNS, createRow, matches, sorted, updateRow } from "./runs_table.js";

const PAGE = 200; // rows; more on request
const GROUPS = [
  ["", "All", () => true],
  ["live", "Running", (run) => run.is_live],
  ["failed", "Failed", (run) => run.status === "failed" || run.status === "damaged"],
  ["ended", "Ended", (run) => !run.is_live],
];

export function mount(root, route) {
  const runs = new Map();
  const state = {
    text: route.params.get("q") ?? "",
    group: route.params.get("status") ?? "",
    sort: route.params.get("sort") ?? "-started",
    chosen: new Set(route.params.getAll("run")),
    shown: PAGE,
    focused: null,
    sources: [],
    isListed: false,
  };
  let visible = [];

  const filter = h("input", {
    type: "search", class: "grow", value: state.text, "data-search": "", "aria-label": "Filter runs", autocomplete: "off", spellcheck: "false",
    placeholder: "Filter: name, who, where, cause", oninput: () => setFilter(filter.value),
  });
  const groups = h("div", { class: "segments", role: "group", "aria-label": "Status" }, GROUPS.map(([id, name]) =>
    h("button", { type: "button", data: { group: id }, onclick: () => change({ group: id }) }, name, " ", h("span", { class: "muted num" }))));
  const compare = h("button", { type: "button", class: "primary", onclick: openComparison });
  const sources = h("div", { class: "bar sources" });
  const head = h("tr", {}, h("th", {}, h("span", { class: "sr", text: "Compare" })), COLUMNS.map((column) =>
    h("th", { class: column.class ?? "", scope: "col", data: { column: column.id } },
      h("button", { type: "button", text: column.title, onclick: () => sortBy(column) }))));
  const body = h("tbody");
  const table = h("table", { class: "runs" }, h("thead", {}, head), body);
  const below = h("div", { class: "below" });
  const summary = h("p", { class: "muted", role: "status" });
  const card = h("div", { class: "card flush scroll-x" }, table);
  root.append(
    h("h1", { class: "sr", text: "Runs" }),
    h("div", { class: "bar" }, filter, groups, compare), sources, card, below, summary,
  );

  const render = coalesced(() => {
    const group = GROUPS.find(([id]) => id === state.group) ?? GROUPS[0];
    const filtered = [...runs.values()].filter((run) => matches(run, state.text));
    for (const [id, , isMember] of GROUPS) {
      const button = groups.querySelector(`[data-group="${id}"]`);
      button.setAttribute("aria-pressed", String(id === group[0]));
      setText(button.lastElementChild, filtered.filter(isMember).length);
    }
    visible = sorted(filtered.filter(group[2]), state.sort);
    for (const cell of head.querySelectorAll("th[data-column]")) {
      const isSorted = state.sort.replace("-", "") === cell.dataset.column;
      if (isSorted) cell.setAttribute("aria-sort", state.sort.startsWith("-") ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    keyed(body, visible.slice(0, state.shown), (run) => run.key, (run) => createRow(run, toggle), (row, run) => {
      updateRow(row, run, state.chosen.has(run.key));
      row.classList.toggle("focused", run.key === state.focused);
    });
    renderCompare();
    renderBelow();
    setText(summary, state.isListed ? `${plural(visible.length, "run")}${visible.length === runs.size ? "" : ` of ${runs.size}`}` : "");
  });

  function renderCompare() {
    const chosen = [...state.chosen].filter((key) => runs.has(key)).length;
    compare.disabled = chosen < 2;
    setText(compare, chosen ? `Compare ${chosen}` : "Compare");
    compare.title = chosen < 2 ? "Choose at least two runs" : "";
  }

  function renderBelow() {
    card.hidden = state.isListed && visible.length === 0;
    if (!state.isListed) fill(below, h("p", { class: "loading", text: "Reading the runs…" }));
    else if (!runs.size) fill(below, empty("No runs yet", "Start one, and it appears here:", command("paceline run job.yaml")));
    else if (!visible.length) fill(below, empty("No run matches", h("button", { type: "button", text: "Clear the filter", onclick: clear })));
    else if (visible.length > state.shown) fill(below, h("p", { class: "loading" }, h("button", { type: "button", text: `Show ${Math.min(PAGE, visible.length - state.shown)} more of ${visible.length}`, onclick: more })));
    else below.replaceChildren();
  }

  function renderSources() {
    const others = state.sources.filter((source) => source.source !== "local" || source.error);
    sources.hidden = !others.length;
    fill(sources, others.length ? h("span", { class: "muted", text: "Clusters" }) : null, others.map((source) => {
      const name = source.namespace ? `${source.name}/${source.namespace}` : source.name;
      const text = { idle: "list", asking: "listing…", listed: plural(source.runs, "run"), failed: "failed: try again" }[source.state] ?? source.state;
      const ask = () => post("api/contexts", { context: source.name, namespace: source.namespace ?? null }).catch(() => {});
      return h("button", {
        type: "button", class: `small source ${source.state}`, title: source.error ? [source.error.what, source.error.remedy].filter(Boolean).join("\n") : "",
        disabled: source.state === "asking" || source.source === "local", onclick: ask,
      }, h("strong", { text: name }), h("span", { class: "muted", text }));
    }), others.filter((source) => source.error).map((source) => h("span", { class: "source-error", text: `${source.name}: ${source.error.what}` })));
  }

  const setFilter = debounced((text) => change({ text }), 120);

  function change(changes) {
    Object.assign(state, changes, { shown: PAGE });
    setParams({ q: state.text, status: state.group, sort: state.sort === "-started" ? "" : state.sort, run: [...state.chosen] });
    render();
  }

  function sortBy(column) {
    const isCurrent = state.sort.replace("-", "") === column.id;
    const descending = isCurrent ? !state.sort.startsWith("-") : column.descending ?? false;
    change({ sort: `${descending ? "-" : ""}${column.id}` });
  }

  function toggle(key) {
    if (!state.chosen.delete(key)) state.chosen.add(key);
    change({});
  }

  function clear() {
    filter.value = "";
    change({ text: "", group: "" });
  }

  function more() {
    state.shown += PAGE;
    render();
  }

  function openComparison() {
    const keys = [...state.chosen].filter((key) => runs.has(key));
    if (keys.length >= 2) location.hash = compareHref(keys);
  }

  function move(by) {
    if (!visible.length) return;
    const index = visible.findIndex((run) => run.key === state.focused);
    const next = visible[Math.max(0, Math.min(visible.length - 1, index < 0 ? 0 : index + by))];
    state.focused = next.key;
    render();
    requestAnimationFrame(() => body.querySelector(".focused")?.scrollIntoView({ block: "nearest" }));
  }

  function apply(changed, gone) {
    for (const run of changed) runs.set(run.key, run);
    for (const key of gone) runs.delete(key);
    state.isListed = true;
    render();
  }

  const unbind = bind("Runs", [
    ["j", "Next run", () => move(1)],
    ["k", "Previous run", () => move(-1)],
    ["ArrowDown", "", () => move(1)],
    ["ArrowUp", "", () => move(-1)],
    ["Enter", "Open the run", () => state.focused && (location.hash = runHref(state.focused))],
    ["x", "Choose the run for a comparison", () => state.focused && toggle(state.focused)],
    ["c", "Compare the chosen runs", openComparison],
  ]);
  const stream = new Stream("api/runs/stream", {
    runs: (data) => {
      runs.clear();
      state.sources = data.sources;
      renderSources();
      apply(data.runs, []);
    },
    change: (data) => {
      if (data.sources) {
        state.sources = data.sources;
        renderSources();
      }
      apply(data.runs ?? [], data.gone ?? []);
    },
  });
  const clockTimer = setInterval(render, 10_000); // durations of live runs
  render();
  return {
    unmount() {
      clearInterval(clockTimer);
      stream.close();
      unbind();
      render.cancel();
      setFilter.cancel();
    },
  };
}

// The table of all runs: its columns, the filter and the order of rows.

import { h, setClass, setText } from "../lib/dom.js";
import { ago, count, duration, natural, percent, plural, runTime, seconds, speed } from "../lib/format.js";
import { runHref } from "../lib/route.js";

const ORDER = ["running", "starting", "paused", "failed", "damaged", "stopped", "abandoned", "succeeded"];

export const COLUMNS = [
  { id: "status", title: "Status", value: (run) => ORDER.indexOf(run.status) },
  { id: "run", title: "Run", value: (run) => run.run },
  { id: "progress", title: "Progress", descending: true, value: (run) => run.steps ?? -1 },
  { id: "speed", title: "Speed", class: "right", descending: true, value: (run) => run.steps_per_s ?? -1 },
  { id: "restarts", title: "Restarts", descending: true, value: (run) => run.restarts },
  { id: "goodput", title: "Goodput", class: "right", descending: true, value: (run) => run.goodput ?? -1 },
  { id: "who", title: "Who", value: (run) => run.who ?? "" },
  { id: "where", title: "Where", value: (run) => run.where ?? "" },
  { id: "started", title: "Started", class: "right", descending: true, value: (run) => seconds(run.started) ?? 0 },
  { id: "time", title: "Duration", class: "right", descending: true, value: (run) => runTime(run) ?? -1 },
];

/** Every word has to occur somewhere. */
export function matches(run, text) {
  if (!text.trim()) return true;
  const parts = [run.run, run.job, run.framework, run.status, run.who, run.where, run.reason, ...Object.keys(run.causes ?? {})];
  const all = parts.join(" ").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export function sorted(runs, sort) {
  const column = COLUMNS.find(({ id }) => id === sort.replace("-", "")) ?? COLUMNS.at(-2);
  const sign = sort.startsWith("-") ? -1 : 1;
  const rows = runs.map((run) => [column.value(run), run]);
  const compare = (left, right) => (typeof left === "string" ? natural(left, right) : left - right);
  rows.sort(([left, one], [right, two]) => sign * compare(left, right) || natural(two.run, one.run));
  return rows.map(([, run]) => run);
}

export function createRow(run, toggle) {
  const cells = Object.fromEntries(COLUMNS.map(({ id, class: name }) => [id, h("td", { class: `c-${id} ${name ?? ""}` })]));
  const row = h("tr", {}, h("td", { class: "c-choose" }, h("input", {
    type: "checkbox", "aria-label": `Compare ${run.run}`, onchange: () => toggle(run.key),
  })), Object.values(cells));
  row.parts = {
    status: h("span"),
    link: h("a", { href: runHref(run.key), class: "run-name" }),
    detail: h("div", { class: "muted detail" }),
    steps: h("span", { class: "num" }),
    meter: h("div", { class: "meter" }, h("span")),
    chips: h("span", { class: "chips" }),
    cells,
  };
  const { parts } = row;
  cells.status.append(parts.status);
  cells.run.append(parts.link, parts.detail);
  cells.progress.append(parts.steps, parts.meter);
  cells.restarts.append(parts.chips);
  row.addEventListener("click", (event) => {
    if (!event.target.closest("a, button, input") && !getSelection().toString()) location.hash = runHref(run.key);
  });
  return row;
}

export function updateRow(row, run, isChosen) {
  const { parts } = row;
  const box = row.firstElementChild.firstElementChild;
  if (box.checked !== isChosen) box.checked = isChosen;
  setClass(parts.status, `status ${run.status}`);
  setText(parts.status, run.status);
  setText(parts.link, run.run);
  setText(parts.detail, run.reason || [run.framework === "none" ? "" : run.framework, run.tasks === null ? "" : plural(run.tasks, "task")].filter(Boolean).join(" · "));
  parts.detail.title = run.reason ?? "";
  setText(parts.steps, run.total_steps ? `${count(run.steps)} of ${count(run.total_steps)}` : run.steps ? `step ${count(run.steps)}` : "–");
  parts.meter.hidden = !run.total_steps;
  if (run.total_steps) parts.meter.firstChild.style.width = `${Math.min(100, (100 * (run.steps ?? 0)) / run.total_steps).toFixed(1)}%`;
  setText(parts.cells.speed, run.is_live || run.steps_per_s ? speed(run.steps_per_s) : "–");
  updateCauses(parts.chips, run);
  setText(parts.cells.goodput, percent(run.goodput, 0));
  setText(parts.cells.who, run.who || "–");
  setText(parts.cells.where, run.where || "–");
  setText(parts.cells.started, ago(run.started));
  parts.cells.started.title = run.started ?? "";
  setText(parts.cells.time, duration(runTime(run)));
}

function updateCauses(chips, run) {
  const text = `${run.restarts} ${JSON.stringify(run.causes ?? {})}`;
  if (chips.shownText === text) return;
  chips.shownText = text;
  chips.parentElement.classList.toggle("none", !run.restarts);
  const causes = Object.entries(run.causes ?? {}).sort(([, left], [, right]) => right - left);
  chips.replaceChildren(run.restarts ? "" : "0", ...causes.map(([cause, times]) => h("span", { class: "chip warn", text: times > 1 ? `${times} × ${cause}` : cause })));
  chips.title = run.last_restart ? `Last: ${run.last_restart.task}: ${run.last_restart.detail}` : "";
}

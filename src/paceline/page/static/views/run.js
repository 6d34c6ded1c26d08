// One run: its header with the numbers that matter, and a tab for each part.

import { get, runPath } from "../lib/api.js";
import { coalesced, fill, h, problem, setClass, setText } from "../lib/dom.js";
import { ago, count, duration, percent, plural, runTime, seconds, speed } from "../lib/format.js";
import { bind } from "../lib/keys.js";
import { runHref, setParams } from "../lib/route.js";
import { RunStore } from "../lib/store.js";

export const TABS = [
  ["overview", "Overview", () => import("../tabs/overview.js")],
  ["timeline", "Timeline", () => import("../tabs/timeline.js")],
  ["curves", "Curves", () => import("../tabs/curves.js")],
  ["tasks", "Tasks", () => import("../tabs/tasks.js")],
  ["output", "Output", () => import("../tabs/output.js")],
  ["restarts", "Restarts", () => import("../tabs/restarts.js")],
  ["resources", "Resources", () => import("../tabs/resources.js")],
  ["snapshots", "Snapshots", () => import("../tabs/snapshots.js")],
  ["events", "Events", () => import("../tabs/events.js")],
  ["job", "Job", () => import("../tabs/job.js")],
];
const FACTS = ["Progress", "Speed", "Goodput", "Restarts", "Tasks", "Duration", "Where"];

export function mount(root, route) {
  const { key } = route;
  const store = new RunStore(key);
  const name = h("h1", { text: key });
  const status = h("span", { class: "status" });
  const meta = h("span", { class: "muted" });
  const notices = h("div", { class: "stack" });
  const stats = h("div", { class: "stats" });
  const fields = Object.fromEntries(FACTS.map((label) => [label, addStat(stats, label)]));
  const meter = h("div", { class: "meter", hidden: true }, h("span"));
  fields.Progress.box.append(meter);
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the run" }, TABS.map(([id, title]) =>
    h("a", { role: "tab", id: `tab-${id}`, href: runHref(key, id), "aria-controls": "panel", text: title })));
  const panel = h("div", { class: "tab", id: "panel", role: "tabpanel", tabindex: "-1" });
  root.append(h("div", { class: "run-head" }, name, status, h("span", { class: "spacer" }), meta), notices, stats, tabs, panel);

  let open = null; // the tab: {id, unmount, changed}
  let turn = 0;

  const render = coalesced(() => {
    const run = store.status;
    if (!run) return;
    setText(name, run.run);
    setClass(status, `status ${run.status}`);
    setText(status, run.status);
    setText(meta, [run.job !== run.run ? run.job : "", run.framework === "none" ? "" : run.framework, run.strategy, run.who, `started ${ago(run.started)}`].filter(Boolean).join(" · "));
    renderStats(run);
    renderNotices(run);
  });

  function renderStats(run) {
    const left = run.total_steps && run.steps_per_s && run.is_live ? (run.total_steps - run.steps) / run.steps_per_s : null;
    set("Progress", run.steps ? `step ${count(run.steps)}` : "–", run.total_steps ? `of ${count(run.total_steps)}${left > 0 ? `, ${duration(left)} left` : ""}` : run.progress_at && run.is_live ? `last ${ago(run.progress_at)}` : "");
    meter.hidden = !run.total_steps;
    if (run.total_steps) meter.firstChild.style.width = `${Math.min(100, (100 * run.steps) / run.total_steps).toFixed(1)}%`;
    set("Speed", speed(run.steps_per_s), run.generations > 1 ? `generation ${run.generations}` : "");
    set("Goodput", percent(run.goodput?.share), run.goodput ? `of ${duration(run.goodput.wall_s)}` : "");
    const causes = [...new Set((run.restarts ?? []).map((restart) => restart.cause))];
    set("Restarts", count(run.restart_count ?? run.restarts?.length ?? 0), causes.join(", "));
    set("Tasks", count(run.task_count), Object.entries(run.task_states ?? {}).map(([state, times]) => `${count(times)} ${state}`).join(", "));
    set("Duration", duration(runTime(run)), run.ended ? `ended ${ago(run.ended)}` : "");
    set("Where", run.where ?? "–", plural((run.hosts ?? []).length, "host"));
  }

  function set(label, value, note) {
    setText(fields[label].value, value);
    setText(fields[label].note, note || "\u00a0");
    fields[label].note.title = note ?? "";
  }

  let shownNotices = "";
  function renderNotices(run) {
    const list = [];
    if (run.reason) list.push([run.status === "failed" || run.status === "damaged" ? "bad" : "info", run.reason]);
    if (run.waiting && run.is_live) list.push(["warn", waitingText(run.waiting)]);
    for (const text of run.reasons ?? []) list.push(["warn", typeof text === "string" ? text : text.text ?? JSON.stringify(text)]);
    for (const text of run.problems ?? []) list.push(["bad", text]);
    const text = JSON.stringify(list);
    if (text === shownNotices) return;
    shownNotices = text;
    fill(notices, list.map(([level, message]) => h("div", { class: `notice ${level}`, text: message })));
    notices.hidden = !list.length;
  }

  async function show(next) {
    const tab = TABS.find(([id]) => id === next.tab) ?? TABS[0];
    if (open?.id === tab[0]) {
      open.changed?.(next.params);
      return;
    }
    const mine = ++turn;
    open?.unmount?.();
    open = null;
    store.subscribe(null);
    for (const link of tabs.children) {
      const isOpen = link.id === `tab-${tab[0]}`;
      link.setAttribute("aria-selected", String(isOpen));
      link.tabIndex = isOpen ? 0 : -1;
      if (isOpen) link.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    panel.setAttribute("aria-labelledby", `tab-${tab[0]}`);
    const module = await tab[2]();
    if (mine !== turn) return;
    panel.replaceChildren();
    panel.className = `tab tab-${tab[0]}`;
    open = { id: tab[0], ...module.mount(panel, { key, store, params: next.params, setParams }) };
  }

  tabs.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const links = [...tabs.children];
    const next = links[(links.indexOf(document.activeElement) + by + links.length) % links.length];
    next.focus();
    next.click();
  });

  const stops = [
    store.on("status", render),
    store.on("failure", (error) => fill(notices, problem(error)) && (notices.hidden = false)),
    bind("A run", TABS.slice(0, 9).map(([id, title], index) => [String(index + 1), title, () => (location.hash = runHref(key, id))])),
  ];
  // The stream cannot say why it was refused.
  get(runPath(key)).then((data) => store.status ?? store.setStatus(data)).catch((error) => {
    if (error.status !== 404) return;
    turn += 1;
    store.close();
    fill(root, problem(error), h("p", {}, h("a", { href: "#/", text: "All runs" })));
  });
  const timer = setInterval(render, 1000);
  show(route);
  return {
    changed: show,
    unmount() {
      turn += 1;
      clearInterval(timer);
      open?.unmount?.();
      for (const stop of stops) stop();
      render.cancel();
      store.close();
    },
  };
}

function addStat(stats, label) {
  const value = h("div", { class: "value", text: "–" });
  const note = h("div", { class: "note", text: "\u00a0" });
  const box = h("div", { class: "stat" }, h("div", { class: "label", text: label }), value, note);
  stats.append(box);
  return { value, note, box };
}

function waitingText(waiting) {
  const missing = waiting.missing ?? [];
  const names = missing.slice(0, 5).join(", ") + (missing.length > 5 ? ` and ${missing.length - 5} more` : "");
  const since = seconds(waiting.since_s) === null ? "" : ` for ${duration(waiting.since_s)}`;
  const limit = waiting.limit_s ? ` (gives up after ${duration(waiting.limit_s)})` : "";
  return missing.length ? `Waiting for ${names}${since}${limit}` : `Waiting${since}${limit}`;
}

// Restarts of a run: the cause, the traceback, stacks of all tasks, and the output around it.

import { get, query, runPath } from "../lib/api.js";
import { copyButton, debounced, empty, fill, h, problem } from "../lib/dom.js";
import { clock, duration, plural, when } from "../lib/format.js";
import { bind } from "../lib/keys.js";
import { runHref } from "../lib/route.js";

const AROUND = 60; // lines

export function mount(root, { key, store, params, setParams }) {
  let restarts = [];
  let chosen = Number(params.get("number")) || null;
  let isOpen = true;
  let shown = null;
  const list = h("ul", { class: "restart-list card flush" });
  const detail = h("div", { class: "stack" });
  const view = h("div", { class: "restart-view", hidden: true }, list, detail);
  const note = h("div", {}, h("p", { class: "loading", text: "Loading…" }));
  root.append(view, note);

  async function load() {
    try {
      restarts = (await get(runPath(key, "/restarts"))).restarts;
      if (isOpen) show();
    } catch (error) {
      if (isOpen) fill(note, problem(error, load));
    }
  }

  function show() {
    view.hidden = !restarts.length;
    fill(note, restarts.length ? null : empty("No restarts", store.status?.is_live ? "Nothing has failed so far." : "Nothing failed."));
    if (!restarts.length) return;
    const current = restarts.find(({ number }) => number === chosen) ?? restarts.at(-1);
    fill(list, [...restarts].reverse().map((restart) => h("li", {}, h("a", { href: runHref(key, "restarts", { number: restart.number }), "aria-current": restart === current ? "true" : null },
      h("div", { class: "row" }, h("strong", { text: `${restart.number}. ${restart.cause}` }), h("span", { class: "muted", text: when(restart.at) })),
      h("div", { class: "muted" }, `${restart.task}${restart.detail ? `: ${restart.detail}` : ""}`),
      h("div", { class: "muted", text: restart.first_step_after_s === null ? "not recovered yet" : `first step after ${duration(restart.first_step_after_s)}` })))));
    const text = JSON.stringify(current);
    if (text !== shown) {
      shown = text;
      showDetail(current);
    }
  }

  function showDetail(restart) {
    const facts = [["Task", h("a", { href: runHref(key, "output", { task: restart.task, at: restart.at }), text: restart.task })], ["Cause", restart.cause], ["Detail", restart.detail], ["Exit", restart.exit],
      ["At", clock(restart.at, { date: true })], ["Restarted", `${plural(restart.scope?.length ?? 0, "task")}${restart.scope?.length <= 8 ? `: ${restart.scope.join(", ")}` : ""}`],
      ["Resumed from", restart.restore ?? "scratch"], ["First step after", restart.first_step_after_s === null ? "not yet" : duration(restart.first_step_after_s)]];
    const log = h("section", { class: "card", hidden: !restart.log });
    fill(detail,
      h("section", { class: "card" }, h("h2", { text: `Restart ${restart.number}: ${restart.cause}` }), h("dl", { class: "facts" }, facts.filter(([, value]) => value).map(([name, value]) => [h("dt", { text: name }), h("dd", {}, value)]))),
      restart.traceback ? h("section", { class: "card" }, h("div", { class: "bar card-head" }, h("h2", { text: "Traceback" }), h("span", { class: "spacer" }), copyButton(restart.traceback)), h("pre", { class: "text", tabindex: "0", text: restart.traceback })) : null,
      restart.stacks?.length ? stacks(restart.stacks) : null,
      log);
    if (restart.log) showLog(restart, log);
  }

  async function showLog(restart, card) {
    const link = h("a", { href: runHref(key, "output", { task: restart.log.task, position: restart.log.position }), text: "Open in Output" });
    fill(card, h("div", { class: "bar card-head" }, h("h2", { text: `Output of ${restart.log.task} around it` }), h("span", { class: "spacer" }), link), h("p", { class: "muted", text: "Loading…" }));
    try {
      const data = await get(runPath(key, `/logs${query({ task: restart.log.task, position: restart.log.position, direction: "around", limit: AROUND })}`));
      const text = data.lines.map((line) => `${clock(line.at)}  ${line.text}`).join("\n");
      fill(card.lastElementChild, "");
      card.lastElementChild.replaceWith(text ? h("pre", { class: "text", tabindex: "0", text }) : h("p", { class: "muted", text: "Nothing was printed." }));
    } catch (error) {
      card.lastElementChild.replaceWith(problem(error));
    }
  }

  const soon = debounced(load, 400);
  const go = (by) => {
    const index = restarts.findIndex(({ number }) => number === (chosen ?? restarts.at(-1)?.number));
    const next = restarts[Math.max(0, Math.min(restarts.length - 1, index - by))];
    if (next) location.hash = runHref(key, "restarts", { number: next.number });
  };
  const stops = [
    store.on("events", ({ events }) => events.some(({ event }) => ["restart", "recovered", "stacks", "generation-formed"].includes(event)) && soon()),
    store.on("again", soon),
    bind("Restarts", [["j", "Next in the list", () => go(1)], ["k", "Previous in the list", () => go(-1)]]),
  ];
  load();
  return {
    changed(next) {
      chosen = Number(next.get("number")) || null;
      setParams({ number: chosen ?? "" });
      show();
    },
    unmount() {
      isOpen = false;
      soon.cancel();
      for (const stop of stops) stop();
    },
  };
}

/** Tasks with the same stack together: of a thousand tasks in a hang, the one that differs is what matters. */
function stacks(list) {
  const groups = new Map();
  for (const { task, text } of list) {
    const same = text.replace(/0x[0-9a-f]+|\bpid \d+/g, "");
    groups.set(same, { text, tasks: [...(groups.get(same)?.tasks ?? []), task] });
  }
  const sorted = [...groups.values()].sort((left, right) => left.tasks.length - right.tasks.length);
  return h("section", { class: "card" }, h("h2", { text: `Stacks of ${plural(list.length, "task")}` }), sorted.map(({ tasks, text }, index) =>
    h("details", { open: index === 0 }, h("summary", { text: `${tasks.slice(0, 6).join(", ")}${tasks.length > 6 ? ` and ${tasks.length - 6} more` : ""}` }), h("pre", { class: "text", tabindex: "0", text }))));
}

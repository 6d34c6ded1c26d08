// Snapshots of a run: step, size, metrics, the best one; verified on request, with the command to start from one.

import { get, post, runPath } from "../lib/api.js";
import { command, debounced, empty, fill, h, problem } from "../lib/dom.js";
import { bytes, count, number, percent, when } from "../lib/format.js";

const LEVELS = { sound: "good", damaged: "bad", failed: "bad", running: "info" };

export function mount(root, { key, store }) {
  const card = h("div", { class: "card flush scroll-x" });
  const from = h("section", { class: "card", hidden: true });
  root.append(card, from);
  fill(card, h("p", { class: "loading", text: "Reading the store…" }));
  let isOpen = true;
  const timers = new Set();

  async function load() {
    try {
      const data = await get(runPath(key, "/snapshots"));
      if (isOpen) show(data);
    } catch (error) {
      if (isOpen) fill(card, problem(error, load));
    }
  }

  function show({ snapshots, address }) {
    if (!snapshots.length) {
      fill(card, empty("No snapshots", store.status?.is_live ? "None is committed yet." : "The run committed none."));
      return;
    }
    fill(card, h("table", { class: "snapshots" },
      h("thead", {}, h("tr", {}, ["Step", "Snapshot", "Committed", "Size", "Metrics", "Integrity", "Start a run from it"].map((title, index) => h("th", { scope: "col", class: index === 3 || index === 0 ? "right" : "", text: title })))),
      h("tbody", {}, snapshots.map(row))));
    from.hidden = false;
    fill(from, h("h2", { text: "Location" }), command(address ?? ""));
  }

  function row(snapshot) {
    const result = h("span");
    const verify = h("button", { type: "button", class: "small", text: "Verify", "aria-label": `Verify ${snapshot.snapshot}`, onclick: () => check(snapshot, result, verify) });
    if (snapshot.verified) showResult(snapshot.verified, result, verify);
    if (snapshot.verified?.state === "running") poll(snapshot, result, verify);
    const metrics = { ...snapshot.metrics, ...snapshot.evaluated?.metrics };
    return h("tr", {},
      h("td", { class: "right num", text: count(snapshot.step) }),
      h("td", {}, h("span", { class: "mono", text: snapshot.snapshot }), " ", snapshot.is_best ? h("span", { class: "chip good", text: "best" }) : null, snapshot.damaged ? h("span", { class: "chip bad", text: "damaged", title: snapshot.damaged }) : null, snapshot.counts === false ? h("span", { class: "chip", text: "superseded" }) : null),
      h("td", { class: "nowrap", text: when(snapshot.at), title: snapshot.at }),
      h("td", { class: "right nowrap num" }, bytes(snapshot.bytes), h("div", { class: "muted", text: `${count(snapshot.files)} files` })),
      h("td", {}, Object.keys(metrics).length ? Object.entries(metrics).slice(0, 8).map(([name, value]) => h("div", { class: "num nowrap" }, h("span", { class: "muted", text: `${name} ` }), number(value))) : h("span", { class: "muted", text: "–" })),
      h("td", {}, h("div", { class: "bar" }, verify, result)),
      h("td", {}, snapshot.command ? command(snapshot.command) : "–"));
  }

  async function check(snapshot, result, button) {
    button.disabled = true;
    try {
      showResult(await post(path(snapshot), {}), result, button);
      poll(snapshot, result, button);
    } catch (error) {
      button.disabled = false;
      fill(result, h("span", { class: "chip bad", text: error.message }));
    }
  }

  const path = (snapshot) => runPath(key, `/snapshots/${encodeURIComponent(snapshot.snapshot)}/verify`);

  function poll(snapshot, result, button) {
    const timer = setTimeout(async () => {
      timers.delete(timer);
      const state = await get(path(snapshot)).catch((error) => ({ state: "failed", problems: [error.message] }));
      if (!isOpen) return;
      showResult(state, result, button);
      if (state.state === "running") poll(snapshot, result, button);
    }, 1000);
    timers.add(timer);
  }

  function showResult(state, result, button) {
    button.disabled = state.state === "running";
    const problems = [...(state.problems ?? []), state.error?.what ?? ""].filter(Boolean);
    const text = state.state === "running" ? `checking ${state.of ? percent(state.bytes / state.of, 0) : "…"}` : state.state;
    fill(result, h("span", { class: `chip ${LEVELS[state.state] ?? ""}`, text, title: problems.join("\n") }), problems.slice(0, 3).map((each) => h("div", { class: "muted", text: each })));
  }

  const soon = debounced(load, 1500);
  const stops = [store.on("events", ({ events }) => events.some(({ event }) => event === "committed" || event === "evaluated") && !timers.size && soon())];
  load();
  return {
    unmount() {
      isOpen = false;
      soon.cancel();
      for (const stop of stops) stop();
      for (const timer of timers) clearTimeout(timer);
    },
  };
}

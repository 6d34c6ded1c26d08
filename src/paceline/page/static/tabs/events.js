// All events of a run, newest first, filtered by kind and text.

import { get, query, runPath } from "../lib/api.js";
import { coalesced, debounced, empty, fill, h, keyed, problem, setText } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { eventItem } from "./overview.js";

const PAGE = 300;
const MOST = 3000; // kept in the page

export function mount(root, { key, store, params, setParams }) {
  const state = { events: [], first: null, total: 0, kind: params.get("kind") ?? "", text: params.get("q") ?? "" };
  const filter = h("input", { type: "search", class: "grow", "data-search": "", value: state.text, placeholder: "Filter events", "aria-label": "Filter events", oninput: () => {
    state.text = filter.value;
    setParams({ q: state.text });
    render();
  } });
  const kinds = h("select", { "aria-label": "Kind of event", onchange: () => {
    state.kind = kinds.value;
    setParams({ kind: state.kind });
    load();
  } });
  const total = h("span", { class: "muted num", role: "status" });
  const list = h("ul", { class: "feed wide" });
  const below = h("div");
  root.append(h("div", { class: "bar" }, filter, h("label", { class: "field" }, "Kind", kinds), total), h("div", { class: "card" }, list, below));
  const known = new Set(["restart", "hang", "task-exited", "generation-formed", "committed", "saved", "evaluated", "warning", "step", "resources"]);
  if (state.kind) known.add(state.kind);

  const render = coalesced(() => {
    const text = state.text.toLowerCase();
    const shown = state.events.filter((event) => !text || `${event.event} ${event.text}`.toLowerCase().includes(text)).slice(-MOST).reverse();
    keyed(list, shown, (event) => event.number, eventItem, () => {});
    setText(total, `${count(shown.length)} shown of ${count(state.total)}`);
    const hasMore = state.events.length && state.first > 0 && state.events.length < MOST;
    fill(below, !state.isLoaded ? h("p", { class: "loading", text: "Loading…" }) : hasMore ? h("p", { class: "loading" }, h("button", { type: "button", text: "Older events", onclick: older })) : shown.length ? null : empty("No events"));
    const options = ["", ...[...known].sort()];
    if (kinds.childElementCount !== options.length) {
      fill(kinds, options.map((kind) => h("option", { value: kind, text: kind || "all except steps" })));
      kinds.value = state.kind;
    }
  });

  async function load() {
    try {
      const data = await get(runPath(key, `/events${query({ newest: 1, limit: PAGE, kind: state.kind })}`));
      Object.assign(state, { events: data.events, total: data.total, isLoaded: true, first: data.events[0]?.number ?? 0 });
      for (const { event } of data.events) known.add(event);
      render();
    } catch (error) {
      fill(below, problem(error, load));
    }
  }

  async function older() {
    const after = Math.max(0, state.first - PAGE);
    const data = await get(runPath(key, `/events${query({ after, limit: PAGE, kind: state.kind })}`)).catch((error) => fill(below, problem(error, older)) && null);
    if (!data) return;
    state.events = [...data.events.filter(({ number }) => number < state.first), ...state.events];
    state.first = after;
    render();
  }

  const again = debounced(load, 100);
  const stops = [
    store.on("again", again),
    store.on("events", ({ events, skipped }) => {
      if (skipped) return again();
      const wanted = events.filter(({ event }) => (state.kind ? event === state.kind : event !== "step" && event !== "resources"));
      for (const { event } of events) known.add(event);
      const last = state.events.at(-1)?.number ?? -1;
      state.events = [...state.events, ...wanted.filter(({ number }) => number > last)].slice(-MOST);
      state.total = Math.max(state.total, store.status?.events ?? 0);
      return render();
    }),
  ];
  load();
  return {
    unmount() {
      for (const stop of stops) stop();
      again.cancel();
      render.cancel();
    },
  };
}

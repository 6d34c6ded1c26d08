// The overview of a run: how its time was spent, its newest numbers, what happened last, and how to go on.

import { get, runPath } from "../lib/api.js";
import { coalesced, command, fill, h, keyed, setText } from "../lib/dom.js";
import { count, duration, number, percent, when } from "../lib/format.js";
import { eventLevel, GOODPUT, kindLabel } from "../lib/kinds.js";
import { runHref } from "../lib/route.js";

const EVENTS = 12;

export function mount(root, { key, store }) {
  const bar = h("div", { class: "goodput-bar", role: "img" });
  const kinds = h("tbody");
  const since = h("p", { class: "muted" });
  const metrics = h("tbody");
  const noMetrics = h("p", { class: "muted", text: "No metrics reported yet." });
  const snapshot = h("dl", { class: "facts" });
  const feed = h("ul", { class: "feed" });
  const warnings = h("ul", { class: "feed" });
  const warningCard = h("section", { class: "card", hidden: true }, h("h2", { text: "Warnings" }), warnings);
  const next = h("div", { class: "stack" });
  let shownNext = "";
  root.append(h("div", { class: "two" },
    h("div", { class: "stack" },
      h("section", { class: "card" }, h("h2", { text: "Goodput: how the time was spent" }), bar, h("table", { class: "goodput-table" }, kinds), since),
      h("section", { class: "card" }, h("h2", { text: "Snapshots" }), snapshot),
      h("section", { class: "card" }, h("h2", { text: "In a terminal" }), next)),
    h("div", { class: "stack" },
      warningCard,
      h("section", { class: "card" }, h("h2", { text: "Newest metrics" }), noMetrics, h("table", { class: "metric-table" }, metrics)),
      h("section", { class: "card" }, h("h2", { text: "Latest events" }), feed,
        h("p", {}, h("a", { href: runHref(key, "events"), text: "All events" }))))));

  const render = coalesced(() => {
    const run = store.status;
    if (!run) return;
    renderGoodput(run.goodput);
    const reported = Object.entries(run.metrics ?? {});
    noMetrics.hidden = reported.length > 0;
    keyed(metrics, reported, ([name]) => name, ([name]) => h("tr", {}, h("td", {}, h("a", { href: runHref(key, "curves", { only: name }), text: name })), h("td")),
      (row, [, value]) => setText(row.lastElementChild, number(typeof value === "object" ? Object.values(value ?? {})[0] : value)));
    renderSnapshot(run);
    const texts = (run.warnings ?? []).slice(-5).reverse();
    warningCard.hidden = !texts.length;
    keyed(warnings, texts.map((text, index) => [index, text]), ([index]) => index, () => h("li", { class: "plain" }, h("span")), (item, [, text]) => setText(item.firstElementChild, text));
    const commands = JSON.stringify([run.next, run.run]);
    if (commands !== shownNext) {
      shownNext = commands;
      fill(next, [...new Set([run.next, `paceline status ${run.run}`, run.is_live ? `paceline stop ${run.run}` : null])].filter(Boolean).map(command),
        /^https?:/.test(run.tensorboard ?? "") ? h("a", { href: run.tensorboard, rel: "noreferrer", target: "_blank", text: "TensorBoard" }) : null);
    }
  });

  function renderGoodput(goodput) {
    const total = goodput?.wall_s || 0;
    const rows = GOODPUT.map(([kind, name]) => [kind, name, goodput?.seconds?.[kind] ?? 0]).filter(([, , value]) => value > 0);
    bar.setAttribute("aria-label", rows.map(([, name, value]) => `${name} ${percent(value / total)}`).join(", ") || "nothing yet");
    keyed(bar, rows, ([kind]) => kind, ([kind, name]) => h("span", { title: name, style: { "--kind": `var(--k-${kind})` } }),
      (part, [, , value]) => (part.style.flexGrow = String(Math.max(value / total, 0.0005).toFixed(5))));
    keyed(kinds, rows, ([kind]) => kind, ([kind, name]) => h("tr", {}, h("td", {}, kindLabel(kind, name)), h("td"), h("td")), (row, [, , value]) => {
      setText(row.children[1], duration(value));
      setText(row.children[2], percent(value / total));
    });
    const notes = [];
    if (goodput?.since) notes.push(`Counted since ${when(goodput.since)}: earlier time is unknown.`);
    if (goodput && goodput.reports_steps === false) notes.push("The program reports no steps: training begins when its tasks start.");
    setText(since, goodput ? notes.join(" ") : "Nothing is known yet.");
  }

  function renderSnapshot(run) {
    const rows = [["Newest saved", mark(run.saved)], ["Newest committed", mark(run.committed)],
      ["Best", run.best ? `${run.best.snapshot}: ${run.best.metric} ${number(run.best.value)}` : "–"], ["Started from", run.from ? String(run.from.snapshot ?? run.from) : "scratch"]];
    keyed(snapshot, rows.flatMap(([name, value]) => [[`${name}:`, name, "dt"], [name, value, "dd"]]), ([id]) => id, ([, , tag]) => h(tag), (element, [, text]) => setText(element, text));
  }

  const mark = (value) => (value ? `${value.step === undefined ? value.snapshot : `step ${count(value.step)}`}, ${when(value.at)}` : "–");

  let events = [];
  const renderEvents = coalesced(() => {
    if (!events.length) {
      fill(feed, h("li", { class: "plain" }, h("span", { class: "muted", text: "Nothing yet." })));
      feed.keyedElements = undefined;
      return;
    }
    if (!feed.keyedElements) feed.replaceChildren();
    keyed(feed, events.slice(-EVENTS).reverse(), (event) => event.number, eventItem, () => {});
  });
  const readEvents = () => get(`${runPath(key, "/events")}?newest=1&limit=${EVENTS}`).then((data) => {
    events = data.events;
    renderEvents();
  }).catch(() => {});
  const stops = [
    store.on("status", render),
    store.on("again", readEvents),
    store.on("events", ({ events: added }) => {
      events = [...events, ...added.filter(({ event }) => event !== "step" && event !== "resources")].slice(-EVENTS);
      renderEvents();
    }),
  ];
  readEvents();
  render();
  return {
    unmount() {
      render.cancel();
      renderEvents.cancel();
      for (const stop of stops) stop();
    },
  };
}

export function eventItem(event) {
  return h("li", {}, h("time", { datetime: event.at, title: event.at, text: when(event.at) }),
    h("span", { class: `event ${eventLevel(event.event)}`, text: event.event }), h("span", { text: event.text }));
}

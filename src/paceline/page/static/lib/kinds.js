// How time is spent: names and colours of kinds, for bars, legends and the timeline.

import { h } from "./dom.js";

export const GOODPUT = [
  ["queued", "queued"],
  ["waiting", "waiting for hosts"],
  ["starting", "starting"],
  ["training", "training"],
  ["stalled", "stalled by snapshots"],
  ["lost", "lost and redone"],
  ["restarting", "restarting"],
  ["paused", "paused"],
  ["evaluating", "evaluating"],
  ["ending", "ending"],
];

export const TIMELINE = ["queued", "waiting", "starting", "training", "snapshot", "restarting", "hang", "evaluating", "failed", "mixed"];

/** After these, a task no longer runs: drawn as a thin line. */
export const OVER = new Set(["succeeded", "failed", "ended"]);

export const kindLabel = (kind, text = kind) => h("span", { class: "kind", text, style: { "--kind": `var(--k-${kind}, var(--k-mixed))` } });

const BAD = new Set(["restart", "hang", "member-lost", "not-finite", "ingest-failed", "failed"]);
const WARN = new Set(["warning", "spike", "waiting", "task-exited", "stacks"]);
const GOOD = new Set(["recovered", "committed", "evaluated", "run-ended"]);

export const eventLevel = (event) => (BAD.has(event) ? "bad" : WARN.has(event) ? "warn" : GOOD.has(event) ? "good" : "");

/** The colours of CSS variables, for a canvas. */
export function colours(names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

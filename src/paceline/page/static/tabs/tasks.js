// The tasks of a run in a table, and their stacks on request.

import { post, runPath } from "../lib/api.js";
import { coalesced, copyButton, empty, fill, h, problem, setClass, setText } from "../lib/dom.js";
import { bytes, count, duration, number } from "../lib/format.js";
import { Grid } from "../lib/grid.js";
import { bind } from "../lib/keys.js";
import { runHref } from "../lib/route.js";

export function mount(root, { key, store, params, setParams }) {
  const href = (task) => runHref(key, "output", { task: task.task });
  const now = () => (store.status?.is_live ? Date.now() / 1000 : null);
  const columns = [
    { id: "task", title: "Task", width: "minmax(110px, 1.2fr)", value: (task) => task.task, render: (cell, task) => {
      cell.link ??= cell.appendChild(h("a", {}));
      setText(cell.link, task.task);
      cell.link.href = href(task);
    } },
    { id: "state", title: "State", width: "110px", value: (task) => task.state, render: (cell, task) => {
      cell.status ??= cell.appendChild(h("span"));
      setClass(cell.status, `status ${task.state}`);
      setText(cell.status, task.state);
    } },
    { id: "phase", title: "Now", width: "150px", value: (task) => task.phase ?? "", render: (cell, task) => {
      cell.kind ??= cell.appendChild(h("span", { class: "kind" }));
      setText(cell.kind, task.exit || task.phase || "–");
      cell.kind.style.setProperty("--kind", `var(--k-${task.phase}, var(--k-mixed))`);
    } },
    { id: "since", title: "For", width: "100px", class: "right", value: (task) => task.since ?? 0, render: (cell, task) => setText(cell, task.since && now() ? duration(now() - task.since) : "–") },
    { id: "step", title: "Step", width: "90px", class: "right", value: (task) => task.step ?? -1, render: (cell, task) => setText(cell, count(task.step)) },
    { id: "memory", title: "Memory", width: "90px", class: "right", value: (task) => task.memory ?? -1, render: (cell, task) => setText(cell, bytes(task.memory)) },
    { id: "generation", title: "Generation", width: "86px", class: "right", value: (task) => task.generation },
    { id: "host", title: "Host", width: "minmax(90px, 1fr)", value: (task) => task.host },
    { id: "pid", title: "PID", width: "72px", class: "right", value: (task) => task.pid ?? -1, render: (cell, task) => setText(cell, task.pid ?? "–") },
    { id: "metrics", title: "Metrics", width: "minmax(160px, 2fr)", value: (task) => Object.values(task.metrics ?? {})[0] ?? -1, render: (cell, task) => {
      const text = Object.entries(task.metrics ?? {}).map(([name, value]) => `${name} ${number(value)}`).join("  ");
      setText(cell, text || "–");
      cell.title = text;
    } },
  ];
  const grid = new Grid(columns, {
    keyOf: (task) => task.task, label: "Tasks", sort: params.get("sort") ?? "", leastWidth: "1120px",
    onsort: (sort) => setParams({ sort }), onopen: (task) => (location.hash = href(task)),
  });
  const filter = h("input", { type: "search", class: "grow", "data-search": "", value: params.get("q") ?? "", placeholder: "Filter: task, state, host", "aria-label": "Filter tasks", oninput: () => {
    setParams({ q: filter.value });
    render();
  } });
  const total = h("span", { class: "muted num", role: "status" });
  const stacks = h("button", { type: "button", text: "Stacks now", onclick: () => showStacks() });
  const note = h("div");
  root.append(h("div", { class: "bar" }, filter, total, stacks), h("div", { class: "card flush" }, grid.element), note);

  const render = coalesced(() => {
    const terms = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [];
    for (const name of store.names) {
      const task = store.tasks.get(name);
      if (task && terms.every((term) => `${name} ${task.state} ${task.phase} ${task.host} ${task.exit ?? ""}`.toLowerCase().includes(term))) rows.push(task);
    }
    grid.setRows(rows);
    setText(total, `${count(rows.length)} of ${count(store.names.length)}`);
    stacks.hidden = !store.status?.is_live;
    fill(note, store.names.length || !store.status ? null : empty("No tasks yet", "The run has not started any."));
  });

  async function showStacks() {
    const text = h("pre", { class: "text", tabindex: "0", text: "Asking the tasks for their stacks…" });
    const dialog = h("dialog", { "aria-labelledby": "stacks-title" }, h("header", {}, h("h2", { id: "stacks-title", text: "Stacks of tasks" }),
      h("form", { method: "dialog", class: "bar" }, copyButton(() => text.textContent), h("button", { text: "Close" }))), text);
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    try {
      const shown = grid.rows.length < store.names.length ? { tasks: grid.rows.map(({ task }) => task) } : {};
      text.textContent = (await post(runPath(key, "/stacks"), shown)).text;
    } catch (error) {
      text.replaceWith(problem(error));
    }
  }

  const timer = setInterval(render, 1000);
  const stops = [
    store.on("tasks", render),
    store.on("status", render),
    bind("Tasks", [["j", "Next task", () => grid.move(1)], ["k", "Previous task", () => grid.move(-1)], ["Enter", "Output of the task", () => grid.openChosen()], ["s", "Stacks of the tasks now", () => stacks.hidden || showStacks()]]),
  ];
  render();
  return {
    unmount() {
      clearInterval(timer);
      for (const stop of stops) stop();
      render.cancel();
      grid.close();
    },
  };
}

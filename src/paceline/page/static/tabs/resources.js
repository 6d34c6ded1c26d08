// What hosts and tasks use: curves over time, and a table of each.

import { get, runPath } from "../lib/api.js";
import { empty, fill, h, problem, setText } from "../lib/dom.js";
import { bytes, number, percent, rate } from "../lib/format.js";
import { Grid, meterCell } from "../lib/grid.js";
import { controls, PanelGrid, settingsOf } from "../lib/panel_grid.js";

const REFRESH_MS = 5000;
const TITLES = {
  cpu: "CPU cores of tasks", memory: "Memory of tasks", memory_peak: "Peak memory of tasks", read_bytes_per_s: "Read from disks", written_bytes_per_s: "Written to disks",
  host_memory: "Memory of hosts", host_received_bytes_per_s: "Received from the network", host_sent_bytes_per_s: "Sent to the network",
};
const GPU = /^host_gpu_(\d+)_(memory|utilization)$/;
const AXES = [["time", "Time"], ["elapsed", "Elapsed"]];

function titleOf(name) {
  const gpu = GPU.exec(name);
  if (gpu) return `${gpu[2] === "memory" ? "Memory" : "Utilization"} of GPU ${gpu[1]}`;
  return Object.hasOwn(TITLES, name) ? TITLES[name] : name.replaceAll("_", " ");
}

const last = (value) => value?.last ?? null;
const peak = (value) => value?.peak ?? null;
const limitOf = (value) => (typeof value === "object" ? value?.last ?? value?.peak : value) ?? null;

function memoryColumn(id, title, of, limit) {
  return { id, title, width: "190px", value: (row) => of(row) ?? -1, render: (cell, row) => meterCell(cell, bytes(of(row)), limit(row) ? of(row) / limit(row) : null) };
}

const HOSTS = [
  { id: "host", title: "Host", width: "minmax(120px, 1fr)", value: ({ host }) => host },
  { id: "joined", title: "Connected", width: "90px", value: (row) => (row.is_joined ? "yes" : "no"), render: (cell, row) => {
    cell.chip ??= cell.appendChild(h("span"));
    cell.chip.className = row.is_joined ? "chip good" : "chip bad";
    setText(cell.chip, row.is_joined ? "yes" : "no");
  } },
  { id: "tasks", title: "Tasks", width: "64px", class: "right", value: ({ tasks }) => tasks?.length ?? 0 },
  memoryColumn("memory", "Memory", (row) => last(row.memory), (row) => limitOf(row.memory_limit)),
  { id: "peak", title: "Peak", width: "84px", class: "right", value: (row) => peak(row.memory) ?? -1, render: (cell, row) => setText(cell, bytes(peak(row.memory))) },
  { id: "received", title: "Received", width: "104px", class: "right", value: (row) => last(row.received_bytes_per_s) ?? -1, render: (cell, row) => setText(cell, rate(last(row.received_bytes_per_s))) },
  { id: "sent", title: "Sent", width: "104px", class: "right", value: (row) => last(row.sent_bytes_per_s) ?? -1, render: (cell, row) => setText(cell, rate(last(row.sent_bytes_per_s))) },
  { id: "gpus", title: "GPUs", width: "minmax(140px, 1.4fr)", value: (row) => gpuMean(row) ?? -1, render: (cell, row) => {
    const gpus = Object.entries(row.gpus ?? {});
    setText(cell, gpus.length ? gpus.map(([index, gpu]) => `${index}: ${percent(last(gpu.utilization), 0)}, ${bytes(last(gpu.memory))}`).join("   ") : "–");
    cell.title = cell.textContent;
  } },
];
const TASKS = [
  { id: "task", title: "Task", width: "minmax(120px, 1fr)", value: ({ task }) => task },
  { id: "host", title: "Host", width: "minmax(100px, 1fr)", value: ({ host }) => host },
  { id: "cpu", title: "CPU", width: "90px", class: "right", value: (row) => last(row.cpu) ?? -1, render: (cell, row) => setText(cell, last(row.cpu) === null ? "–" : `${number(Number(last(row.cpu).toFixed(2)))} cores`) },
  memoryColumn("memory", "Memory", (row) => last(row.memory), (row) => limitOf(row.memory_limit)),
  { id: "peak", title: "Peak", width: "84px", class: "right", value: (row) => peak(row.memory) ?? -1, render: (cell, row) => setText(cell, bytes(peak(row.memory))) },
  { id: "read", title: "Disk read", width: "104px", class: "right", value: (row) => last(row.read_bytes_per_s) ?? -1, render: (cell, row) => setText(cell, rate(last(row.read_bytes_per_s))) },
  { id: "written", title: "Disk written", width: "104px", class: "right", value: (row) => last(row.written_bytes_per_s) ?? -1, render: (cell, row) => setText(cell, rate(last(row.written_bytes_per_s))) },
];

function gpuMean(row) {
  const values = Object.values(row.gpus ?? {}).map((gpu) => last(gpu.utilization)).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

const height = (rows) => `${Math.min(420, 36 + 32 * Math.max(1, rows))}px`;

export function mount(root, { key, store, params, setParams }) {
  const settings = { ...settingsOf(params, "time"), task: params.get("of") || "mean" };
  const panels = h("div", { class: "stack" });
  const grid = new PanelGrid(panels, settings);
  const { element, unbind } = controls(settings, (changes) => grid.change(changes), { axes: AXES, defaultAxis: "time" });
  const whom = h("select", { "aria-label": "Curves of", onchange: () => choose(whom.value) });
  const pick = (name) => choose(name === settings.task ? "mean" : name);
  const hosts = new Grid(HOSTS, { keyOf: ({ host }) => host, label: "Hosts", leastWidth: "1020px", height: height(1), leastHeight: "0", onopen: ({ host }) => pick(host) });
  const tasks = new Grid(TASKS, { keyOf: ({ task }) => task, label: "Tasks", leastWidth: "860px", height: height(1), leastHeight: "0", onopen: ({ task }) => pick(task) });
  const note = h("div");
  root.append(note, h("div", { class: "bar" }, h("label", { class: "field" }, "Curves of", whom), element), panels,
    h("h2", { text: "Hosts" }), h("div", { class: "card flush" }, hosts.element), h("h2", { text: "Tasks" }), h("div", { class: "card flush" }, tasks.element));

  let series = [];
  function choose(name) {
    settings.task = name;
    whom.value = name;
    setParams({ of: name === "mean" ? "" : name });
    show();
    grid.change({ task: name });
  }

  function show() {
    const mine = series.filter(({ name, tasks: names }) => !/limit$/.test(name) && (settings.task === "mean" || names.includes(settings.task)));
    grid.show([["Over time", mine.map(({ name }) => ({ name, title: titleOf(name), sources: [{ key, label: store.status?.run ?? key }] }))]],
      empty("Nothing measured yet", "Hosts report what they use every 10 seconds."));
  }

  async function load() {
    try {
      const [data, listed] = await Promise.all([get(runPath(key, "/hosts")), get(runPath(key, "/series"))]);
      note.replaceChildren();
      hosts.element.style.height = height(data.hosts.length);
      tasks.element.style.height = height(data.tasks.length);
      hosts.setRows(data.hosts);
      tasks.setRows(data.tasks);
      const names = [...data.hosts.map(({ host }) => host), ...data.tasks.map(({ task }) => task)];
      if (whom.childElementCount !== new Set(names).size + 1) {
        fill(whom, h("option", { value: "mean", text: "Mean and range of all" }), [...new Set(names)].map((name) => h("option", { value: name, text: name })));
        whom.value = settings.task;
      }
      const resources = listed.series.filter(({ kind }) => kind === "resource");
      const isSame = JSON.stringify(resources.map(({ name }) => name)) === JSON.stringify(series.map(({ name }) => name));
      series = resources;
      if (!isSame || !panels.childElementCount) show();
      else for (const panel of grid.visible()) panel.refresh();
    } catch (error) {
      fill(note, problem(error, load));
    }
  }

  const timer = setInterval(() => store.status?.is_live && !document.hidden && load(), REFRESH_MS);
  load();
  return {
    unmount() {
      clearInterval(timer);
      unbind();
      grid.close();
      hosts.close();
      tasks.close();
    },
  };
}

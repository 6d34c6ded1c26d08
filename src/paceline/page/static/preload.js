// Fetches all modules of the view that the address names at once: the browser would find each only in the one that
// imports it. Not a module itself: those run later. A test compares the lists with the imports.
(() => {
  const CHARTS = ["lib/panel_grid.js", "lib/panel.js", "lib/chart.js", "lib/lines.js", "lib/kinds.js", "lib/uplot.js"];
  const VIEWS = {
    runs: ["views/runs.js", "lib/stream.js", "views/runs_table.js"],
    compare: ["views/compare.js", ...CHARTS],
    run: ["views/run.js", "lib/stream.js", "lib/store.js"],
  };
  const TABS = {
    overview: ["tabs/overview.js", "lib/kinds.js"],
    timeline: ["tabs/timeline.js", "lib/kinds.js", "lib/timeline_canvas.js", "lib/timeline_data.js"],
    curves: ["tabs/curves.js", ...CHARTS],
    tasks: ["tabs/tasks.js", "lib/grid.js"],
    output: ["tabs/output.js", "lib/log_lines.js", "lib/log_search.js", "lib/log_window.js"],
    restarts: ["tabs/restarts.js"],
    resources: ["tabs/resources.js", "lib/grid.js", ...CHARTS],
    snapshots: ["tabs/snapshots.js"],
    events: ["tabs/events.js", "tabs/overview.js", "lib/kinds.js"],
    job: ["tabs/job.js"],
  };

  const preload = (href, attributes) => document.head.append(Object.assign(document.createElement("link"), { href, ...attributes }));
  const [view = "runs", , tab = "overview"] = location.hash.replace(/^#\/?/, "").split("?", 1)[0].split("/").filter(Boolean);
  const modulesOf = (lists, name) => (Object.hasOwn(lists, name) ? lists[name] : []);
  const modules = [...modulesOf(VIEWS, view), ...(view === "run" ? modulesOf(TABS, tab) : [])];
  for (const href of modules) preload(href, { rel: "modulepreload" });
  if (modules.includes("lib/uplot.js")) preload("vendor/uPlot.min.js", { rel: "preload", as: "script" });
})();

// Starts the page: header, theme, keyboard, and the view that the address names.

import { get } from "./lib/api.js";
import { empty, fill, h, problem } from "./lib/dom.js";
import { bind, listen, showHelp } from "./lib/keys.js";
import { setLive } from "./lib/live.js";
import { parse, runsHref } from "./lib/route.js";

const VIEWS = {
  runs: () => import("./views/runs.js"),
  run: () => import("./views/run.js"),
  compare: () => import("./views/compare.js"),
};
const main = document.getElementById("main");
const THEMES = ["", "light", "dark"];

let current = null; // the mounted view: {view, key, unmount, changed}
let mounting = 0;

async function show() {
  const route = parse();
  const isSame = current && current.view === route.view && current.key === route.key;
  if (isSame && current.changed) {
    current.changed(route);
    return;
  }
  const turn = ++mounting;
  current?.unmount();
  current = null;
  setLive("");
  setCrumbs(route);
  const load = VIEWS[route.view];
  if (!load) {
    fill(main, empty("Page not found", h("a", { href: runsHref(), text: "All runs" })));
    return;
  }
  let mount;
  try {
    ({ mount } = await load());
  } catch (error) {
    fill(main, problem(error, () => location.reload()));
    return;
  }
  if (turn !== mounting) return;
  main.replaceChildren();
  current = { view: route.view, key: route.key, ...mount(main, route) };
  scrollTo(0, 0);
}

function setCrumbs(route) {
  const title = { runs: "Runs", compare: "Compare", run: route.key }[route.view] ?? "Not found";
  document.title = route.view === "runs" ? "Paceline" : `${title} · Paceline`;
  const crumbs = document.getElementById("crumbs");
  const last = h("span", { "aria-current": "page", text: title });
  fill(crumbs, route.view === "runs" ? last : [h("a", { href: runsHref(), text: "Runs" }), h("span", { class: "sep", text: "/", "aria-hidden": "true" }), last]);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try {
    if (theme) localStorage.setItem("paceline-theme", theme);
    else localStorage.removeItem("paceline-theme");
  } catch {
    // Storage may be disabled: the choice lasts until the page is left.
  }
  labelTheme();
  dispatchEvent(new Event("themechange"));
}

function labelTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  const button = document.getElementById("theme");
  button.textContent = { "": "Auto", light: "Light", dark: "Dark" }[theme];
  button.setAttribute("aria-label", `Theme: ${button.textContent}. Change the theme.`);
}

function nextTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
}

document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", showHelp);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
labelTheme();
listen();
bind("Everywhere", [
  ["?", "This help", showHelp],
  ["t", "Theme: system, light, dark", nextTheme],
  ["r", "All runs", () => (location.hash = runsHref())],
  ["/", "Filter or search", () => document.querySelector("[data-search]")?.focus()],
  ["Escape", "Leave a field, close a dialog", null],
]);
addEventListener("hashchange", show);
show();
get("api/about").then((about) => {
  const version = h("span", { class: "version muted", text: `${about.user}@${about.machine} · ${about.version}` });
  document.querySelector(".top .crumbs").after(version);
}).catch(() => {});

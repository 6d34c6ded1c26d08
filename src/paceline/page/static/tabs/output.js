// The output of a task, or of all, interleaved by time: followed, searched, and scrolled through however long it is.

import { get, isAbort, newest, query, runPath } from "../lib/api.js";
import { debounced, fill, h, setText } from "../lib/dom.js";
import { bytes } from "../lib/format.js";
import { bind } from "../lib/keys.js";
import { pattern } from "../lib/log_lines.js";
import { LogSearch } from "../lib/log_search.js";
import { beginOf, endOf, LogWindow } from "../lib/log_window.js";

const PAGE = 400; // lines in one request
const MATCHES = 200;
const ALL = "*"; // instead of the name of a task

export function mount(root, { key, store, params, setParams }) {
  const state = {
    task: params.get("task") ?? "", find: params.get("find") ?? "", isRegex: params.get("regex") === "1", isOnly: params.get("only") === "1",
    begin: 0, next: 0, beginInside: "", nextInside: "", isBusy: false, isTail: false,
  };
  const isWrapped = params.has("wrap") ? params.get("wrap") === "1" : innerWidth < 720;
  const latest = newest();
  const searching = newest();
  const view = new LogWindow({ more, jump: debounced((position) => load({ position, direction: "around" }), 40), onfollow, onpick, onfull });
  view.onbottom = () => state.isTail && store.status?.is_live && !state.isOnly && view.setFollowing(true);

  const tasks = h("select", { "aria-label": "Task", onchange: () => choose(tasks.value) });
  const find = h("input", { type: "search", class: "grow", "data-search": "", value: state.find, placeholder: "Search the output", "aria-label": "Search the output", spellcheck: "false", oninput: () => setFind(find.value) });
  const press = (text, label, isPressed, onclick) => h("button", { type: "button", text, title: label, "aria-label": label, "aria-pressed": String(isPressed), onclick });
  const regex = press(".*", "Regular expression", state.isRegex, () => toggle(regex, "isRegex", "regex"));
  const only = press("Only matches", "Show only matching lines", state.isOnly, () => toggle(only, "isOnly", "only"));
  const earlier = h("button", { type: "button", text: "↑", "aria-label": "Previous match", onclick: () => step("backward") });
  const later = h("button", { type: "button", text: "↓", "aria-label": "Next match", onclick: () => step("forward") });
  const follow = press("Follow", "Follow new output", false, () => (view.isFollowing ? view.setFollowing(false) : tail()));
  const wrap = press("Wrap", "Wrap long lines", isWrapped, () => style(wrap, "wrapped", "wrap"));
  const times = press("Times", "Show times", params.get("times") !== "0", () => style(times, "without-times", "times"));
  const search = new LogSearch({ fetch: (values, signal) => get(path({ ...findQuery(), ...values }), { signal }), onstop: () => {
    latest.cancel();
    searching.cancel();
    state.isBusy = false;
  } });
  const size = h("span", { class: "num" });
  root.append(h("div", { class: "bar" }, h("label", { class: "field" }, "Task", tasks), find, regex, earlier, later, only, follow, wrap, times),
    h("div", { class: "log" }, view.element, h("div", { class: "log-foot" }, search.element, size)));
  view.element.classList.toggle("wrapped", isWrapped);
  view.element.classList.toggle("without-times", params.get("times") === "0");

  // ---- reading

  /** Shows another part. `at`: {position, direction}, {at}, or {} for the end. */
  async function load(at = {}, { isFollow = false, target = null } = {}) {
    if (!state.task) return;
    state.isBusy = true;
    const filter = state.isOnly && state.find ? findQuery() : {};
    try {
      const data = await latest(async (signal) => {
        if (filter.find || filter.grep) return search.collect(at.position, at.direction === "forward" ? "forward" : "backward", MATCHES, signal, showSome);
        const position = at.position === undefined ? undefined : Math.round(at.position);
        return get(path({ ...at, position, direction: at.at ? "forward" : at.direction ?? "backward", limit: PAGE }), { signal });
      });
      accept(data);
      setBegin(data);
      setNext(data);
      state.isTail = data.next >= data.end;
      view.target = target;
      if (target !== null) setParams({ position: target, at: "" });
      view.scroller.classList.toggle("matches", Boolean(filter.find || filter.grep));
      view.replace(data.lines, at.at ? "top" : at.position === undefined ? "bottom" : at.position);
      setNotes(data);
      view.setFollowing(isFollow);
    } catch (error) {
      if (isAbort(error)) return;
      view.replace([], "top");
      search.end(error.message);
    }
    state.isBusy = false;
    subscribe();
  }

  /** The first matches, while the search goes on. */
  function showSome(lines, data) {
    accept(data);
    view.scroller.classList.add("matches");
    view.replace(lines, "bottom");
    view.setNotes("", "");
  }

  async function more(direction) {
    const isForward = direction === "forward";
    if (state.isBusy || view.isFollowing || !view.lines.length || (state.isOnly && isForward) || (isForward ? state.next >= view.end && state.isTail : state.begin <= view.first)) return;
    state.isBusy = true;
    const [position, inside] = isForward ? [state.next, state.nextInside] : [state.begin, state.beginInside];
    try {
      const data = await latest((signal) => (state.isOnly && state.find ? search.collect(position, "backward", MATCHES, signal, undefined, inside) : get(path({ position, inside, direction, limit: PAGE }), { signal })));
      accept(data);
      if (isForward) {
        const [first] = view.lines;
        view.append(data.lines);
        setNext(data);
        if (view.lines[0] !== first) Object.assign(state, { begin: view.lines[0].position, beginInside: beginOf(view.lines[0]).inside });
        state.isTail = data.next >= data.end;
      } else {
        const last = view.lines.at(-1);
        view.prepend(data.lines);
        setBegin(data);
        state.isTail = state.isTail && view.lines.at(-1)?.position >= state.next - 65536;
        if (view.lines.at(-1) !== last) setNextAfter(view.lines.at(-1));
      }
      setNotes(data);
    } catch (error) {
      if (!isAbort(error)) search.end(error.message);
    }
    state.isBusy = false;
  }

  const setBegin = (data) => Object.assign(state, { begin: data.begin, beginInside: data.begin_inside ?? "" });
  const setNext = (data) => Object.assign(state, { next: data.next, nextInside: data.next_inside ?? "" });

  /** The window has dropped lines at its end: the next ones are fetched again. */
  function setNextAfter(line) {
    const { position, inside } = endOf(line);
    Object.assign(state, { next: position, nextInside: inside });
    if (inside) state.isTail = false; // a stream begins with all lines of a position
  }

  const findQuery = () => (state.isRegex ? { grep: state.find } : { find: state.find });
  const path = (values) => runPath(key, `/logs${query({ task: state.task, ...values })}`);

  function accept(data) {
    view.first = data.first;
    view.end = Math.max(data.end, data.next ?? 0);
    showSize();
  }

  const showSize = () => setText(size, state.task === ALL ? `${store.names.length} tasks` : bytes(view.end - view.first));

  function setNotes() {
    const isStart = state.begin <= view.first;
    const top = isStart && view.first > 0 && state.task !== ALL ? `Older output was deleted: ${bytes(view.first)}` : "";
    view.setNotes(top, view.lines.length ? "" : state.find && state.isOnly ? "No line matches." : "No output yet.");
  }

  // ---- following

  function subscribe() {
    store.subscribe(view.isFollowing ? { log: state.task, position: state.next } : null);
  }

  function onfollow(isFollowing) {
    follow.setAttribute("aria-pressed", String(isFollowing));
    if (isFollowing && !state.isTail) tail();
    else subscribe();
  }

  function tail() {
    if (state.isOnly) toggle(only, "isOnly", "only", false);
    setParams({ position: "", at: "" });
    load({}, { isFollow: store.status?.is_live ?? true });
  }

  // ---- searching

  const setFind = debounced((text) => {
    state.find = text;
    setParams({ find: text });
    say("");
    remark();
    if (state.isOnly) load();
  }, 250);

  function remark() {
    view.matcher = pattern(state.find, state.isRegex);
    const position = view.position();
    if (!state.isOnly) view.replace(view.lines, view.isFollowing ? "bottom" : position);
  }

  async function step(direction) {
    if (!state.find) return find.focus();
    const shown = view.target ?? view.position();
    try {
      const position = await searching((signal) => search.next(direction === "forward" ? shown + 1 : shown, direction, signal));
      return position === null ? undefined : load({ position, direction: "around" }, { target: position });
    } catch (error) {
      return isAbort(error) ? undefined : search.end(error.message);
    }
  }

  function toggle(button, name, parameter, isSet = !state[name]) {
    state[name] = isSet;
    button.setAttribute("aria-pressed", String(isSet));
    setParams({ [parameter]: isSet });
    remark();
    if (name === "isOnly" || state.isOnly) load();
  }

  function style(button, name, parameter) {
    const isSet = view.element.classList.toggle(name);
    const isPressed = name === "wrapped" ? isSet : !isSet;
    button.setAttribute("aria-pressed", String(isPressed));
    setParams({ [parameter]: isPressed ? "1" : "0" });
    if (view.isFollowing) view.toBottom();
  }

  function onpick(position, row) {
    if (state.isOnly && state.find) {
      toggle(only, "isOnly", "only", false);
      load({ position, direction: "around" }, { target: position });
      return;
    }
    view.list.querySelector(".target")?.classList.remove("target");
    view.target = position;
    row.classList.add("target");
    setParams({ position, at: "" });
  }

  async function onfull(line, element) {
    const data = await get(path({ task: line.task ?? state.task, position: line.byte ?? line.position, direction: "forward", limit: 1, full: 1 })).catch((error) => say(error.message));
    if (data?.lines[0]) view.setFull(element, data.lines[0].text);
  }

  const say = (text) => search.say(text);

  // ---- tasks

  function choose(task) {
    state.task = task;
    tasks.value = task;
    setParams({ task, position: "", at: "" });
    say("");
    load({}, { isFollow: store.status?.is_live ?? false });
  }

  function listTasks() {
    const names = choices();
    if (tasks.childElementCount === names.length && tasks.lastChild?.value === names.at(-1)) return;
    fill(tasks, names.map((name) => h("option", { value: name, text: name === ALL ? "All tasks" : name })));
    if (!store.names.length) return;
    if (!state.task) choose(store.names.find((name) => /^(chief|worker)-/.test(name)) ?? store.names[0]);
    else tasks.value = state.task;
  }

  const choices = () => (store.names.length > 1 ? [ALL, ...store.names] : store.names);

  function neighbour(by) {
    const names = choices();
    const name = names[names.indexOf(state.task) + by];
    if (name) choose(name);
  }

  find.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (find.value !== state.find) {
      setFind.cancel();
      state.find = find.value;
      setParams({ find: state.find });
      remark();
    }
    if (state.isOnly) load();
    else step(event.shiftKey ? "backward" : "forward");
  });

  const stops = [
    store.on("tasks", listTasks),
    store.on("lines", (data) => {
      if (!view.isFollowing) return;
      if (data.skipped) say(`${bytes(data.skipped)} skipped: tasks print faster than this page can show`);
      setNext(data);
      view.end = Math.max(view.end, data.end);
      showSize();
      view.setNotes("", "");
      view.push(data.lines);
    }),
    bind("Output", [
      ["f", "Follow", () => follow.click()], ["n", "Next match", () => step("forward")], ["N", "Previous match", () => step("backward")],
      ["g", "Beginning of the output", () => load({ position: view.first, direction: "forward" })], ["G", "End of the output", tail],
      ["a", "All tasks", () => store.names.length > 1 && choose(ALL)], ["]", "Next task", () => neighbour(1)], ["[", "Previous task", () => neighbour(-1)], ["w", "Wrap long lines", () => wrap.click()],
    ]),
  ];
  view.matcher = pattern(state.find, state.isRegex);
  listTasks();
  const position = Number(params.get("position"));
  if (state.task && params.get("position")) load({ position, direction: "around" }, { target: position });
  else if (state.task && params.get("at")) load({ at: params.get("at") });
  else if (state.task) load({}, { isFollow: store.status?.is_live ?? true });
  view.scroller.focus({ preventScroll: true });
  return {
    changed(next) {
      if (next.get("task") && next.get("task") !== state.task) choose(next.get("task"));
    },
    unmount() {
      for (const stop of stops) stop();
      setFind.cancel();
      latest.cancel();
      searching.cancel();
      view.close();
    },
  };
}

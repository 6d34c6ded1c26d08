// Keyboard shortcuts: views add theirs, and the help lists those that apply.

import { h } from "./dom.js";

const shortcuts = new Set();

/** `bindings`: [key, what it does, callback]. Returns a function that removes them. */
export function bind(group, bindings) {
  const entry = { group, bindings };
  shortcuts.add(entry);
  return () => shortcuts.delete(entry);
}

const isTyping = (element) =>
  element instanceof HTMLElement && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName)) &&
  !["checkbox", "radio", "range", "button"].includes(element.type);

function keydown(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isTyping(event.target)) {
    event.target.blur();
    return;
  }
  if (isTyping(event.target) || document.querySelector("dialog[open]")) return;
  for (const { bindings } of [...shortcuts].reverse()) {
    for (const [key, , callback] of bindings) {
      if (key !== event.key || !callback) continue;
      // A button or a link that has the focus reacts to Enter and Space itself.
      if ((key === "Enter" || key === " ") && event.target.closest?.("a, button, summary, [role=tab]")) return;
      event.preventDefault();
      callback(event);
      return;
    }
  }
}

export function listen() {
  document.addEventListener("keydown", keydown);
}

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "Space" };

export function showHelp() {
  const groups = new Map();
  for (const { group, bindings } of shortcuts) {
    groups.set(group, [...(groups.get(group) ?? []), ...bindings.filter(([, text]) => text)]);
  }
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title" },
    h("header", {}, h("h2", { id: "help-title", text: "Keyboard shortcuts" }),
      h("form", { method: "dialog" }, h("button", { class: "quiet", text: "Close" }))),
    h("div", { class: "help-groups" }, [...groups].map(([group, bindings]) => h("section", {},
      h("h3", { text: group }),
      h("dl", {}, bindings.map(([key, text]) => [h("dt", {}, h("kbd", { text: NAMES[key] ?? key })), h("dd", { text })]))))));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

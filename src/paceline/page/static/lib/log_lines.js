// Lines of output as elements: text only, with matches marked.

import { h } from "./dom.js";
import { clock } from "./format.js";

const MOST_MARKS = 50; // in one line

/** A pattern for marks; null if it cannot be one. */
export function pattern(text, isRegex) {
  if (!text) return null;
  try {
    return new RegExp(isRegex ? text : text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
  } catch {
    return null; // the server says what is wrong with it
  }
}

function marked(text, matcher) {
  if (!matcher) return [text];
  const parts = [];
  let end = 0;
  matcher.lastIndex = 0;
  for (let match = matcher.exec(text); match && parts.length < 2 * MOST_MARKS; match = matcher.exec(text)) {
    if (!match[0]) {
      matcher.lastIndex += 1;
      continue;
    }
    if (match.index > end) parts.push(text.slice(end, match.index));
    parts.push(h("mark", { text: match[0] }));
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

export function lineElement(line, { matcher, isNewGeneration, isTarget, onfull }) {
  const element = h("div", { class: "log-line", data: { position: line.position } },
    h("time", { text: line.at ? clock(line.at) : "", title: line.at ?? "" }),
    line.task === undefined ? null : h("span", { class: "line-task", text: line.task }),
    h("span", { class: "line-text" }, marked(line.text, matcher)),
    line.is_cut ? h("button", { type: "button", class: "small", text: "Whole line", onclick: () => onfull(line, element) }) : null);
  if (isNewGeneration) {
    element.classList.add("generation");
    element.title = `Generation ${line.generation} begins`;
  }
  if (isTarget) element.classList.add("target");
  return element;
}

export function setLineText(element, text, matcher) {
  element.querySelector(".line-text").replaceChildren(...marked(text, matcher));
  element.querySelector("button")?.remove();
}

/** Without the states of a progress bar that the next line of the task replaced. */
export const collapsed = (lines) => {
  const last = new Map(lines.map((line, index) => [line.task, index])); // a single task has no name here
  return lines.filter((line, index) => !line.progress || index === last.get(line.task));
};

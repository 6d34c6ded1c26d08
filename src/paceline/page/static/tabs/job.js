// The job file with what was set on the command line, and the plan made of it.

import { get, runPath } from "../lib/api.js";
import { copyButton, download, empty, fill, h, problem } from "../lib/dom.js";

export function mount(root, { key }) {
  const jobCard = h("section", { class: "card" }, h("h2", { text: "Job file" }), h("p", { class: "muted", text: "Loading…" }));
  const planCard = h("section", { class: "card" }, h("h2", { text: "Plan" }), h("p", { class: "muted", text: "Loading…" }));
  root.append(h("div", { class: "two" }, jobCard, planCard));
  let isOpen = true;

  const head = (title, text, name) => h("div", { class: "bar card-head" }, h("h2", { text: title }), h("span", { class: "spacer" }), text
    ? [copyButton(text), h("button", { type: "button", class: "small", text: "Download", "aria-label": `Download ${name}`, onclick: () => download(new Blob([text], { type: "text/plain" }), name) })] : null);

  const load = () => {
    get(runPath(key, "/job")).then((job) => isOpen && fill(jobCard, head("Job file", job.text, "job.yaml"),
      h("p", { class: "muted card-head", text: "Includes values set on the command line." }),
      job.text ? yaml(job.text) : empty("No job file", "The run was started without one."))).catch((error) => fill(jobCard, h("h2", { text: "Job file" }), problem(error, load)));
    get(runPath(key, "/plan")).then((plan) => isOpen && fill(planCard, head("Plan", plan.text, "plan.yaml"), plan.text ? yaml(plan.text) : empty("No plan"))).catch((error) => fill(planCard, h("h2", { text: "Plan" }), problem(error, load)));
  };
  load();
  return { unmount: () => (isOpen = false) };
}

const KEY = /^(\s*(?:- )*)([\w."'/-]+)(:)(?=\s|$)/;

/** YAML with coloured keys and comments. Large plans stay plain. */
export function yaml(text) {
  const lines = text.trimEnd().split("\n");
  const pre = h("pre", { class: "text yaml", tabindex: "0" });
  if (lines.length > 4000) {
    pre.textContent = text;
    return pre;
  }
  for (const line of lines) {
    const comment = line.search(/(^|\s)#/);
    const code = comment < 0 ? line : line.slice(0, comment);
    const match = KEY.exec(code);
    if (match) pre.append(match[1], h("span", { class: "key", text: match[2] }), code.slice(match[1].length + match[2].length));
    else pre.append(code);
    if (comment >= 0) pre.append(h("span", { class: "comment", text: line.slice(comment) }));
    pre.append("\n");
  }
  return pre;
}

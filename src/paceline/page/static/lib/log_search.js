// Searches the output in several short requests: says how far it is, and can be stopped.

import { h, setText } from "./dom.js";
import { percent } from "./format.js";
import { beginOf } from "./log_window.js";

export class LogSearch {
  /** `fetch(values, signal)`: a window with matches. `onstop()`: the user does not want to wait. */
  constructor({ fetch, onstop }) {
    this.fetch = fetch;
    this.text = h("span", { role: "status" });
    this.stop = h("button", { type: "button", class: "small", text: "Stop searching", hidden: true, onclick: () => {
      onstop();
      this.end("stopped");
    } });
    this.element = h("span", {}, this.text, " ", this.stop);
  }

  say(text) {
    setText(this.text, text);
  }

  end(text) {
    this.stop.hidden = true;
    this.say(text);
  }

  /** Windows from a position on, until one is complete. */
  async * windows(position, direction, limit, signal, inside = "") {
    this.stop.hidden = false;
    for (let from = position, within = inside; ;) {
      const data = await this.fetch({ position: from, inside: within, direction, limit }, signal);
      const { first, end, scanned } = data;
      const done = direction === "forward" ? scanned - first : end - scanned;
      this.say(`searched ${percent(end > first ? done / (end - first) : 1, 0)}`);
      yield data;
      const next = (direction === "forward" ? data.next_inside : data.begin_inside) ?? "";
      if (data.is_complete || (scanned === from && next === within)) return;
      [from, within] = [scanned, next];
    }
  }

  /** As many matching lines before a position. `show(lines, data)`: called with those so far. */
  async collect(position, direction, limit, signal, show = () => {}, inside = "") {
    const lines = [];
    let last;
    for await (const data of this.windows(position, direction, limit, signal, inside)) {
      last = data;
      lines.unshift(...data.lines);
      if (lines.length >= limit) break;
      if (data.lines.length && !data.is_complete) show(lines, data);
    }
    this.end(lines.length ? "" : "no matches");
    const isAll = last.is_complete && lines.length < limit;
    const beginInside = lines.length ? beginOf(lines[0]).inside : last.begin_inside;
    return { ...last, lines, begin_inside: isAll ? "" : beginInside, next_inside: "", begin: isAll ? last.first : lines[0]?.position ?? last.scanned, next: lines.at(-1)?.position ?? last.end };
  }

  /** The position of the next match, or null. */
  async next(position, direction, signal) {
    for await (const data of this.windows(position, direction, 1, signal)) {
      if (!data.lines.length) continue;
      this.end("");
      return data.lines[0].position;
    }
    this.end(direction === "forward" ? "no later match" : "no earlier match");
    return null;
  }
}

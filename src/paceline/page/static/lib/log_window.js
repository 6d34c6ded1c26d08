// A window into the output of a task: at most some hundred lines exist, wherever in gigabytes they are.

import { coalesced, h } from "./dom.js";
import { collapsed, lineElement, setLineText } from "./log_lines.js";

const MOST = 1400; // lines in the page
const NEWEST = 64; // lines that may be states of progress bars of several tasks
const EDGE = 600; // pixels from an edge at which more is fetched

/** Where a line begins. In the output of all tasks many lines may have the same position: `inside` tells which one. */
export const beginOf = ({ position, task, byte }) => ({ position, inside: task === undefined ? "" : `${task}:${byte}` });
/** Where the line after it may begin. */
export const endOf = ({ position, task, byte }) => (task === undefined ? { position: position + 1, inside: "" } : { position, inside: `${task}:${byte + 1}` });

/** Whether a line may come before another one: of several tasks with the same position, the server knows the order. */
const isBefore = (line, other) => line.position < other.position || (line.position === other.position && (line.task !== other.task || line.byte < other.byte));

export class LogWindow {
  /** `more(direction)`: fetch. `jump(position)`: show another part. `onfollow(isFollowing)`. */
  constructor({ more, jump, onfollow, onpick, onfull }) {
    Object.assign(this, { more, jump, onfollow, onpick });
    this.onfull = onfull;
    this.lines = [];
    this.first = this.end = 0;
    this.isFollowing = false;
    this.matcher = null;
    this.target = null;
    this.pending = [];
    this.top = h("div", { class: "log-note", hidden: true });
    this.list = h("div", { class: "log-list" });
    this.bottom = h("div", { class: "log-note", hidden: true });
    this.scroller = h("div", { class: "log-lines", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Output", id: "log-lines" }, this.top, this.list, this.bottom);
    this.thumb = h("div", { class: "log-thumb" });
    this.track = h("div", { class: "log-track", role: "scrollbar", tabindex: "0", "aria-controls": "log-lines", "aria-orientation": "vertical", "aria-label": "Position in the whole output", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": "0" }, this.thumb);
    this.element = h("div", { class: "log-frame" }, this.scroller, this.track);
    this.flush = coalesced(() => this.flushPending());
    this.moved = coalesced(() => this.showPosition());
    this.listen();
  }

  listen() {
    let lastTop = 0;
    this.scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroller;
      const below = scrollHeight - scrollTop - clientHeight;
      const isUp = scrollTop < lastTop - 1;
      lastTop = scrollTop;
      if (this.isOwnScroll) {
        this.isOwnScroll = false;
      } else if (isUp && below > 20) this.setFollowing(false);
      else if (below < 4 && !isUp) this.onbottom?.();
      if (scrollTop < EDGE) this.more("backward");
      if (below < EDGE) this.more("forward");
      this.moved();
    }, { passive: true });
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest(".log-line");
      if (row && !event.target.closest("button") && !getSelection().toString()) this.onpick(Number(row.dataset.position), row);
    });
    const drag = (event) => {
      const box = this.track.getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (event.clientY - box.top) / box.height));
      this.setFollowing(false);
      this.thumb.style.top = `${share * 100}%`;
      this.jump(this.first + share * (this.end - this.first));
    };
    this.track.addEventListener("pointerdown", (event) => {
      this.track.setPointerCapture(event.pointerId);
      drag(event);
    });
    this.track.addEventListener("pointermove", (event) => this.track.hasPointerCapture(event.pointerId) && drag(event));
    this.track.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 0.01, ArrowUp: -0.01, PageDown: 0.1, PageUp: -0.1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      this.setFollowing(false);
      this.jump(Math.max(this.first, Math.min(this.end, this.position() + by * (this.end - this.first))));
    });
  }

  setFollowing(isFollowing) {
    if (isFollowing === this.isFollowing) return;
    this.isFollowing = isFollowing;
    this.onfollow(isFollowing);
    if (isFollowing) this.toBottom();
  }

  /** Other lines instead of those shown. `anchor`: where to scroll: "bottom", "top", or a position. */
  replace(lines, anchor) {
    this.pending = [];
    this.lines = collapsed(lines).slice(-MOST);
    this.list.replaceChildren(...this.lines.map((line, index) => this.create(line, this.lines[index - 1])));
    if (anchor === "bottom") this.toBottom();
    else if (anchor === "top") this.setTop(0);
    else {
      const index = Math.max(0, this.lines.findIndex(({ position }) => position >= anchor));
      const row = this.list.children[index];
      if (row) this.setTop(row.offsetTop - this.scroller.clientHeight * 0.35);
    }
    this.moved();
  }

  create(line, before) {
    return lineElement(line, {
      matcher: this.matcher, isTarget: line.position === this.target, onfull: this.onfull,
      isNewGeneration: before !== undefined && before.generation !== line.generation && before.task === line.task,
    });
  }

  /** Lines that arrive: put on the screen with the next frame, and only those that it can hold. */
  push(lines) {
    for (const line of lines) this.pending.push(line);
    if (this.pending.length > MOST) this.pending = this.pending.slice(-MOST);
    this.flush();
  }

  flushPending() {
    const lines = this.pending;
    this.pending = [];
    if (lines.length) this.append(lines, true);
  }

  /** `isNew`: they were just written. Those of several tasks may be late, and older than the last one. */
  append(lines, isNew = false) {
    const last = this.lines.at(-1);
    const added = collapsed(lines.filter((line) => last === undefined || isBefore(last, line) || (isNew && line.task !== undefined)));
    if (!added.length) return;
    this.dropProgress(new Set(added.map(({ task }) => task)));
    const before = this.lines.at(-1);
    this.list.append(...added.map((line, index) => this.create(line, index ? added[index - 1] : before)));
    this.lines.push(...added);
    this.trimTop();
    if (this.isFollowing) this.toBottom();
    this.moved();
  }

  prepend(lines) {
    const [first] = this.lines;
    const added = collapsed(lines).filter((line) => first === undefined || isBefore(line, first));
    if (!added.length) return;
    const height = this.scroller.scrollHeight;
    const { scrollTop } = this.scroller;
    this.list.prepend(...added.map((line, index) => this.create(line, added[index - 1])));
    this.lines.unshift(...added);
    this.setTop(scrollTop + this.scroller.scrollHeight - height);
    while (this.lines.length > MOST) this.dropLast();
    this.moved();
  }

  trimTop() {
    const extra = this.lines.length - MOST;
    if (extra <= 0) return;
    const height = this.scroller.scrollHeight;
    const { scrollTop } = this.scroller;
    const range = document.createRange();
    range.setStartBefore(this.list.firstChild);
    range.setEndAfter(this.list.children[extra - 1]);
    range.deleteContents();
    this.lines.splice(0, extra);
    if (!this.isFollowing) this.setTop(scrollTop - (height - this.scroller.scrollHeight));
  }

  /** The states of progress bars that new lines of their tasks replace. */
  dropProgress(tasks) {
    for (let index = this.lines.length - 1; index >= Math.max(0, this.lines.length - NEWEST); index--) {
      if (!this.lines[index].progress || !tasks.has(this.lines[index].task)) continue;
      this.lines.splice(index, 1);
      this.list.children[index].remove();
    }
  }

  dropLast() {
    this.lines.pop();
    this.list.lastElementChild?.remove();
  }

  setTop(top) {
    this.isOwnScroll = Math.abs(this.scroller.scrollTop - top) > 0.5;
    this.scroller.scrollTop = top;
  }

  toBottom() {
    this.setTop(this.scroller.scrollHeight);
  }

  setNotes(top, bottom) {
    for (const [element, text] of [[this.top, top], [this.bottom, bottom]]) {
      element.hidden = !text;
      element.textContent = text;
    }
  }

  setFull(element, text) {
    setLineText(element, text, this.matcher);
  }

  /** The position of the first visible line. */
  position() {
    const { scrollTop } = this.scroller;
    let low = 0;
    let high = this.lines.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      const row = this.list.children[middle];
      if (row.offsetTop + row.offsetHeight <= scrollTop) low = middle + 1;
      else high = middle;
    }
    return this.lines[low]?.position ?? this.first;
  }

  showPosition() {
    const total = Math.max(1, this.end - this.first);
    const shown = this.lines.length > 1 ? this.lines.at(-1).position - this.lines[0].position : total;
    const ratio = Math.min(1, this.scroller.clientHeight / Math.max(1, this.list.offsetHeight));
    const height = Math.max(18 / Math.max(1, this.track.clientHeight), Math.min(1, (shown * ratio) / total));
    const isEnd = this.isFollowing || this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 2;
    const share = isEnd && this.lines.at(-1)?.position >= this.end - 65536 * 4 ? 1 - height : Math.min(1 - height, (this.position() - this.first) / total);
    this.thumb.style.top = `${Math.max(0, share) * 100}%`;
    this.thumb.style.height = `${height * 100}%`;
    this.track.setAttribute("aria-valuenow", String(Math.round(100 * Math.max(0, share))));
  }

  close() {
    this.flush.cancel();
    this.moved.cancel();
  }
}

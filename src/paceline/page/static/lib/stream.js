// Server-sent events: one connection for each tab of the browser, closed while the tab is hidden.

import { get } from "./api.js";
import { setLive } from "./live.js";

const HIDDEN_MS = 60_000;
const LONGEST_WAIT_MS = 15_000;

export class Stream {
  /** `handlers`: by the name of the message. `onopen(isAgain)`: what was missed in the meantime has to be fetched. */
  constructor(url, handlers, onopen = () => {}) {
    this.url = url;
    this.handlers = handlers;
    this.onopen = onopen;
    this.source = null;
    this.failures = 0;
    this.opened = 0;
    this.timer = 0;
    this.isOver = false;
    this.onvisibility = () => this.visibilityChanged();
    document.addEventListener("visibilitychange", this.onvisibility);
    this.open();
  }

  open() {
    this.disconnect();
    if (this.isOver) return;
    setLive("connecting");
    const source = new EventSource(this.url);
    this.source = source;
    source.addEventListener("open", () => {
      this.failures = 0;
      setLive("live");
      this.onopen(this.opened++ > 0);
    });
    source.addEventListener("error", () => this.failed());
    for (const [name, handle] of Object.entries(this.handlers)) {
      source.addEventListener(name, (message) => handle(JSON.parse(message.data)));
    }
    source.addEventListener("end", () => this.end("ended"));
    source.addEventListener("failure", () => this.end("lost"));
  }

  failed() {
    // The browser's own attempts come every few seconds without end; these come less and less often, and notice a
    // session that is over.
    this.disconnect();
    setLive("lost");
    const wait = Math.min(LONGEST_WAIT_MS, 500 * 2 ** this.failures++);
    this.timer = setTimeout(async () => {
      await get("api/about").catch(() => {});
      if (!this.source && !this.isOver) this.open();
    }, wait);
  }

  visibilityChanged() {
    clearTimeout(this.timer);
    if (this.isOver) return;
    if (!document.hidden) {
      if (!this.source) this.open();
    } else {
      this.timer = setTimeout(() => {
        this.disconnect();
        setLive("paused");
      }, HIDDEN_MS);
    }
  }

  end(state) {
    this.close();
    setLive(state);
  }

  disconnect() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  close() {
    this.isOver = true;
    document.removeEventListener("visibilitychange", this.onvisibility);
    this.disconnect();
    setLive("");
  }
}

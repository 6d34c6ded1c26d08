// What is known of one run, kept current by one stream: its status, its tasks, and messages for the open tab.

import { query, runPath } from "./api.js";
import { debounced } from "./dom.js";
import { natural } from "./format.js";
import { Stream } from "./stream.js";

export class RunStore extends EventTarget {
  constructor(key) {
    super();
    this.key = key;
    this.status = null;
    this.tasks = new Map();
    this.names = []; // of tasks, in natural order
    this.stream = null;
    this.subscription = "";
    this.wanted = null;
    this.reopen = debounced(() => this.connect(), 50);
    this.connect();
  }

  connect() {
    this.stream?.close();
    this.stream = new Stream(runPath(this.key, `/stream${this.subscription}`), {
      status: (data) => this.setStatus(data),
      tasks: (data) => this.setTasks(data),
      events: (data) => this.emit("events", data),
      points: (data) => this.emit("points", data.points),
      lines: (data) => this.addLines(data),
      end: () => this.emit("end", {}),
      failure: (data) => this.emit("failure", data.error ?? {}),
    }, (isAgain) => isAgain && this.emit("again", {}));
  }

  /** Also send points of series: {series, task}; or the output of a task from a position on: {log, position}. */
  subscribe(wanted) {
    const subscription = query(wanted ?? {});
    if (subscription === this.subscription) return;
    this.wanted = wanted;
    this.subscription = subscription;
    // A run that has ended sends nothing new.
    if (this.status === null || this.status.is_live) this.reopen();
  }

  /** A connection that is opened again continues where this one ended. */
  addLines(data) {
    if (data.task !== undefined && data.task !== this.wanted?.log) return; // of the stream before
    this.wanted = { ...this.wanted, position: data.next };
    this.stream.url = runPath(this.key, `/stream${query(this.wanted)}`);
    this.emit("lines", data);
  }

  setStatus(status) {
    this.status = status;
    this.emit("status", status);
  }

  setTasks({ full, tasks, gone = [] }) {
    if (full) this.tasks.clear();
    let isSame = !full && !gone.length;
    for (const task of tasks) {
      isSame &&= this.tasks.has(task.task);
      this.tasks.set(task.task, task);
    }
    for (const name of gone) this.tasks.delete(name);
    if (!isSame) this.names = [...this.tasks.keys()].sort(natural);
    this.emit("tasks", { full, tasks });
  }

  emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Returns a function that ends it. */
  on(name, callback) {
    const listener = (event) => callback(event.detail);
    this.addEventListener(name, listener);
    return () => this.removeEventListener(name, listener);
  }

  close() {
    this.reopen.cancel();
    this.stream?.close();
  }
}

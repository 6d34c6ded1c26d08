// The segments of tasks: fetched for the rows and the range that are shown, and extended by what tasks report.

import { get, isAbort, newest, query, runPath } from "./api.js";

const ROWS = 100; // a request is for a multiple of it
export const MOST_ROWS = 2000; // in one request
const MOST_SEGMENTS = 4000; // of a task; then the range is fetched again, merged to what a pixel shows

export class TimelineData {
  constructor(key, onchange, onerror) {
    Object.assign(this, { key, onchange, onerror });
    this.segments = new Map(); // by task
    this.marks = [];
    this.begin = this.end = null;
    this.names = [];
    this.total = 0;
    this.latest = newest();
    this.isStale = true;
  }

  /** Fetches rows [first, last) of the range. */
  async fetch({ from, to, first, last, resolution }) {
    const start = Math.floor(first / ROWS) * ROWS;
    const rows = Math.max(ROWS, Math.min(MOST_ROWS, Math.ceil((last - start) / ROWS) * ROWS));
    try {
      const data = await this.latest((signal) =>
        get(runPath(this.key, `/timeline${query({ from, to, first: start, tasks: rows, resolution: Math.max(0.001, resolution).toFixed(3) })}`), { signal }));
      if (start === 0 && rows >= this.total) this.segments.clear();
      for (const task of data.tasks) this.segments.set(task.task, task.segments);
      if (this.segments.size > 3000) this.forgetOthers(new Set(data.tasks.map(({ task }) => task)));
      data.tasks.forEach(({ task }, index) => (this.names[start + index] = task));
      this.total = data.total_tasks;
      this.names.length = this.total;
      this.covered = [start, start + rows];
      this.marks = data.marks;
      this.begin = this.begin === null ? data.begin : Math.min(this.begin, data.begin);
      this.end = data.end;
      this.isStale = false;
      this.onchange();
    } catch (error) {
      if (!isAbort(error)) this.onerror(error);
    }
  }

  forgetOthers(kept) {
    for (const name of this.segments.keys()) if (!kept.has(name)) this.segments.delete(name);
  }

  /** A task has changed: its `phase` began at `since`. */
  extend(task) {
    const segments = this.segments.get(task.task);
    if (!segments || !task.phase || !task.since) return;
    const last = segments.at(-1);
    if (last && (last[0] === task.phase || task.since <= last[1])) return;
    if (last) last[2] = task.since;
    segments.push([task.phase, task.since, Math.max(task.since, this.end ?? 0), task.generation, task.exit ?? ""]);
    if (segments.length > MOST_SEGMENTS) this.isStale = true;
  }

  /** Moves the end of the running segments to now. */
  advance(now) {
    if (this.end === null || now <= this.end) return;
    for (const segments of this.segments.values()) {
      const last = segments.at(-1);
      if (last && last[2] >= this.end - 0.001) last[2] = now;
    }
    this.end = now;
  }

  /** Whether these rows are known, or were just asked for: some tasks may have no row. */
  has(first, last) {
    if (this.covered && first >= this.covered[0] && last <= this.covered[1]) return true;
    for (let row = first; row < last; row++) if (this.names[row] === undefined) return false;
    return true;
  }
}

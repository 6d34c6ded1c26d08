// A table of any number of rows of which only the visible ones exist.

import { coalesced, h, setText } from "./dom.js";
import { natural } from "./format.js";

const ROW = 32;
const SPARE = 6; // rows above and below

export class Grid {
  /** `columns`: [{id, title, width, class, value(row), render(cell, row)}]. `keyOf(row)`. */
  constructor(columns, { keyOf, label, sort = "", onsort = () => {}, onopen = null, height = "calc(100vh - 330px)", leastWidth = "100%", leastHeight = "220px" }) {
    Object.assign(this, { columns, keyOf, onsort, onopen });
    this.sort = sort;
    this.rows = [];
    this.pool = new Map(); // by index
    this.chosen = null;
    this.head = h("div", { class: "grid-head", role: "row" }, columns.map((column) =>
      h("div", { role: "columnheader", class: column.class ?? "", data: { column: column.id } },
        h("button", { type: "button", text: column.title, onclick: () => this.sortBy(column) }))));
    this.space = h("div", { class: "grid-space", role: "rowgroup" });
    this.element = h("div", {
      class: "grid", role: "table", tabindex: "0", "aria-label": label,
      style: { "--columns": columns.map(({ width }) => width).join(" "), "--least-width": leastWidth, height, "min-height": leastHeight },
    }, h("div", { role: "rowgroup", class: "grid-headgroup" }, this.head), this.space);
    this.draw = coalesced(() => this.render());
    this.element.addEventListener("scroll", this.draw, { passive: true });
    this.observer = new ResizeObserver(this.draw);
    this.observer.observe(this.element);
    this.markSort();
  }

  setRows(rows) {
    this.source = rows;
    const column = this.columns.find(({ id }) => id === this.sort.replace("-", ""));
    if (!column) this.rows = rows;
    else {
      const sign = this.sort.startsWith("-") ? -1 : 1;
      const compare = (left, right) => (typeof left === "string" || typeof right === "string" ? natural(String(left), String(right)) : (left ?? -1) - (right ?? -1));
      this.rows = rows.map((row) => [column.value(row), row]).sort(([left], [right]) => sign * compare(left, right)).map(([, row]) => row);
    }
    this.draw();
  }

  sortBy(column) {
    this.sort = this.sort === column.id ? `-${column.id}` : this.sort === `-${column.id}` ? column.id : column.class === "right" ? `-${column.id}` : column.id;
    this.markSort();
    this.onsort(this.sort);
    this.setRows(this.source ?? []);
  }

  markSort() {
    for (const cell of this.head.children) {
      if (this.sort.replace("-", "") !== cell.dataset.column) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort", this.sort.startsWith("-") ? "descending" : "ascending");
    }
  }

  move(by) {
    const index = this.rows.findIndex((row) => this.keyOf(row) === this.chosen);
    const next = Math.max(0, Math.min(this.rows.length - 1, index < 0 ? 0 : index + by));
    if (!this.rows[next]) return;
    this.chosen = this.keyOf(this.rows[next]);
    const top = next * ROW;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + 2 * ROW > scrollTop + clientHeight) this.element.scrollTop = top + 2 * ROW - clientHeight;
    this.draw();
  }

  openChosen() {
    const row = this.rows.find((each) => this.keyOf(each) === this.chosen);
    if (row) this.onopen?.(row);
  }

  render() {
    const { scrollTop, clientHeight } = this.element;
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.element.setAttribute("aria-rowcount", String(this.rows.length + 1));
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    for (const [index, element] of this.pool) {
      if (index >= first && index < last) continue;
      element.remove();
      this.pool.delete(index);
    }
    for (let index = first; index < last; index++) {
      let element = this.pool.get(index);
      if (!element) {
        element = this.createRow(index);
        this.pool.set(index, element);
        this.space.append(element);
      }
      const row = this.rows[index];
      element.row = row;
      element.classList.toggle("chosen", this.keyOf(row) === this.chosen);
      this.columns.forEach((column, place) => {
        const cell = element.children[place];
        if (column.render) column.render(cell, row);
        else setText(cell, column.value(row) ?? "–");
      });
    }
  }

  createRow(index) {
    const element = h("div", { class: "grid-row", role: "row", "aria-rowindex": index + 2, style: { top: `${index * ROW}px` } },
      this.columns.map((column) => h("div", { role: "cell", class: column.class ?? "" })));
    element.addEventListener("click", (event) => {
      if (event.target.closest("a, button") || getSelection().toString()) return;
      this.chosen = this.keyOf(element.row);
      this.onopen?.(element.row);
      this.draw();
    });
    return element;
  }

  close() {
    this.observer.disconnect();
    this.draw.cancel();
  }
}

/** A cell with a number and a bar of its share. */
export function meterCell(cell, text, share) {
  if (!cell.meter) {
    cell.meter = h("div", { class: "meter" }, h("span"));
    cell.number = h("span");
    cell.append(h("div", { class: "with-meter" }, cell.number, cell.meter));
  }
  setText(cell.number, text);
  cell.meter.hidden = share === null || share === undefined || Number.isNaN(share);
  const level = share > 0.95 ? "meter bad" : share > 0.85 ? "meter warn" : "meter";
  if (cell.meter.className !== level) cell.meter.className = level;
  cell.meter.firstChild.style.width = `${Math.min(100, 100 * (share || 0)).toFixed(0)}%`;
}

// Builds elements. Text only ever becomes text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: listeners (onclick), `class`, `text`, `style` (an object), `data` (an object), or attributes. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  append(element, children);
  return element;
}

export function svg(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) element.setAttribute(name, value);
  append(element, children);
  return element;
}

function setProps(element, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces the children. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Sets the text if it differs, so an unchanged cell costs no layout. */
export function setText(element, text) {
  const value = String(text);
  if (element.shownText === value) return;
  element.shownText = value;
  element.textContent = value;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

/** Calls `render` at most once a frame. A hidden tab has no frames: nothing is rendered until it is visible. */
export function coalesced(render) {
  let requested = 0;
  const request = () => {
    if (!requested) requested = requestAnimationFrame(run);
  };
  const run = () => {
    requested = 0;
    render();
  };
  request.cancel = () => {
    cancelAnimationFrame(requested);
    requested = 0;
  };
  return request;
}

export function debounced(callback, ms) {
  let timer = 0;
  const later = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...values), ms);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Keeps `parent` in line with `items`: one element for each key, created once, updated, and moved only if needed. */
export function keyed(parent, items, keyOf, create, update) {
  const elements = (parent.keyedElements ??= new Map());
  const unused = new Set(elements.keys());
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = elements.get(key);
    if (!element) elements.set(key, (element = create(item)));
    unused.delete(key);
    update(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const key of unused) {
    elements.get(key).remove();
    elements.delete(key);
  }
}

/** A button that copies a text and says so. */
export function copyButton(textOf, label = "Copy") {
  const button = h("button", { type: "button", class: "small", text: label });
  button.addEventListener("click", async () => {
    const text = typeof textOf === "function" ? textOf() : textOf;
    const isCopied = await copy(text);
    button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard API needs HTTPS or localhost.
    const area = h("textarea", { class: "offscreen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

/** A command line with a button that copies it. */
export function command(text) {
  return h("div", { class: "command" }, h("code", { text }), copyButton(text));
}

export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function empty(title, ...detail) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title", text: title }), detail.length ? h("p", {}, detail) : null);
}

/** An error of the API: what is wrong, and what to do. */
export function problem(error, retry) {
  return h("div", { class: "notice bad", role: "alert" },
    h("div", {}, h("strong", { text: error.message || String(error) }), error.where ? ` (${error.where})` : null,
      error.remedy ? h("div", { class: "muted", text: error.remedy }) : null),
    retry ? h("button", { type: "button", class: "small", text: "Try again", onclick: retry }) : null);
}

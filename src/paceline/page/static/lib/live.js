// The indicator in the header: whether what is shown is current.

import { setClass, setText } from "./dom.js";

const TEXTS = {
  "": "",
  connecting: "connecting",
  live: "live",
  paused: "paused",
  lost: "connection lost, retrying",
  ended: "ended",
};

export function setLive(state) {
  const element = document.getElementById("live");
  if (!element) return;
  setClass(element, `live ${state}`);
  setText(element, TEXTS[state] ?? "");
}

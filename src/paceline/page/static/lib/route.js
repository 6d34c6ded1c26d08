// Addresses of views: #/, #/run/KEY/TAB?name=value, #/compare?run=KEY&run=KEY. They can be shared and bookmarked.

export function parse(hash = location.hash) {
  const [path, rest = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const params = new URLSearchParams(rest);
  if (parts[0] === "run" && parts[1]) return { view: "run", key: parts[1], tab: parts[2] ?? "overview", params };
  if (parts[0] === "compare") return { view: "compare", params };
  return { view: parts.length ? "unknown" : "runs", params };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function search(params) {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "" && each !== false) pairs.append(name, each === true ? "1" : each);
    }
  }
  const text = pairs.toString();
  return text ? `?${text}` : "";
}

export const runsHref = (params) => `#/${search(params)}`;

export const runHref = (key, tab = "overview", params) =>
  `#/run/${encodeURIComponent(key)}${tab === "overview" && !params ? "" : `/${tab}`}${search(params)}`;

export const compareHref = (keys, params) => `#/compare${search({ run: keys, ...params })}`;

/** Changes parameters of the address without a new entry in the history; null or "" removes one. */
export function setParams(changes) {
  const [path, rest = ""] = location.hash.split("?", 2);
  const params = new URLSearchParams(rest);
  for (const [name, value] of Object.entries(changes)) {
    params.delete(name);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "" && each !== false) params.append(name, each === true ? "1" : each);
    }
  }
  const text = params.toString();
  const hash = `${path || "#/"}${text ? `?${text}` : ""}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

export const param = (name) => parse().params.get(name) ?? "";

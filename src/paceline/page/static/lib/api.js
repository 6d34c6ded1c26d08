// Requests to the server of the page. Every address is relative: the page may be served below any path.

const LIMIT_MS = 90_000; // the server itself gives up after 60 s

export class ApiError extends Error {
  constructor(status, error) {
    super(error.what || `the server answered ${status}`);
    this.status = status;
    this.kind = error.kind ?? "";
    this.where = error.where ?? "";
    this.remedy = error.remedy ?? "";
  }
}

/** The path of something of a run. */
export const runPath = (key, rest = "") => `api/runs/${encodeURIComponent(key)}${rest}`;

/** `values`: an object; lists are repeated, null and "" are left out. */
export function query(values) {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") pairs.append(name, each);
    }
  }
  const text = pairs.toString();
  return text ? `?${text}` : "";
}

export const get = (path, { signal } = {}) => request(path, { method: "GET" }, signal);

export const post = (path, body, { signal } = {}) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }, signal);

async function request(path, options, signal) {
  const limit = AbortSignal.timeout(LIMIT_MS);
  let answer;
  try {
    answer = await fetch(path, { ...options, signal: signal ? AbortSignal.any([signal, limit]) : limit });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, {
      kind: "Unreachable",
      what: limit.aborted ? "the server did not answer in time" : "the server cannot be reached",
      remedy: "Is `paceline page` still running?",
    });
  }
  if (answer.status === 401) {
    location.reload(); // the server shows how to sign in
    return new Promise(() => {});
  }
  const text = await answer.text();
  let data = null;
  try {
    data = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(answer.status, { what: `the server answered ${answer.status} with something that is not JSON` });
  }
  if (!answer.ok) throw new ApiError(answer.status, data?.error ?? {});
  return data;
}

export const isAbort = (error) => error?.name === "AbortError";

let before = Promise.resolve();

/** One after the other: the first request for curves makes the server read files that the others need, too. */
export function inTurn(start, signal) {
  const mine = before.then(() => {
    signal?.throwIfAborted();
    return start();
  });
  before = mine.catch(() => {});
  return mine;
}

/** Only the newest of several requests counts: `latest(signal => get(...))` aborts the one before. */
export function newest() {
  let controller = null;
  const run = async (start) => {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const result = await start(signal);
    if (signal.aborted) throw new DOMException("replaced by a newer request", "AbortError");
    return result;
  };
  run.cancel = () => controller?.abort();
  return run;
}

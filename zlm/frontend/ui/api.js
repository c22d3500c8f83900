// The way to the server: the key, errors as the server words them, and streams of events.
// Addresses are relative to the page, so that they hold behind a proxy's prefix too.

import { device, tab } from "./storage.js";

const KEY = `zlm:${location.pathname}:key`;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // of the answer; 0: there was none
  }
}

export function storedKey() {
  return tab.getItem(KEY) || device.getItem(KEY) || "";
}

export function storeKey(key, keep) {
  tab.removeItem(KEY);
  device.removeItem(KEY);
  if (key) (keep ? device : tab).setItem(KEY, key);
}

export function keyIsKept() {
  return device.getItem(KEY) !== null;
}

/** Ask the server; returns the response if all is well, else throws an ApiError. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "no connection to the server");
  }
  if (response.ok) return response;
  throw await failure(response, key);
}

async function failure(response, key) {
  if (response.status === 401) {
    const wrong = "The key was wrong: it is not one of this server's.";
    return new ApiError(401, key ? wrong : "This server answers only with a key.");
  }
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // Not one of the server's own answers: a proxy's, say.
  }
  return new ApiError(response.status, message);
}

/** Yield the payloads of a stream of events, as values. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        const data = part.slice("data: ".length);
        if (data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

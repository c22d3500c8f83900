// Conversations, kept in this browser alone. Each has its own entry, so that one that grows does
// not rewrite the others; when there is no room left the oldest ones go.

import { device, tab } from "./storage.js";

const PREFIX = `zlm:${location.pathname}:chat:`;
const CURRENT = `zlm:${location.pathname}:current`;
const TITLE_CHARACTERS = 60;

/** Settings of a new conversation: empty is the server's default. */
export const DEFAULTS = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  repetition_penalty: "",
  presence_penalty: "",
  frequency_penalty: "",
  seed: "",
  stop: "",
  thinking: "",
  extra: "",
};

export function newConversation(settings = {}) {
  const number = crypto.getRandomValues(new Uint32Array(2));
  const id = Array.from(number, (part) => part.toString(36)).join("");
  return { id, at: Date.now(), messages: [], settings: { ...DEFAULTS, ...settings } };
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  if (!first) return "New chat";
  const line = first.content.trim().split("\n", 1)[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS)}…` : line;
}

/** Every conversation that is kept, the newest first. */
export function all() {
  const found = [];
  for (let index = 0; index < device.length; index += 1) {
    const name = device.key(index);
    if (!name.startsWith(PREFIX)) continue;
    const conversation = parse(device.getItem(name));
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.at - a.at);
}

export function load(id) {
  return parse(device.getItem(PREFIX + id));
}

function parse(text) {
  try {
    const value = JSON.parse(text);
    return value && Array.isArray(value.messages) ? value : null;
  } catch {
    return null;
  }
}

/** Keep a conversation; returns false if there is no room even without all others. */
export function save(conversation) {
  if (!conversation.messages.length) return true;
  const text = JSON.stringify(conversation);
  for (;;) {
    try {
      device.setItem(PREFIX + conversation.id, text);
      return true;
    } catch {
      const oldest = all().filter((other) => other.id !== conversation.id).pop();
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export function remove(id) {
  device.removeItem(PREFIX + id);
}

export function currentId() {
  return tab.getItem(CURRENT);
}

export function setCurrentId(id) {
  tab.setItem(CURRENT, id);
}

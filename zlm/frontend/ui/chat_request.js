// A conversation as a request, and the answer as it comes in. Knows no elements.

import { ApiError, ask, events } from "./api.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens",
  "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
];

/** Return the body of a request; throws an Error that names a setting which cannot be sent. */
export function bodyOf(conversation, model) {
  const { settings, messages } = conversation;
  const sent = messages
    .filter((message) => message.role === "user" || message.content)
    .map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) sent.unshift({ role: "system", content: settings.system });
  const body = { model, messages: sent, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const text = String(settings[name] ?? "").trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number`);
    body[name] = value;
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  if (settings.thinking) {
    body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  }
  return { ...body, ...extraFields(settings.extra) };
}

function extraFields(text) {
  if (!text.trim()) return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`More fields must be JSON: ${error.message}`, { cause: error });
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Error('More fields must be a JSON object, such as {"logit_bias": {"50": -5}}');
  }
  return value;
}

/**
 * Send a body and fill a message with the answer; `onNews` is called whenever there is more of it.
 * The message ends with `finish` (stop, length, stopped, error ...), and `stats` in seconds and
 * tokens. Throws an ApiError if the server refuses; a break after the first text is told in `error`.
 */
export async function receive(body, message, signal, onNews) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  const stats = (message.stats = {});
  try {
    const response = await ask("v1/chat/completions", { body, signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(chunk.error.code || 500, chunk.error.message);
      take(chunk, message, stats, seconds());
      onNews();
    }
    message.finish ||= "error";
    if (message.finish === "error") message.error = "the answer broke off";
  } catch (error) {
    if (signal.aborted) message.finish = "stopped";
    else if (!stats.first) throw error;
    else {
      message.finish = "error";
      message.error = error.message;
    }
  } finally {
    stats.total = seconds();
    if (message.reasoning) stats.thought ??= stats.total;
  }
}

function take(chunk, message, stats, now) {
  const usage = chunk.usage;
  if (usage) {
    stats.prompt = usage.prompt_tokens;
    stats.output = usage.completion_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: thought, reasoning, tool_calls: calls } = choice.delta;
  const thinks = thought ?? reasoning;
  if (thinks || content || calls) stats.first ??= now;
  if (thinks) message.reasoning = (message.reasoning ?? "") + thinks;
  if (content) {
    if (message.reasoning) stats.thought ??= now;
    message.content += content;
  }
  if (calls) addCalls(message, calls);
  if (choice.finish_reason) message.finish = choice.finish_reason;
  stats.last = now;
}

/** Show calls of tools, which only fields written by hand can ask for, as code. */
function addCalls(message, calls) {
  message.calls ??= [];
  for (const { index, function: part } of calls) {
    const call = (message.calls[index] ??= { name: "", arguments: "" });
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

/** Tell the stats of a message in a line. */
export function describe({ stats, finish }) {
  if (!stats) return "";
  const parts = [];
  if (stats.output) parts.push(`${stats.output} ${stats.output === 1 ? "token" : "tokens"}`);
  if (stats.output > 1 && stats.last > stats.first) {
    parts.push(`${((stats.output - 1) / (stats.last - stats.first)).toFixed(1)} tokens/s`);
  }
  if (stats.first) parts.push(`first after ${stats.first.toFixed(2)} s`);
  if (stats.cached) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens cached`);
  if (finish === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut at the token limit");
  return parts.join(" · ");
}

// The dashboard: what the server's events say, as tiles, charts and tables. Keeps the last minutes,
// because the server keeps none for it.

import { LineChart, Spark } from "./charts.js";
import { el } from "./dom.js";
import { Latency } from "./latency.js";
import { count, counted, duration, percent, rate } from "./numbers.js";
import { Memory, Recent, Start } from "./tables.js";

const KEPT_SECONDS = 300;
const MINUTE = 60;
const BETWEEN = 2; // seconds from event to event, at most, while all is well

const TILES = [
  ["running", "Running", (now) => count(now.running), (now) => now.running],
  ["waiting", "Waiting", (now) => count(now.waiting), (now) => now.waiting],
  ["kv", "KV cache in use", (now) => percent(now.kv_usage), (now) => now.kv_usage],
  ["hits", "Prefix cache hits", (now) => percent(now.hitRate), (now) => now.hitRate ?? 0],
  ["output", "Output tokens/s", (now) => rate(now.rates?.generation_tokens), (now) => now.rates?.generation_tokens ?? 0],
  ["prompt", "Prompt tokens/s", (now) => rate(now.rates?.prompt_tokens), (now) => now.rates?.prompt_tokens ?? 0],
];
const SHARES = new Set(["kv", "hits"]);

export class Dashboard {
  constructor(element) {
    this._element = element;
    this._kept = []; // events of the last minutes
    this._begun = "since you opened this page"; // when the first of them was
    this._tiles = TILES.map(([name, label]) => new Tile(name, label));
    const tokens = [["output", "one"], ["prompt", "two"]];
    this._tokens = new LineChart("Tokens per second", tokens, rate);
    this._sequences = new LineChart("Sequences", [["running", "one"], ["waiting", "two"]], count);
    this._latency = new Latency();
    this._memory = new Memory();
    this._start = new Start();
    this._recent = new Recent();
    this._facts = el("p", { class: "facts" });
    this._totals = el("dl", { class: "totals" });
    element.append(
      el("div", { class: "page" },
        el("div", { class: "page-head" }, el("h1", { text: "Dashboard" }), this._facts),
        el("div", { class: "tiles" }, ...this._tiles.map((tile) => tile.element)),
        el("div", { class: "two-charts" }, panel(null, this._tokens.element), panel(null, this._sequences.element)),
        this._latency.element,
        panel("Recent requests", this._recent.element),
        el("div", { class: "two-charts" },
          panel("Memory", this._memory.element),
          panel("Since the server started", this._totals, this._start.element)),
      ),
    );
  }

  /** Take one event of the server. */
  take(event) {
    const now = event;
    if (event.about) this._takeAbout(event.about);
    if (event.recent) this._recent.take(event.recent);
    this._element.classList.remove("stale");
    if (this._kept.length && event.counters.steps < this._kept.at(-1).counters.steps) {
      this._kept = [];
      this._begun = "since the engine restarted";
    }
    const minute = this._kept.find((each) => event.time - each.time <= MINUTE);
    const whole = minute && event.time - minute.time >= MINUTE - BETWEEN;
    now.since = whole ? "last minute" : this._begun;
    const fresh = hitRate(now.counters, minute?.counters);
    now.hitRate = fresh ?? hitRate(now.counters);
    now.hitsSince = minute && fresh !== null ? now.since : "since the start";
    this._kept.push(now);
    while (event.time - this._kept[0].time > KEPT_SECONDS) this._kept.shift();
    this._show(now, minute);
  }

  /** The events have stopped: what is shown is old. */
  lost() {
    this._element.classList.add("stale");
  }

  _takeAbout(about) {
    this._about = about;
    const facts = [about.models.join(", "), about.architecture, about.device, about.memory?.dtype];
    const sequences = `up to ${counted(about.max_num_seqs, "sequence")}`;
    facts.push(`context of ${count(about.max_model_len)} tokens`, sequences);
    if (about.front_ends > 1) facts.push(`${about.front_ends} front ends`);
    if (about.tokenizers > 1) facts.push(`${about.tokenizers} tokenizers`);
    facts.push(`zlm ${about.version}`);
    this._facts.textContent = facts.filter(Boolean).join(" · ");
    this._latency.bounds = about.bounds;
    this._memory.plan = about.memory;
    this._start.show(about.start);
  }

  _show(now, minute) {
    const points = this._kept;
    TILES.forEach(([name, , word, value], n) => {
      this._tiles[n].show(word(now), points.map(value), SHARES.has(name) ? 1 : null);
    });
    this._tiles[2].note = `${count(now.kv_usage * now.kv_tokens)} of ${count(now.kv_tokens)} tokens`;
    this._tiles[3].note = now.hitsSince;
    this._tiles[0].note = counted(now.open, "open request");
    this._tokens.show(points.map(({ time, rates }) => ({
      time,
      values: [rates?.generation_tokens ?? 0, rates?.prompt_tokens ?? 0],
    })));
    this._sequences.show(points.map(({ time, running, waiting }) => ({ time, values: [running, waiting] })));
    this._latency.show(now, minute ?? now, now.since);
    this._recent.show(now.time);
    this._memory.show(now);
    this._showTotals(now);
  }

  _showTotals({ counters, finished }) {
    const rows = [
      ["answered to the end", finished.stop + finished.length],
      ["cut at their limit", finished.length],
      ["given up by clients", finished.abort],
      ["failed", finished.error],
      ["refused", counters.rejected],
      ["prompt tokens", counters.prompt_tokens],
      ["output tokens", counters.generation_tokens],
      ["preemptions", counters.preemptions],
      ["engine restarts", counters.restarts],
    ];
    const cells = rows.map(([name, value]) =>
      el("div", {}, el("dt", { text: name }), el("dd", { text: count(value) })),
    );
    this._totals.replaceChildren(...cells);
  }
}

/** The share of prompt tokens found in the cache since `then`; null if none was looked for. */
function hitRate(now, then) {
  if (!then) return now.queries ? now.hits / now.queries : null;
  const queries = now.queries - then.queries;
  return queries > 0 ? (now.hits - then.hits) / queries : null;
}

class Tile {
  constructor(name, label) {
    this._value = el("strong", { id: `tile-${name}`, text: "–" });
    this._note = el("small");
    this._spark = new Spark();
    this.element = el("div", { class: `tile ${name}` }, el("span", { text: label }), this._value, this._note);
    this.element.append(this._spark.element);
  }

  set note(text) {
    this._note.textContent = text;
  }

  show(text, values, most) {
    this._value.textContent = text;
    this._spark.show(values, most);
  }
}

function panel(title, ...children) {
  return el("section", { class: "panel" }, title ? el("h2", { text: title }) : null, ...children);
}

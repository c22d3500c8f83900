// Three histograms of times, of the last minute or since the server started, and their quantiles.

import { Histogram } from "./charts.js";
import { el } from "./dom.js";
import { count, quantile, seconds } from "./numbers.js";

const NAMES = {
  first: ["Time to first token", "from a request's arrival"],
  gap: ["Time between tokens", "of a sequence"],
  whole: ["Whole answer", "from arrival to the last token"],
};
const SHARES = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]];

export class Latency {
  constructor() {
    this.bounds = null;
    this._minute = true;
    this._last = null;
    this._parts = {};
    const cards = Object.entries(NAMES).map(([name, [title, note]]) => {
      const chart = new Histogram(title);
      const numbers = el("dl", { class: "quantiles" });
      const counted = el("small");
      this._parts[name] = { chart, numbers, counted };
      const head = el("h3", {}, title, " ", el("small", { text: note }));
      return el("div", { class: "latency" }, head, numbers, chart.element, counted);
    });
    this._buttons = [];
    const choice = el("div", { class: "choice", role: "group", "aria-label": "Which times" });
    for (const [text, minute] of [["last minute", true], ["since the start", false]]) {
      const button = el("button", { type: "button", text, "aria-pressed": String(minute) });
      button.addEventListener("click", () => this._choose(choice, button, minute));
      choice.append(button);
      this._buttons.push(button);
    }
    const head = el("div", { class: "panel-head" }, el("h2", { text: "Latency" }), choice);
    this.element = el("section", { class: "panel" }, head, el("div", { class: "latencies" }, ...cards));
  }

  _choose(choice, button, minute) {
    for (const each of choice.children) each.setAttribute("aria-pressed", String(each === button));
    this._minute = minute;
    if (this._last) this.show(...this._last);
  }

  /** Show what was counted until `now`, since `then` if that is chosen; `since` says when it was. */
  show(now, then, since) {
    this._last = [now, then, since];
    this._buttons[0].textContent = since;
    const nothing = this._minute ? `nothing ${since === "last minute" ? "in the " : ""}${since}` : "nothing yet";
    if (!this.bounds) return;
    for (const [name, { chart, numbers, counted }] of Object.entries(this._parts)) {
      const all = now.histograms[name] ?? [];
      const before = (this._minute && then.histograms[name]) || [];
      // The last cell is the sum of all times.
      const counts = all.slice(0, -1).map((each, n) => each - (before[n] ?? 0));
      const bounds = this.bounds[name];
      chart.show(bounds, counts, nothing);
      const cells = SHARES.map(([label, share]) =>
        el("div", {}, el("dt", { text: label }), el("dd", { text: seconds(quantile(bounds, counts, share)) })),
      );
      numbers.replaceChildren(...cells);
      const total = counts.reduce((sum, each) => sum + each, 0);
      const mean = total ? ((all.at(-1) ?? 0) - (before.at(-1) ?? 0)) / total : null;
      counted.textContent = total ? `${count(total)} counted, ${seconds(mean)} on average` : "";
    }
  }
}

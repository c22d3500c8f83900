// The dashboard's tables: the last requests, what memory is planned for, how the start went.

import { el } from "./dom.js";
import { bytes, count, duration, seconds } from "./numbers.js";

const HEAD = ["ended", "route", "status", "tokens", "first token", "in all", "tokens/s", "end"];
const ROLES = ["supervisor", "frontend", "tokenizer", "engine", "worker"];
const KINDS = ["a", "b", "c", "d", "e", "f", "g", "rest"]; // colours of parts, see the style sheet

/** The last requests, without anything of what was asked or answered. */
export class Recent {
  constructor() {
    this._all = [];
    this._ages = [];
    this._body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...HEAD.map((text) => el("th", { text, scope: "col" }))));
    this._nothing = el("p", { class: "nothing", text: "no requests yet" });
    this._table = el("div", { class: "table", tabindex: "0" }, el("table", { class: "recent" }, head, this._body));
    this.element = el("div", {}, this._nothing, this._table);
  }

  take(all) {
    this._all = all;
    this._ages = all.map(() => el("td", { class: "number" }));
    this._body.replaceChildren(...all.map((each, n) => this._row(each, this._ages[n])));
    this._nothing.hidden = all.length > 0;
    this._table.hidden = !all.length;
  }

  /** Tell how long ago each was. */
  show(now) {
    this._all.forEach(({ at }, n) => {
      this._ages[n].textContent = `${duration(Math.max(0, now - at))} ago`;
    });
  }

  _row(each, age) {
    const { route, status, seconds: all, first = 0, prompt = 0, cached = 0, output = 0 } = each;
    const good = status < 400;
    const ended = each.problem || each.finish || "";
    const isFault = each.problem && each.problem !== "client gone";
    const tokens = prompt ? `${count(prompt)} → ${count(output)}` : "";
    const speed = output > 1 && first && all > first ? ((output - 1) / (all - first)).toFixed(1) : "";
    const cell = (text, name = "") => el("td", { class: name, text });
    const hint = cached ? `${cached} of ${prompt} prompt tokens were cached` : null;
    return el("tr", {},
      age,
      cell(route),
      el("td", {}, el("span", { class: `status ${good ? "good" : "bad"}`, text: status })),
      el("td", { class: "number", text: tokens, title: hint }),
      cell(first ? seconds(first) : "", "number"),
      cell(seconds(all), "number"),
      cell(speed, "number"),
      cell(ended, isFault ? "problem" : ""),
    );
  }
}

/** A bar of parts, and what each of them is. */
function parts(rows, total) {
  const bar = el("div", { class: "stack" });
  const list = el("ul", { class: "parts" });
  rows.forEach(([name, size], n) => {
    const kind = name === "left free" ? "rest" : KINDS[n % (KINDS.length - 1)];
    const piece = el("span", { class: `part ${kind}`, title: `${name}: ${bytes(size)}` });
    piece.style.flexGrow = Math.max(0, size / total);
    bar.append(piece);
    list.append(el("li", { class: kind }, el("i"), `${name} `, el("strong", { text: bytes(size) })));
  });
  return [bar, list];
}

/** What memory is planned for, and what each process holds now. */
export class Memory {
  constructor() {
    this._plan = el("div");
    this._processes = el("div", { class: "processes" });
    const title = el("h3", { text: "Resident memory of each process" });
    this.element = el("div", {}, this._plan, title, this._processes);
  }

  set plan(plan) {
    const rows = (plan?.parts ?? []).filter(([, size]) => size > 0);
    if (!rows.length) {
      this._plan.replaceChildren(el("p", { class: "nothing", text: "the model keeps no KV cache" }));
      return;
    }
    const total = rows.reduce((sum, [, size]) => sum + size, 0);
    const groups = plan.groups.map(([window, blocks, tokens, size]) => {
      const span = `${window < 0 ? "chunks" : "sliding window"} of ${count(Math.abs(window))}`;
      const name = window ? span : "full attention";
      return el("li", { text: `${name}: ${count(blocks)} blocks, ${count(tokens)} tokens, ${bytes(size)}` });
    });
    const title = el("h3", {}, "Planned ", el("small", { text: `${plan.title}, ${bytes(total)}` }));
    this._plan.replaceChildren(title, ...parts(rows, total), el("ul", { class: "groups" }, ...groups));
  }

  show({ processes }) {
    const rows = Object.entries(processes).sort(([a], [b]) => place(a) - place(b));
    const most = Math.max(...rows.map(([, size]) => size), 1);
    this._processes.replaceChildren(...rows.map(([name, size]) => {
      const bar = el("span", { class: "meter" }, el("i"));
      bar.firstChild.style.width = `${(100 * size) / most}%`;
      return el("div", {}, el("span", { text: name }), bar, el("strong", { text: bytes(size) }));
    }));
  }
}

/** Where a process stands on a request's way. */
function place(process) {
  const [role, index] = process.split(" ");
  return 100 * ROLES.indexOf(role) + Number(index ?? 0);
}

/** When each process did what, until the server was ready. */
export class Start {
  constructor() {
    this.element = el("div", { class: "start" });
  }

  show(start) {
    if (!start) {
      this.element.replaceChildren();
      return;
    }
    const tracks = new Map();
    for (const [process, phase, began, ended] of start.phases) {
      if (!tracks.has(process)) tracks.set(process, el("div", { class: "track" }));
      const track = tracks.get(process);
      const text = `${phase}: ${seconds(ended - began)}`;
      const piece = el("span", { class: KINDS[track.children.length % (KINDS.length - 1)], title: text });
      piece.style.left = `${(100 * began) / start.seconds}%`;
      piece.style.width = `${Math.max(0.4, (100 * (ended - began)) / start.seconds)}%`;
      track.append(piece);
    }
    const inOrder = Array.from(tracks).sort(([a], [b]) => place(a) - place(b));
    const rows = inOrder.map(([process, track]) =>
      el("div", { class: "lane" }, el("span", { text: process }), track),
    );
    const lines = start.phases.map(([process, phase, began, ended, memory]) =>
      el("tr", {}, ...[process, phase, seconds(ended - began), seconds(ended), bytes(memory)].map((text, n) =>
        el("td", { text, class: n > 1 ? "number" : "" }))),
    );
    const names = ["process", "phase", "took", "until", "memory"];
    const head = el("thead", {}, el("tr", {}, ...names.map((text) => el("th", { text, scope: "col" }))));
    const table = el("div", { class: "table", tabindex: "0" }, el("table", {}, head, el("tbody", {}, ...lines)));
    this.element.replaceChildren(
      el("h3", {}, "Start ", el("small", { text: `ready after ${seconds(start.seconds)}` })),
      el("div", { class: "lanes" }, ...rows),
      el("details", {}, el("summary", { text: "All phases" }), table),
    );
  }
}

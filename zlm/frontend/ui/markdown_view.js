// Blocks of markdown as elements. While an answer grows only the blocks that changed are made anew,
// so that a long one stays cheap, and what a reader has selected stays selected.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";
import { blocks } from "./markdown.js";

/** An element that shows markdown; `show` takes the whole text each time. */
export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "markdown" });
    this._shown = []; // raw text of each child
  }

  show(text) {
    const parsed = blocks(text);
    let kept = 0;
    while (kept < parsed.length && parsed[kept].raw === this._shown[kept]) kept += 1;
    while (this.element.childNodes.length > kept) this.element.lastChild.remove();
    for (const block of parsed.slice(kept)) this.element.append(element(block));
    this._shown = parsed.map((block) => block.raw);
  }
}

const MAKERS = { heading, paragraph, code, quote, list, table, rule: () => el("hr") };

function element(block) {
  return MAKERS[block.kind](block);
}

function heading({ level, text }) {
  // The page's own headings stand above those of an answer.
  return el(`h${Math.min(6, level + 2)}`, { class: `level-${level}` }, ...inline(text));
}

function paragraph({ text }) {
  return el("p", {}, ...inline(text));
}

function code({ language, text }) {
  const head = el("div", { class: "code-head" }, el("span", { text: language || "text" }));
  head.append(copyButton(() => text, "Copy the code"));
  const body = el("code", {}, ...highlight(text, language));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, body));
}

function quote({ blocks: inner }) {
  return el("blockquote", {}, ...inner.map(element));
}

function list({ ordered, start, items }) {
  const made = items.map(({ checked, blocks: inner }) => {
    const tight = inner.length && inner[0].kind === "paragraph" ? inline(inner[0].text) : [];
    const rest = inner.slice(tight.length ? 1 : 0).map(element);
    if (checked === null) return el("li", {}, ...tight, ...rest);
    const box = el("input", { type: "checkbox", disabled: true, checked });
    return el("li", { class: "task" }, box, ...tight, ...rest);
  });
  if (!ordered) return el("ul", {}, ...made);
  return el("ol", { start: start === 1 ? null : start }, ...made);
}

function table({ aligns, head, rows }) {
  const row = (tag, cells) =>
    el("tr", {}, ...aligns.map((align, n) => el(tag, { class: align }, ...inline(cells[n] ?? ""))));
  const parts = [el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((r) => row("td", r)))];
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, ...parts));
}

// Markdown to a tree of blocks, as models write it. Pure: text in, plain values out, no elements.
// HTML in the text is text like any other.

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_LINE = /^\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?)?$/;
const DEEPEST = 8; // quotes and lists in one another; what is deeper is text

/** Return the blocks of a text. Each has its `raw` lines, by which an unchanged one is known. */
export function blocks(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = next(lines, at, depth);
    block.raw = lines.slice(at, end).join("\n");
    found.push(block);
    at = end;
  }
  return found;
}

function next(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = (heading[2] ?? "").trim().replace(/(?<=^|\s)#{1,9}$/, "");
    return [{ kind: "heading", level: heading[1].length, text: text.trimEnd() }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (beginsTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

function beginsTable(lines, at) {
  return lines[at].includes("|") && TABLE_LINE.test((lines[at + 1] ?? "").trim());
}

/** Whether a paragraph ends before this line. */
function interrupts(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (QUOTE.test(line) || beginsTable(lines, at)) return true;
  const item = ITEM.exec(line);
  return item !== null && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
}

function code(lines, at, [, indent, mark, info]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const body = lines.slice(at + 1, end).map((line) => line.replace(strip, ""));
  const language = info.trim().split(/\s+/, 1)[0];
  const closed = end < lines.length;
  return [{ kind: "code", language, closed, text: body.join("\n") }, closed ? end + 1 : end];
}

function quote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && (QUOTE.test(lines[end]) || !interrupts(lines, end))) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ kind: "quote", blocks: blocks(inner.join("\n"), depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const outer = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const mark = ITEM.exec(lines[end]);
    if (!mark || mark[1].length > outer + 1 || RULE.test(lines[end])) break;
    if (/\d/.test(mark[2]) !== ordered) break;
    const [item, after] = listItem(lines, end, mark);
    items.push(task(item));
    end = after;
  }
  const start = ordered ? parseInt(first[2], 10) : 1;
  const parsed = items.map(({ text, checked }) => ({ checked, blocks: blocks(text, depth + 1) }));
  return [{ kind: "list", ordered, start, items: parsed }, end];
}

/** Return the text of one item, without its mark and indent, and where it ends. */
function listItem(lines, at, mark) {
  const width = Math.min(mark[0].length, mark[1].length + mark[2].length + 1);
  const inner = [lines[at].slice(mark[0].length)];
  let end = at + 1;
  let blank = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      blank = true;
      inner.push("");
      continue;
    }
    const indent = line.length - line.trimStart().length;
    const nested = indent > mark[1].length + 1;
    if (!nested && (blank || ITEM.test(line) || interrupts(lines, end))) break;
    blank = false;
    inner.push(line.slice(Math.min(indent, nested ? width : indent)));
  }
  while (inner.length > 1 && !inner.at(-1)) {
    inner.pop();
    end -= 1;
  }
  const goesOn = end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "");
  return [inner.join("\n"), goesOn ? end + 1 : end];
}

function task(text) {
  const box = /^\[([ xX])\]\s+/.exec(text);
  return box ? { text: text.slice(box[0].length), checked: box[1] !== " " } : { text, checked: null };
}

function table(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) => {
    if (/^:-*:$/.test(cell)) return "center";
    return cell.endsWith(":") ? "right" : "left";
  });
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) {
    rows.push(cells(lines[end]));
    end += 1;
  }
  return [{ kind: "table", aligns, head: cells(lines[at]), rows }, end];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replace(/\\\|/g, "|").trim());
}

// Markdown within a line, to nodes: code, emphasis, links. What is not markup is text. Links go to
// web and mail addresses alone, and open apart from this page; pictures are not fetched.

import { el } from "./dom.js";

const DEEPEST = 6;
const SAFE = /^(?:https?:\/\/|mailto:)/i;
const ADDRESS = /^https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}*_]/;
const SPECIAL = /[\\`*_~[!<\nh]/g;
const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** Return the nodes of a text. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    const until = special ? special.index : text.length;
    plain += text.slice(at, until);
    if (!special) break;
    const [node, length] = markup(text, until, depth);
    if (typeof node === "string") plain += node;
    else {
      flush();
      nodes.push(...[node].flat());
    }
    at = until + length;
  }
  flush();
  return nodes;
}

/** Return what begins at this place, and how many characters it takes. */
function markup(text, at, depth) {
  const sign = text[at];
  const found =
    (sign === "\\" && escaped(text, at)) ||
    (sign === "`" && codeSpan(text, at)) ||
    (sign === "\n" && [el("br"), 1]) ||
    (sign === "[" && link(text, at, depth)) ||
    (sign === "!" && text[at + 1] === "[" && picture(text, at, depth)) ||
    (sign === "<" && bracketed(text, at)) ||
    (sign === "h" && bare(text, at)) ||
    (depth < DEEPEST && emphasis(text, at, depth));
  return found || [sign, 1];
}

function escaped(text, at) {
  return /[\\`*_{}[\]()#+\-.!|<>~$]/.test(text[at + 1] ?? "") ? [text[at + 1], 2] : null;
}

function codeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + 32))[0];
  let end = text.indexOf(mark, at + mark.length);
  while (end >= 0 && text[end + mark.length] === "`") {
    let after = end;
    while (text[after] === "`") after += 1;
    end = text.indexOf(mark, after);
  }
  if (end < 0) return [mark, mark.length];
  const inner = text.slice(at + mark.length, end).replace(/\n/g, " ");
  const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  const trimmed = padded ? inner.slice(1, -1) : inner;
  return [el("code", { text: trimmed }), end + mark.length - at];
}

function emphasis(text, at, depth) {
  const mark = MARKS[text.slice(at, at + 2)] ? text.slice(at, at + 2) : text[at];
  if (!MARKS[mark] || !/\S/.test(text[at + mark.length] ?? " ")) return null;
  const word = /[\p{L}\p{N}]/u;
  if (mark[0] === "_" && word.test(text[at - 1] ?? "")) return null;
  let end = text.indexOf(mark, at + mark.length + 1);
  while (end >= 0) {
    const closes = /\S/.test(text[end - 1]) && text[end - 1] !== "\\";
    const single = mark.length > 1 || (text[end + 1] !== mark && text[end - 1] !== mark);
    const outside = mark[0] !== "_" || !word.test(text[end + mark.length] ?? "");
    if (closes && single && outside) break;
    end = text.indexOf(mark, end + (single ? 1 : 2));
  }
  if (end < 0) return null;
  while (mark.length === 2 && text[end + 2] === mark[0]) end += 1;
  const inner = text.slice(at + mark.length, end);
  return [el(MARKS[mark], {}, ...inline(inner, depth + 1)), end + mark.length - at];
}

/** Return the parts of `[label](target)` at this place. */
function linkParts(text, at) {
  let open = 0;
  let end = at;
  for (; end < text.length && end < at + 2000; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") open += 1;
    else if (text[end] === "]" && (open -= 1) === 0) break;
  }
  if (text[end] !== "]" || text[end + 1] !== "(") return null;
  const target = /^\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+["'][^"']*["'])?\s*\)/.exec(
    text.slice(end + 1, end + 2001),
  );
  if (!target) return null;
  return { label: text.slice(at + 1, end), target: target[1], length: end + 1 + target[0].length - at };
}

function link(text, at, depth) {
  const parts = linkParts(text, at);
  if (!parts || depth >= DEEPEST) return null;
  const label = inline(parts.label, depth + 1);
  if (!SAFE.test(parts.target)) return [label, parts.length];
  return [anchor(parts.target, ...label), parts.length];
}

function picture(text, at) {
  const parts = linkParts(text, at + 1);
  if (!parts) return null;
  const label = parts.label || parts.target;
  const shown = SAFE.test(parts.target) ? anchor(parts.target, label) : el("span", { text: label });
  return [shown, parts.length + 1];
}

function bracketed(text, at) {
  const found = /^<(https?:\/\/[^\s<>]+|[\w.+-]+@[\w-]+\.[\w.-]+)>/.exec(text.slice(at, at + 2000));
  if (found) {
    const target = found[1].includes("://") ? found[1] : `mailto:${found[1]}`;
    return [anchor(target, found[1]), found[0].length];
  }
  const broken = /^<br\s*\/?>/i.exec(text.slice(at, at + 10));
  return broken ? [el("br"), broken[0].length] : null;
}

function bare(text, at) {
  if (/\w/.test(text[at - 1] ?? "")) return null;
  const found = ADDRESS.exec(text.slice(at, at + 2000));
  return found ? [anchor(found[0], found[0]), found[0].length] : null;
}

function anchor(target, ...children) {
  const apart = { target: "_blank", rel: "noopener noreferrer nofollow" };
  return el("a", { href: target, ...apart }, ...children);
}

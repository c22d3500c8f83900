// Colours for code, by what nearly all languages share: comments, strings, numbers, their commonest
// words. It need not be right everywhere; what it does not know stays as it is.

import { el } from "./dom.js";

const LONGEST = 20000; // characters; longer code is shown plain
const HASH = "python py sh bash shell zsh ruby rb yaml yml toml r perl dockerfile makefile ini conf";
const DASH = "sql lua haskell hs ada elm";
const PLAIN = "text txt plain plaintext output log csv markdown md html xml svg";

const WORDS = new Set(
  (
    "abstract and as assert async await begin bool break case catch char class const constexpr " +
    "continue def default defer del delete do double elif else elsif end enum except export extends " +
    "extern False false final finally float fn for foreach from func function global go goto if impl " +
    "implements import in include instanceof int interface is lambda let long loop match mod module " +
    "mut namespace new nil None not null nullptr of or override package pass private protected pub " +
    "public raise ref return select self Self short signed static string struct super switch template " +
    "then this throw throws trait True true try type typedef typename typeof undefined union unless " +
    "unsigned use using var virtual void volatile when where while with yield echo fi done esac local " +
    "SELECT FROM WHERE INSERT INTO UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP BY " +
    "ORDER HAVING LIMIT AND OR NOT NULL VALUES AS DISTINCT UNION ALL PRIMARY KEY DROP ALTER INDEX"
  ).split(" "),
);

const STRINGS =
  '"""[\\s\\S]*?(?:"""|$)|\'\'\'[\\s\\S]*?(?:\'\'\'|$)|"(?:\\\\.|[^"\\\\\\n])*"|' +
  "'(?:\\\\.|[^'\\\\\\n])*'|`(?:\\\\.|[^`\\\\])*`";
const REST = "\\b\\d[\\d_.]*(?:[eE][+-]?\\d+)?\\w*\\b|[A-Za-z_$][\\w$]*";
const SLASHES = "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";

function comments(language) {
  if (HASH.split(" ").includes(language)) return "#[^\\n]*";
  if (DASH.split(" ").includes(language)) return "--[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)";
  return SLASHES;
}

/** Return the nodes of some code. */
export function highlight(text, given) {
  const language = given.toLowerCase();
  if (text.length > LONGEST || !language || PLAIN.split(" ").includes(language)) return [text];
  const pattern = new RegExp(`(${comments(language)})|(${STRINGS})|(${REST})`, "g");
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const [all, comment, string] = found;
    const kind = comment ? "comment" : string ? "string" : word(all);
    if (!kind) continue;
    nodes.push(text.slice(at, found.index), el("span", { class: `code-${kind}`, text: all }));
    at = found.index + all.length;
  }
  nodes.push(text.slice(at));
  return nodes;
}

function word(text) {
  if (/^\d/.test(text)) return "number";
  return WORDS.has(text) ? "word" : "";
}

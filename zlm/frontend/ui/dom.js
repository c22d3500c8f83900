// Elements from values. Text is always set as text: nothing here, or anywhere else, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// Icons are paths on a 24 by 24 grid, drawn as lines.
const ICONS = {
  chats: "M4 6h16M4 12h16M4 18h10",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4.5v5M7 14.5v5",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M4 12a8 8 0 1 0 2.5-5.8M4 4v5h5",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  key: "M8 15.5a3.5 3.5 0 1 0 0-.01M10.7 13.3L20 4M16 8l3 3",
  close: "M6 6l12 12M18 6L6 18",
  down: "M12 5v14M6 13l6 6 6-6",
};

/** Make an element: properties by name, `on` an object of listeners, the rest attributes. */
export function el(tag, { class: name, text, on = {}, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  set(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
}

export function icon(name) {
  const shape = svg("path", { d: ICONS[name] });
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, shape);
}

/** A button that shows an icon; its label is read out and shown on hover. */
export function iconButton(name, label, onClick, extra = "") {
  const attributes = { class: `quiet ${extra}`, type: "button", title: label, "aria-label": label };
  return el("button", { ...attributes, on: { click: onClick } }, icon(name));
}

/** Copy text; pages from a plain http address have no clipboard, so the old way stands behind. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "offscreen", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

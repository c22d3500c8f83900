// The form of a conversation's settings. A field left empty is the server's to decide.

import { el, iconButton } from "./dom.js";
import { DEFAULTS } from "./store.js";

const NUMBERS = {
  temperature: ["Temperature", { min: 0, max: 2, step: "any" }, "0 takes the likeliest token each time"],
  top_p: ["Top p", { min: 0, max: 1, step: "any" }, "likeliest tokens that make up this share"],
  top_k: ["Top k", { min: -1, step: 1 }, "so many of the likeliest tokens"],
  min_p: ["Min p", { min: 0, max: 1, step: "any" }, "least share of the likeliest token's"],
  max_tokens: ["Max tokens", { min: 1, step: 1 }, "of an answer"],
  seed: ["Seed", { step: 1 }, "the same seed gives the same answer"],
  repetition_penalty: ["Repetition penalty", { min: 0, step: "any" }, "over 1: fewer repetitions"],
  presence_penalty: ["Presence penalty", { min: -2, max: 2, step: "any" }, "for words used before"],
  frequency_penalty: ["Frequency penalty", { min: -2, max: 2, step: "any" }, "by how often they were"],
};
const COMMON = ["temperature", "top_p", "max_tokens", "seed"];
const REST = Object.keys(NUMBERS).filter((name) => !COMMON.includes(name));

export class SettingsForm {
  /** `onChange` is called with the settings whenever a field has changed. */
  constructor(onChange, onClose) {
    this._fields = {};
    this._settings = { ...DEFAULTS };
    this._onChange = onChange;
    const head = el("div", { class: "side-head" }, el("h2", { text: "Settings" }));
    head.append(iconButton("close", "Close the settings", onClose, "close"));
    this._fields.model = el("select");
    const thinking = el("select");
    for (const [value, text] of [["", "the model's default"], ["on", "on"], ["off", "off"]]) {
      thinking.append(el("option", { value, text }));
    }
    this._fields.thinking = thinking;
    this._fields.system = el("textarea", { rows: 4, placeholder: "none" });
    this._fields.stop = el("textarea", { rows: 2, placeholder: "none", spellcheck: "false" });
    this._fields.extra = el("textarea", { rows: 2, placeholder: '{"n": 1}', spellcheck: "false" });
    const more = el("details", {}, el("summary", { text: "More" }));
    more.append(
      el("div", { class: "pairs" }, ...REST.map((name) => this._number(name))),
      labelled("Thinking", thinking, "where the model's template has it"),
      labelled("More fields", this._fields.extra, "JSON, as the API takes them"),
    );
    const form = el("form", { on: { input: () => this._read(), submit: (e) => e.preventDefault() } });
    form.append(
      labelled("Model", this._fields.model),
      labelled("System prompt", this._fields.system),
      el("div", { class: "pairs" }, ...COMMON.map((name) => this._number(name))),
      labelled("Stop at", this._fields.stop, "one text a line; \\n is a new line"),
      more,
      el("button", { class: "quiet wide", type: "button", text: "Back to the defaults", on: { click: () => this._reset() } }),
    );
    this.element = el("aside", { class: "side settings", "aria-label": "Settings", hidden: true }, head, form);
  }

  _number(name) {
    const [label, limits, hint] = NUMBERS[name];
    const field = el("input", { type: "number", inputmode: "decimal", placeholder: "default", ...limits });
    this._fields[name] = field;
    return labelled(label, field, hint);
  }

  /** Offer these models; keeps the choice if it is one of them. */
  offer(models) {
    const options = models.map((name) => el("option", { value: name, text: name }));
    this._fields.model.replaceChildren(...options);
    this.show(this._settings);
  }

  show(settings) {
    this._settings = settings;
    for (const [name, field] of Object.entries(this._fields)) field.value = settings[name] ?? "";
    const { model } = this._fields;
    if (!model.value && model.options.length) model.value = model.options[0].value;
  }

  _read() {
    const read = Object.entries(this._fields).map(([name, field]) => [name, field.value]);
    this._settings = { ...this._settings, ...Object.fromEntries(read) };
    this._onChange(this._settings);
  }

  _reset() {
    this.show({ ...DEFAULTS, model: this._settings.model });
    this._read();
  }
}

function labelled(text, field, hint) {
  const label = el("label", { class: "field" }, el("span", { text }), field);
  if (hint) label.append(el("small", { text: hint }));
  return label;
}

// Where a message is written: Enter sends it, Shift+Enter begins a line, Escape stops the answer.

import { el, icon } from "./dom.js";

const MOST_PIXELS = 260;

export class Composer {
  /** `onSend` gets the text; `onStop` is called while an answer comes. */
  constructor(onSend, onStop) {
    this._onSend = onSend;
    this._onStop = onStop;
    this._busy = false;
    this.field = el("textarea", {
      rows: 1,
      placeholder: "Write a message",
      "aria-label": "Message",
      enterkeyhint: "send",
      on: { input: () => this._fit(), keydown: (event) => this._key(event) },
    });
    this._button = el("button", { class: "main round", type: "submit" });
    this.element = el("form", { class: "composer", on: { submit: (event) => this._submit(event) } });
    this.element.append(this.field, this._button);
    this.busy = false;
  }

  /** While busy the button stops the answer. */
  set busy(value) {
    this._busy = value;
    const label = value ? "Stop the answer" : "Send";
    this._button.replaceChildren(icon(value ? "stop" : "send"));
    this._button.title = label;
    this._button.setAttribute("aria-label", label);
    this._fit();
  }

  set text(value) {
    this.field.value = value;
    this._fit();
  }

  focus() {
    this.field.focus();
  }

  _fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, MOST_PIXELS)}px`;
    this._button.disabled = !this._busy && !this.field.value.trim();
  }

  _key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this._busy) this._submit(event);
  }

  _submit(event) {
    event.preventDefault();
    if (this._busy) {
      this._onStop();
      return;
    }
    const text = this.field.value.trim();
    if (!text) return;
    this.text = "";
    this._onSend(text);
  }
}

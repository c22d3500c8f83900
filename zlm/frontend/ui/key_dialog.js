// Where a key is entered, on demand or when the server asks for one.

import { keyIsKept, storedKey, storeKey } from "./api.js";
import { icon } from "./dom.js";

export class KeyDialog {
  /** `onKey` is called when a key was entered, or taken back. */
  constructor(onKey) {
    const find = (name) => document.getElementById(`key-${name}`);
    this._dialog = find("dialog");
    this._reason = find("reason");
    this._input = find("input");
    this._keep = find("keep");
    const button = find("button");
    button.append(icon("key"));
    button.addEventListener("click", () => this.open("Sent with each request as Authorization: Bearer."));
    find("cancel").addEventListener("click", () => this._dialog.close());
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = this._input.value.trim();
      const strange = key.match(/[^!-~]/gu);
      if (strange) {
        this._refuse(strange);
        return;
      }
      storeKey(key, this._keep.checked);
      this._dialog.close();
      onKey();
    });
  }

  /** Say that a key cannot have some characters: no header can hold them. */
  _refuse(characters) {
    const names = [...new Set(characters)].map((each) => (each === " " ? "a space" : each));
    this._reason.textContent = `A key cannot have these characters: ${names.join(" ")}`;
    this._input.select();
  }

  open(reason) {
    this._reason.textContent = reason;
    if (this._dialog.open) return;
    this._input.value = storedKey();
    this._keep.checked = keyIsKept();
    this._dialog.showModal();
    this._input.select();
  }
}

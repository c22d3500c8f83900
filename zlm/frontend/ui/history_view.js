// The list of conversations that this browser keeps.

import { el, iconButton } from "./dom.js";
import { all, titleOf } from "./store.js";

export class HistoryView {
  /** `actions`: open(id), remove(id), begin(), close(). */
  constructor(actions) {
    this._actions = actions;
    this._list = el("ul", { class: "history" });
    const head = el("div", { class: "side-head" }, el("h2", { text: "Chats" }));
    head.append(iconButton("close", "Close the list of chats", actions.close, "close"));
    const begin = el("button", { class: "wide", type: "button", text: "New chat", on: { click: actions.begin } });
    const note = el("p", { class: "hint", text: "Chats are kept in this browser only." });
    this.element = el("aside", { class: "side chats", "aria-label": "Chats" }, head, begin, this._list, note);
  }

  /** Show what is kept; `current` is the id of the one that is open. */
  show(current) {
    this._list.replaceChildren(...all().map((each) => this._row(each, each.id === current)));
  }

  _row(conversation, isCurrent) {
    const title = titleOf(conversation);
    const open = el("button", {
      class: "quiet title",
      type: "button",
      text: title,
      title,
      "aria-current": isCurrent ? "true" : null,
      on: { click: () => this._actions.open(conversation.id) },
    });
    const remove = iconButton("trash", `Delete “${title}”`, () => this._actions.remove(conversation.id));
    return el("li", { class: isCurrent ? "current" : "" }, open, remove);
  }
}

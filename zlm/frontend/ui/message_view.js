// One message of a conversation as elements: its text, its thoughts folded away, what can be done
// with it. Shows what it is given; changes nothing of it.

import { describe } from "./chat_request.js";
import { copyButton, el, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";

export class MessageView {
  /** `actions` has `edit` and `again`, called with the message. */
  constructor(message, actions) {
    this.message = message;
    this._markdown = new MarkdownView();
    this._foot = el("div", { class: "message-foot" });
    const isUser = message.role === "user";
    const speaker = el("h3", { class: "offscreen", text: isUser ? "You" : "Answer" });
    this.element = el("article", { class: `message ${message.role}` }, speaker);
    if (isUser) {
      this.element.append(el("div", { class: "bubble", text: message.content }), this._foot);
      this._foot.append(copyButton(() => message.content, "Copy the message"));
      this._foot.append(iconButton("edit", "Edit and send again", () => actions.edit(message)));
      return;
    }
    this._thoughts = null;
    this._error = null;
    this._calls = null;
    this._stats = el("span", { class: "stats" });
    this._wait = el("p", { class: "wait", "aria-label": "Waiting for the answer" });
    this._wait.append(el("span"), el("span"), el("span"));
    const copy = copyButton(() => message.content, "Copy the answer");
    const again = iconButton("again", "Answer again", () => actions.again(message));
    this._foot.append(copy, again, this._stats);
    this.element.append(this._wait, this._markdown.element, this._foot);
  }

  /** Show the message as it is now; `busy`: more of it may come. */
  show(busy = false) {
    const message = this.message;
    if (message.role === "user") return;
    this.element.classList.toggle("busy", busy);
    this._wait.hidden = !busy || Boolean(message.content || message.reasoning);
    this._foot.hidden = busy;
    if (message.reasoning) this._showThoughts(busy);
    this._markdown.show(message.content);
    if (message.calls) this._showCalls();
    this._stats.textContent = describe(message);
    if (message.error) this._showError();
  }

  _showThoughts(busy) {
    const { reasoning, content, stats } = this.message;
    if (!this._thoughts) {
      const view = new MarkdownView();
      const summary = el("summary");
      const box = el("details", { class: "thoughts" }, summary, view.element);
      this._thoughts = { view, summary };
      this.element.insertBefore(box, this._markdown.element);
    }
    const thinking = busy && !content;
    const seconds = stats?.thought;
    const done = seconds ? `Thought for ${seconds.toFixed(1)} s` : "Thoughts";
    this._thoughts.summary.textContent = thinking ? "Thinking…" : done;
    this._thoughts.view.show(reasoning);
  }

  _showCalls() {
    this._calls ??= this.element.insertBefore(el("div", { class: "calls" }), this._foot);
    const lines = this.message.calls.map((call) => `${call.name}(${call.arguments})`);
    this._calls.replaceChildren(el("pre", {}, el("code", { text: lines.join("\n") })));
  }

  _showError() {
    this._error ??= this.element.insertBefore(el("p", { class: "error", role: "alert" }), this._foot);
    this._error.textContent = this.message.error;
  }
}

// The chat: one conversation at a time, its answer as it comes, and the panels beside it.

import { bodyOf, receive } from "./chat_request.js";
import { Composer } from "./composer.js";
import { el, iconButton } from "./dom.js";
import { HistoryView } from "./history_view.js";
import { MessageView } from "./message_view.js";
import { SettingsForm } from "./settings.js";
import * as store from "./store.js";

const NEAR_END_PIXELS = 60;
const WIDE = window.matchMedia("(min-width: 64rem)");
const IDEAS = ["Explain how a hash map works", "Write a haiku about rain", "What can you help me with?"];

export class Chat {
  /** `onRefused` is told of errors of the server that concern more than this chat. */
  constructor(element, onRefused) {
    this._onRefused = onRefused;
    this._models = [];
    this._running = null; // of an answer that comes: how to stop it, its view
    this._conversation = store.load(store.currentId()) ?? store.newConversation();
    this._build(element);
    this._open(this._conversation);
    window.addEventListener("pagehide", () => store.save(this._conversation));
  }

  _build(element) {
    this._history = new HistoryView({
      open: (id) => this._switch(store.load(id)),
      remove: (id) => this._remove(id),
      begin: () => this._switch(null),
      close: () => this._toggle(this._history.element, false),
    });
    this._history.element.hidden = !WIDE.matches;
    this._settings = new SettingsForm(
      (settings) => this._useSettings(settings),
      () => this._toggle(this._settings.element, false),
    );
    const bar = el("div", { class: "chat-bar" });
    bar.append(iconButton("chats", "Show chats", () => this._toggle(this._history.element)));
    this._title = el("h1", { class: "chat-title" });
    bar.append(this._title, iconButton("plus", "New chat", () => this._switch(null)));
    bar.append(iconButton("settings", "Show settings", () => this._toggle(this._settings.element)));
    this._messages = el("div", { class: "messages" });
    this._thread = el("div", { class: "thread", tabindex: "0", "aria-label": "Conversation" }, this._messages);
    this._thread.addEventListener("scroll", () => this._noteScroll(), { passive: true });
    this._jump = iconButton("down", "To the end", () => this._toEnd(), "jump");
    this._notice = el("div", { class: "notice", role: "alert", hidden: true });
    this._said = el("p", { class: "offscreen", role: "status" });
    this._composer = new Composer((text) => this._send(text), () => this.stop());
    const hint = el("p", { class: "hint keys", text: "Enter sends · Shift+Enter new line · Esc stops" });
    const foot = el("div", { class: "chat-foot" }, this._jump, this._notice, this._composer.element, hint);
    const column = el("div", { class: "column" }, bar, this._thread, foot, this._said);
    element.append(this._history.element, column, this._settings.element);
    column.addEventListener("pointerdown", (event) => {
      if (!bar.contains(event.target)) this._uncover();
    });
    WIDE.addEventListener("change", () => {
      if (WIDE.matches) this._toggle(this._history.element, true);
      else this._uncover();
    });
    element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this._escape();
    });
  }

  // ------------------------------------------------------------------ what is told from outside

  /** Take the names of the models that are served. */
  offer(models) {
    this._models = models;
    this._settings.offer(models);
    this._notice.hidden = true;
    this._greet();
  }

  focus() {
    if (WIDE.matches) this._composer.focus();
  }

  stop() {
    this._running?.controller.abort();
  }

  // -------------------------------------------------------------------------- conversations

  get _model() {
    const wanted = this._conversation.settings.model;
    return this._models.includes(wanted) ? wanted : (this._models[0] ?? wanted);
  }

  _open(conversation) {
    this._conversation = conversation;
    store.setCurrentId(conversation.id);
    this._notice.hidden = true;
    this._settings.show(conversation.settings);
    this._redraw();
    this._toEnd();
  }

  /** Go to another conversation; without one begin a new one, with the same settings. */
  _switch(conversation) {
    this.stop();
    store.save(this._conversation);
    this._open(conversation ?? store.newConversation(this._conversation.settings));
    if (!WIDE.matches) this._toggle(this._history.element, false);
    this.focus();
  }

  _remove(id) {
    if (id === this._conversation.id) {
      this.stop();
      this._conversation.messages = [];
      store.remove(id);
      this._switch(null);
    }
    store.remove(id);
    this._history.show(this._conversation.id);
  }

  _useSettings(settings) {
    this._conversation.settings = settings;
    this._keep();
  }

  _keep() {
    if (!store.save(this._conversation)) this._tell("This browser has no room to keep this chat.");
    this._history.show(this._conversation.id);
    this._title.textContent = store.titleOf(this._conversation);
  }

  // -------------------------------------------------------------------------------- messages

  _redraw() {
    const actions = { edit: (message) => this._edit(message), again: (message) => this._again(message) };
    this._views = this._conversation.messages.map((message) => {
      const view = new MessageView(message, actions);
      view.show();
      return view;
    });
    this._messages.replaceChildren(...this._views.map((view) => view.element));
    this._greet();
    this._history.show(this._conversation.id);
    this._title.textContent = store.titleOf(this._conversation);
  }

  /** Say something where there is no message yet. */
  _greet() {
    if (this._conversation.messages.length) return;
    const name = this._model ? `Ask ${this._model}` : "Ask the model";
    const ideas = IDEAS.map((text) =>
      el("button", { class: "idea", type: "button", text, on: { click: () => this._send(text) } }),
    );
    this._messages.replaceChildren(el("div", { class: "greeting" }, el("h2", { text: name }), ...ideas));
  }

  async _send(text) {
    const { messages } = this._conversation;
    const before = [...messages];
    messages.push({ role: "user", content: text });
    await this._answer(before, text);
  }

  async _again(message) {
    if (this._running) return;
    const before = [...this._conversation.messages];
    this._conversation.messages.splice(before.indexOf(message));
    await this._answer(before, "");
  }

  _edit(message) {
    if (this._running) return;
    const { messages } = this._conversation;
    messages.splice(messages.indexOf(message));
    this._redraw();
    this._composer.text = message.content;
    this._composer.focus();
  }

  /** Have the conversation answered; `before` and `text` are put back if nothing comes of it. */
  async _answer(before, text) {
    const conversation = this._conversation;
    this._notice.hidden = true;
    let body;
    try {
      body = bodyOf(conversation, this._model);
    } catch (error) {
      this._takeBack(conversation, before, text, error);
      return;
    }
    const message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    this._redraw();
    this._toEnd();
    const running = (this._running = { controller: new AbortController(), view: this._views.at(-1) });
    this._composer.busy = true;
    this._show(running);
    let refusal = null;
    try {
      await receive(body, message, running.controller.signal, () => this._showSoon(running));
    } catch (error) {
      refusal = error;
    }
    this._running = null;
    this._composer.busy = false;
    if (refusal || !(message.content || message.reasoning || message.calls || message.finish !== "stopped")) {
      this._takeBack(conversation, before, text, refusal);
      return;
    }
    this._show(running);
    this._said.textContent = message.finish === "stopped" ? "Stopped" : "The answer is complete";
    if (conversation === this._conversation) this._keep();
    else store.save(conversation);
  }

  _takeBack(conversation, before, text, error) {
    conversation.messages = before;
    if (conversation !== this._conversation) return;
    this._redraw();
    this._composer.text = text;
    this._composer.focus();
    if (!error) return;
    this._tell(error.message);
    this._onRefused(error);
  }

  _tell(text) {
    this._notice.textContent = text;
    this._notice.hidden = false;
  }

  // --------------------------------------------------------------------------------- showing

  _showSoon(running) {
    if (running.frame) return;
    running.frame = requestAnimationFrame(() => {
      running.frame = 0;
      if (this._running === running) this._show(running);
    });
  }

  _show(running) {
    running.view.show(this._running === running);
    if (this._atEnd) this._toEnd();
    else this._noteScroll();
  }

  _toEnd() {
    this._thread.scrollTop = this._thread.scrollHeight;
    this._noteScroll();
  }

  _noteScroll() {
    const { scrollTop, clientHeight, scrollHeight } = this._thread;
    this._atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PIXELS;
    this._jump.hidden = this._atEnd;
  }

  _toggle(side, show = side.hidden) {
    side.hidden = !show;
    if (show && !WIDE.matches) side.querySelector("button").focus();
  }

  _escape() {
    if (this._running) this.stop();
    else if (WIDE.matches) this._toggle(this._settings.element, false);
    else this._uncover();
  }

  /** Put away the panels that lie over the conversation on a narrow screen. */
  _uncover() {
    if (WIDE.matches) return;
    for (const side of [this._settings.element, this._history.element]) this._toggle(side, false);
  }
}

// The page: which view is shown, what state the server is in, and who asks for the key.

import { ask } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { Feed } from "./feed.js";
import { KeyDialog } from "./key_dialog.js";

const RETRY_MILLISECONDS = 2000;

const state = document.getElementById("state");
const stateText = document.getElementById("state-text");
let timer = 0;
let served = "";

/** Show how the server is; one that is ready is told by the name of its model. */
function showState(kind, text) {
  state.dataset.kind = kind;
  stateText.textContent = text;
  state.title = text;
}

const keys = new KeyDialog(() => {
  find();
  if (!views.dashboard.element.hidden) feed.start();
});

/** Take an error of the server that concerns the whole page. */
function refused(error) {
  if (error.status === 401 || error.status === 403) {
    showState("locked", "a key is needed");
    keys.open(error.message);
  } else if (!error.status || error.status === 503) {
    findSoon(error);
  }
}

const chat = new Chat(document.getElementById("chat"), refused);
const dashboard = new Dashboard(document.getElementById("dashboard"));
const feed = new Feed({
  onEvent(event) {
    dashboard.take(event);
    if (event.about) served = event.about.models[0];
    showState(event.state, event.state === "ready" ? served : event.reason || event.state);
  },
  onError(error) {
    dashboard.lost();
    if (error.status === 401 || error.status === 403) refused(error);
    else showState(error.status === 503 ? "loading" : "lost", error.message);
  },
});
const views = {
  chat: { element: document.getElementById("chat"), tab: document.getElementById("tab-chat") },
  dashboard: {
    element: document.getElementById("dashboard"),
    tab: document.getElementById("tab-dashboard"),
  },
};

/** Learn what is served; ask again for as long as it is loading. */
async function find() {
  clearTimeout(timer);
  try {
    const { data } = await (await ask("v1/models")).json();
    const names = data.map((model) => model.id);
    chat.offer(names);
    served = names[0];
    showState("ready", served);
    document.title = `${served} · zlm`;
  } catch (error) {
    if (error.status === 401 || error.status === 403) refused(error);
    else findSoon(error); // whatever it is, it may pass
  }
}

function findSoon(error) {
  showState(error.status === 503 ? "loading" : "lost", error.message);
  clearTimeout(timer);
  timer = setTimeout(find, RETRY_MILLISECONDS);
}

/** Show the view that the address names; the dashboard is fed only while it is looked at. */
function route() {
  const name = location.hash === "#dashboard" ? "dashboard" : "chat";
  for (const [each, { element, tab }] of Object.entries(views)) {
    element.hidden = each !== name;
    if (each === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  if (name === "dashboard" && !document.hidden) feed.start();
  else feed.stop();
  if (name === "chat") chat.focus();
}

window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", route);
route();
find();

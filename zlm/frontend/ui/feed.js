// The dashboard's events, for as long as somebody looks; after a break it connects again.

import { ApiError, ask, events } from "./api.js";

const FIRST_PAUSE = 1000; // milliseconds
const LONGEST_PAUSE = 15000;

export class Feed {
  constructor({ onEvent, onError }) {
    this._onEvent = onEvent;
    this._onError = onError;
    this._controller = null;
  }

  start() {
    if (this._controller) return;
    this._controller = new AbortController();
    this._run(this._controller.signal);
  }

  stop() {
    this._controller?.abort();
    this._controller = null;
  }

  async _run(signal) {
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      try {
        const response = await ask("ui/events", { signal });
        for await (const event of events(response)) {
          pause = FIRST_PAUSE;
          this._onEvent(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        this._onError(error instanceof ApiError ? error : new ApiError(0, "no connection to the server"));
        if (error.status === 401 || error.status === 403) {
          this.stop();
          return;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }
}

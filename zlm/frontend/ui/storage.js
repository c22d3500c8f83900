// The browser's storage; where it is switched off, things last as long as the page.

class Passing {
  constructor() {
    this._values = new Map();
  }
  get length() {
    return this._values.size;
  }
  key(index) {
    return [...this._values.keys()][index];
  }
  getItem(name) {
    return this._values.get(name) ?? null;
  }
  setItem(name, value) {
    this._values.set(name, value);
  }
  removeItem(name) {
    this._values.delete(name);
  }
}

function usable(name) {
  try {
    const storage = window[name]; // throws where pages may keep nothing
    storage.getItem("");
    return storage;
  } catch {
    return new Passing();
  }
}

export const device = usable("localStorage"); // outlives the tab
export const tab = usable("sessionStorage");

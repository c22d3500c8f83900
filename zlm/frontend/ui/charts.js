// Charts as SVG: lines over time, and the bars of a histogram. They draw what they are given.

import { el, svg } from "./dom.js";
import { seconds } from "./numbers.js";

const WIDTH = 600; // of the drawing's own grid; it is stretched to its place
const HEIGHT = 160;
const LEAST_SPAN = 60; // seconds

/** A small line, for a tile. */
export class Spark {
  constructor() {
    this._path = svg("path", { class: "line" });
    this._area = svg("path", { class: "area" });
    const box = { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" };
    this.element = svg("svg", box, this._area, this._path);
  }

  show(values, most) {
    const top = Math.max(most ?? 0, ...values, 1e-9);
    const step = 100 / Math.max(values.length - 1, 1);
    const points = values.map((value, n) => `${(n * step).toFixed(2)},${(26 - (24 * value) / top).toFixed(2)}`);
    this._path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    this._area.setAttribute("d", points.length > 1 ? `M0,28L${points.join("L")}L100,28Z` : "");
  }
}

/** Lines over the last minutes. `series` are [name, class] pairs; `format` words a value. */
export class LineChart {
  constructor(title, series, format) {
    this._series = series;
    this._format = format;
    this._points = [];
    this._lines = series.map(([, name]) => [
      svg("path", { class: `area ${name}` }),
      svg("path", { class: `line ${name}` }),
    ]);
    this._cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0.25, 0.5, 0.75].map((part) =>
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }),
    );
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this._svg = svg("svg", box, ...grid, ...this._lines.flat(), this._cursor);
    this._values = series.map(() => el("strong"));
    const legend = series.map(([name, kind], n) =>
      el("span", { class: `key ${kind}` }, el("i"), `${name} `, this._values[n]),
    );
    this._top = el("span", { class: "axis most" });
    this._ago = el("span", { class: "axis ago" });
    const head = el("div", { class: "chart-head" }, el("h3", { text: title }), el("p", { class: "legend" }, ...legend));
    const plot = el("div", { class: "plot" }, this._svg, this._top, this._ago);
    this.element = el("div", { class: "chart" }, head, plot);
    this._title = title;
    plot.addEventListener("pointermove", (event) => this._hover(event));
    plot.addEventListener("pointerleave", () => this._hover(null));
  }

  /** `points` have a time in seconds, and a value for each series in `values`. */
  show(points) {
    this._points = points;
    if (!points.length) return;
    const end = points.at(-1).time;
    const span = Math.max(LEAST_SPAN, end - points[0].time);
    const top = nice(Math.max(...points.flatMap((point) => point.values), 1));
    this._span = { end, span };
    this._lines.forEach(([area, line], n) => {
      const path = points.map(({ time, values }) => {
        const x = WIDTH * (1 - (end - time) / span);
        return `${x.toFixed(1)},${(HEIGHT * (1 - values[n] / top)).toFixed(1)}`;
      });
      line.setAttribute("d", `M${path.join("L")}`);
      const first = path[0].split(",")[0];
      area.setAttribute("d", `M${first},${HEIGHT}L${path.join("L")}L${WIDTH},${HEIGHT}Z`);
    });
    this._top.textContent = this._format(top);
    this._ago.textContent = `${Math.round(span)} s`;
    this._tell(points.at(-1));
  }

  _tell({ values }) {
    const words = values.map((value) => this._format(value));
    words.forEach((word, n) => (this._values[n].textContent = word));
    const all = this._series.map(([name], n) => `${name} ${words[n]}`);
    this._svg.setAttribute("aria-label", `${this._title}: ${all.join(", ")}`);
  }

  _hover(event) {
    const points = this._points;
    this._cursor.setAttribute("visibility", event && points.length ? "visible" : "hidden");
    if (!points.length) return;
    if (!event) {
      this._tell(points.at(-1));
      return;
    }
    const place = this._svg.getBoundingClientRect();
    const share = (event.clientX - place.left) / place.width;
    const time = this._span.end - this._span.span * (1 - share);
    const near = points.reduce((a, b) => (Math.abs(b.time - time) < Math.abs(a.time - time) ? b : a));
    const x = WIDTH * (1 - (this._span.end - near.time) / this._span.span);
    this._cursor.setAttribute("x1", x);
    this._cursor.setAttribute("x2", x);
    this._tell(near);
  }
}

/** Round up to 1, 2 or 5 times a power of ten. */
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value * 0.999);
}

/** Bars of how often a time fell between two bounds. */
export class Histogram {
  constructor(label) {
    this._label = label;
    this._bars = el("div", { class: "bars", role: "img" });
    this._ends = el("div", { class: "bar-ends" });
    this.element = el("div", { class: "histogram" }, this._bars, this._ends);
  }

  /** `nothing`: what is said where nothing was counted. */
  show(bounds, counts, nothing) {
    const used = counts.map((each, n) => (each ? n : -1)).filter((n) => n >= 0);
    if (!used.length) {
      this._bars.replaceChildren(el("p", { class: "nothing", text: nothing }));
      this._ends.replaceChildren();
      this._bars.setAttribute("aria-label", `${this._label}: ${nothing}`);
      return;
    }
    const [first, last] = [Math.max(0, used[0] - 1), Math.min(counts.length - 1, used.at(-1) + 1)];
    const most = Math.max(...counts);
    const bars = [];
    for (let n = first; n <= last; n += 1) {
      const low = n ? seconds(bounds[n - 1]) : "0";
      const range = n < bounds.length ? `${low} to ${seconds(bounds[n])}` : `over ${low}`;
      const bar = el("span", { class: "bar", title: `${range}: ${counts[n]}` }, el("i"));
      bar.firstChild.style.height = `${counts[n] ? Math.max(2, (100 * counts[n]) / most) : 0}%`;
      bars.push(bar);
    }
    this._bars.replaceChildren(...bars);
    this._bars.setAttribute("aria-label", `${this._label}: ${counts.reduce((a, b) => a + b, 0)} counted`);
    const low = first ? seconds(bounds[first - 1]) : "0";
    const high = last < bounds.length ? seconds(bounds[last]) : `over ${seconds(bounds.at(-1))}`;
    this._ends.replaceChildren(el("span", { text: low }), el("span", { text: high }));
  }
}

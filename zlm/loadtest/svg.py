"""Line and point charts as SVG text, to stand inside a page: no script, no file, no font.

Colours are the page's: classes ``c0`` to ``c7``, ``axis``, ``grid`` and ``label``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 44
NUM_COLOURS = 8
MOST_POINTS = 300  # of a line; more are not seen
MIN_DECADES = 1.3  # of the values, for a logarithmic axis

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    is_dashed: bool = False
    is_scatter: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Where values stand along one direction: [low, high] onto [start, end] pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of *value*."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return some four to eight round values."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if self.high <= 1000 * self.low else (1,)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in found if self.low <= value <= self.high]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_x: bool) -> str:
    """Return a chart of *lines*, y from 0; *log_x* is followed if x spans enough for it."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_axis, y_axis = _x_axis([x for x, _ in points], log_x), _y_axis([y for _, y in points])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
        *_grid(x_axis, y_axis),
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" '
        f'text-anchor="middle">{escape(x_label)}</text>',
        f'<text class="label" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>',
        *(_scatter(line, x_axis, y_axis) if line.is_scatter else _path(line, x_axis, y_axis)
          for line in lines if line.points),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts)


def _x_axis(values: Sequence[float], log_x: bool) -> Axis:
    low, high = min(values), max(values)
    positive = [value for value in values if value > 0]
    if log_x and positive and math.log10(high / min(positive)) >= MIN_DECADES:
        return Axis(min(positive) * 0.95, high * 1.05, LEFT, WIDTH - RIGHT, True)
    low = 0.0 if low >= 0 and low < 0.7 * high else low - 0.05 * (high - low or high or 1.0)
    return Axis(low, high + 0.02 * (high - low) or 1.0, LEFT, WIDTH - RIGHT)


def _y_axis(values: Sequence[float]) -> Axis:
    high = max(values)
    return Axis(0.0, 1.05 * high if high > 0 else 1.0, HEIGHT - BOTTOM, TOP)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="label" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_short(value)}</text>"
        )
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(
            f'<text class="label" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{_short(value)}</text>"
        )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    return parts


def _path(line: Line, x_axis: Axis, y_axis: Axis) -> str:
    points = _thinned(line.points)
    steps = " ".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    colour = f"c{line.colour % NUM_COLOURS}"
    dots = ""
    if len(points) <= 12:
        dots = "".join(_dot(point, colour, line.name, x_axis, y_axis, 3) for point in points)
    return (
        f'<path class="line {colour}" d="M{steps}"{dashes}>'
        f"<title>{escape(line.name)}</title></path>{dots}"
    )


def _scatter(line: Line, x_axis: Axis, y_axis: Axis) -> str:
    colour = f"c{line.colour % NUM_COLOURS}"
    points = _thinned(line.points, MOST_POINTS * 4)
    return "".join(_dot(point, colour, line.name, x_axis, y_axis, 2) for point in points)


def _dot(point: Point, colour: str, name: str, x_axis: Axis, y_axis: Axis, radius: float) -> str:
    x, y = point
    return (
        f'<circle class="dot {colour}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" '
        f'r="{radius}"><title>{escape(name)}: {_short(x)}, {_short(y)}</title></circle>'
    )


def _thinned(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """Return at most *most* of *points*, evenly chosen, the last among them."""
    if len(points) <= most:
        return points
    step = (len(points) - 1) / (most - 1)
    return [points[round(at * step)] for at in range(most)]


def _short(value: float) -> str:
    """Return a number in few characters."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(scale, 1e4):
            return f"{value / scale:.3g}{letter}"
    return f"{value:.4g}"

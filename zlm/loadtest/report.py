"""The report of a load test: one HTML page with tables and plots that asks the network for nothing.

And every request's times as JSON lines, for those who plot for themselves.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from zlm import __version__
from zlm.loadtest import svg, table
from zlm.loadtest.figures import series, timings
from zlm.loadtest.session import Level
from zlm.loadtest.stream import Record
from zlm.loadtest.svg import Line, Point, chart

Tests = Sequence[tuple[str, Sequence[Level]]]  # of each server: its name and its levels

NUM_MOMENTS = 80  # into which a level's time is cut
MOST_SERIES = svg.NUM_COLOURS
STYLE = """\
:root{--back:#fff;--text:#1d2430;--soft:#5b6675;--rule:#dfe4ea;--card:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--back:#14181f;--text:#e6e9ee;--soft:#9aa5b4;
--rule:#2b323d;--card:#1b212a}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px 16px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:32px 0 8px}
p{margin:4px 0;color:var(--soft)}.bad{color:#c0392b}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 8px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--soft);font-weight:500;font-size:13px;white-space:normal;vertical-align:bottom}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:12px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px}
svg{width:100%;height:auto;display:block}
.title{font-size:14px;font-weight:600;fill:var(--text)}.label{font-size:11px;fill:var(--soft)}
.axis{stroke:var(--soft);fill:none}.grid{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:1.8}.dot{stroke:none;fill-opacity:.75}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0;color:var(--soft);font-size:13px}
.key i{display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:middle}
"""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f8c8d")
FOOTNOTE = """\
Times count from {origin}. TTFT: to the first event with output. ITL: between events of output.
TPOT: (E2E - TTFT) / (tokens - 1). E2E: to the last event of output. Percentiles by nearest rank.
Failed requests are in no time and no rate."""


def write_report(path: Path, tests: Tests) -> None:
    """Write the page to *path*; raises OSError."""
    path.write_text(page(tests), encoding="utf-8")


def write_records(path: Path, tests: Tests) -> None:
    """Write a line for each request; times in seconds from the level's first. Raises OSError."""
    with path.open("w", encoding="utf-8") as out:
        for name, levels in tests:
            for level in levels:
                began = _start(level.records)
                for record in level.records:
                    row = {"test": name, "level": table.name(level.figures)}
                    out.write(json.dumps(row | _facts(record, began)) + "\n")


def _facts(record: Record, began: float) -> dict[str, Any]:
    return {
        "due_s": round(record.intended - began, 6),
        "sent_s": round(record.sent - began, 6),
        "input_tokens": record.input_tokens or record.planned_input_tokens,
        "output_tokens": record.output_tokens,
        "error": record.error or None,
        "detail": record.detail or None,
        **{f"{key}_s": round(value, 6) for key, value in timings(record).items()},
        "read_s": [round(moment - began, 6) for moment in record.times],
        "events": list(record.counts),
    }


def page(tests: Tests) -> str:
    """Return the whole page."""
    named = [
        (
            f"{name}, {table.name(level.figures)}" if len(tests) > 1 else table.name(level.figures),
            level,
        )
        for name, levels in tests
        for level in levels
    ]
    colours = "".join(
        f".line.c{n}{{stroke:{c}}}.dot.c{n}{{fill:{c}}}.key .c{n}{{background:{c}}}"
        for n, c in enumerate(COLOURS)
    )
    origins = {level.figures["measured_from"] for _, level in named}
    origin = "when a request was due (open loop)" if "due" in origins else "when a request was sent"
    title = "Load test of " + " and ".join(name for name, _ in tests)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>zlm {__version__}, {datetime.now():%Y-%m-%d %H:%M}. {_lengths(tests)}</p>",
        *(_table(name, levels) for name, levels in tests),
        _ratios(tests),
        f"<p>{FOOTNOTE.format(origin=origin)}</p>",
        *_by_load(tests),
        *_by_request(named[:MOST_SERIES]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{colours}</style></head>"
        "<body><main>\n" + "\n".join(sections) + "\n</main></body></html>\n"
    )


def _table(name: str, levels: Sequence[Level]) -> str:
    heads = "".join(f"<th>{escape(title)}</th>" for title in ("load", *_titles()))
    rows, remarks = [], []
    for level in levels:
        cells = "".join(f"<td>{table.number(level.figures[k])}</td>" for _, k, _ in table.COLUMNS)
        rows.append(f"<tr><td>{escape(table.name(level.figures))}</td>{cells}</tr>")
        mark = ' class="bad"' if level.figures["errors"] else ""
        for line in table.remarks(level.figures):
            remarks.append(f"<p{mark}>{escape(table.name(level.figures))}: {escape(line)}</p>")
    return (
        f"<h2>{escape(name)}</h2><div class=wide><table><tr>{heads}</tr>{''.join(rows)}</table>"
        f"</div>{''.join(remarks)}"
    )


def _lengths(tests: Tests) -> str:
    first = tests[0][1][0].figures
    return escape(f"Tokens of a prompt: {first['prompt']}, of an answer: {first['output']}.")


def _ratios(tests: Tests) -> str:
    """Return the table of the second server's figures over the first's."""
    if len(tests) != 2:
        return ""
    heads = "".join(f"<th>{escape(title)}</th>" for title, _ in table.RATIOS)
    rows = []
    for first, second in zip(tests[0][1], tests[1][1], strict=True):
        a, b = first.figures, second.figures
        cells = "".join(f"<td>{table.ratio(a, b, key)}</td>" for _, key in table.RATIOS)
        rows.append(f"<tr><td>{escape(table.name(a))}</td>{cells}</tr>")
    return (
        f"<h2>B / A</h2><div class=wide><table><tr><th>load</th>{heads}</tr>{''.join(rows)}"
        "</table></div>"
    )


def _titles() -> Iterator[str]:
    """Return the columns' titles; a percentile's has its metric, and times their unit."""
    metric = ""
    for title, key, _ in table.COLUMNS:
        metric = title.split()[0] if " p50" in title else metric
        full = f"{metric} {title}" if title.startswith("p") else title
        yield f"{full}, ms" if key.endswith("_ms") else full


def _by_load(tests: Tests) -> list[str]:
    """Return the section of plots over load, if there are several levels."""
    if max(len(levels) for _, levels in tests) < 2:
        return []
    is_open = tests[0][1][0].pace.is_open
    load, of = ("requests a second offered", "rate") if is_open else ("requests at once", "conc")

    def lines(key: str, *, dashed: bool = False, label: str = "") -> list[Line]:
        found = []
        for colour, (name, levels) in enumerate(tests):
            pairs = [(level.figures[of], level.figures[key]) for level in levels]
            points = [(float(x), float(y)) for x, y in pairs if None not in (x, y)]
            found.append(Line(f"{name} {label}", points, colour, dashed))
        return found

    plots = [chart("Output tokens a second", load, "tokens/s", lines("out_tok_s"), log_x=True)]
    for metric in ("ttft", "itl", "e2e"):
        both = [
            *lines(f"{metric}_p50_ms", label="p50"),
            *lines(f"{metric}_p99_ms", dashed=True, label="p99"),
        ]
        title = f"{metric.upper()}: p50, and p99 dashed"
        plots.append(chart(title, load, "ms", both, log_x=True))
    key = _key([(name, None) for name, _ in tests]) if len(tests) > 1 else ""
    return ["<h2>Over load</h2>", key, _plots(plots)]


def _by_request(named: Sequence[tuple[str, Level]]) -> list[str]:
    """Return the section of plots over requests and over time, a colour for each level."""
    values = [
        series(level.records, streamed=bool(level.figures["ttft_p50_ms"])) for _, level in named
    ]
    plots = []
    for metric in ("ttft", "itl", "tpot", "e2e"):
        lines = [
            Line(name, _shares(found[metric]), colour)
            for colour, ((name, _), found) in enumerate(zip(named, values, strict=True))
        ]
        title = f"{metric.upper()}: share that took no longer"
        plots.append(chart(title, "ms", "%", lines, log_x=True))
    over_time = [
        ("Output tokens a second over time", "tokens/s", _token_rates, False),
        ("Requests under way over time", "requests", _under_way, False),
        ("TTFT over time, a dot for each request", "ms", _first_tokens, True),
    ]
    for title, unit, of, is_scatter in over_time:
        lines = [
            Line(name, of(level.records), colour, is_scatter=is_scatter)
            for colour, (name, level) in enumerate(named)
        ]
        plots.append(chart(title, "seconds from the level's start", unit, lines, log_x=False))
    return ["<h2>By request and over time</h2>", _key(named), _plots(plots)]


def _key(named: Sequence[tuple[str, Any]]) -> str:
    marks = "".join(
        f"<span><i class=c{n}></i>{escape(name)}</span>" for n, (name, _) in enumerate(named)
    )
    return f"<div class=key>{marks}</div>"


def _plots(plots: Sequence[str]) -> str:
    figures = "".join(f"<figure>{plot}</figure>" for plot in plots if plot)
    return f"<div class=plots>{figures}</div>"


def _shares(values: Sequence[float]) -> list[Point]:
    """Return the empirical distribution: (ms, percent of the values that are no greater)."""
    ordered = sorted(values)
    return [(1e3 * value, 100 * (n + 1) / len(ordered)) for n, value in enumerate(ordered)]


def _start(records: Sequence[Record]) -> float:
    return min((record.intended for record in records), default=0.0)


def _moments(records: Sequence[Record]) -> tuple[float, float]:
    """Return when the level began and how long each of its moments is."""
    began = _start(records)
    ended = max((record.ended for record in records), default=began)
    return began, max((ended - began) / NUM_MOMENTS, 1e-6)


def _token_rates(records: Sequence[Record]) -> list[Point]:
    began, width = _moments(records)
    tokens = [0.0] * (NUM_MOMENTS + 1)
    for record in records:
        an_event = record.output_tokens / max(record.events, 1)
        for moment, count in zip(record.times, record.counts, strict=True):
            tokens[min(NUM_MOMENTS, max(0, int((moment - began) / width)))] += count * an_event
    return [(at * width, count / width) for at, count in enumerate(tokens[:-1])]


def _under_way(records: Sequence[Record]) -> list[Point]:
    began, width = _moments(records)
    points = []
    for at in range(NUM_MOMENTS + 1):
        moment = began + at * width
        count = sum(record.sent <= moment < record.ended for record in records)
        points.append((at * width, float(count)))
    return points


def _first_tokens(records: Sequence[Record]) -> list[Point]:
    began = _start(records)
    return [
        (record.intended - began, 1e3 * timings(record)["ttft"])
        for record in records
        if record.times and not record.error
    ]

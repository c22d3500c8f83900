"""The report: figures in tables, plots that are well-formed, nothing asked of the network."""

import json
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zlm.loadtest.client import Seen
from zlm.loadtest.figures import figures
from zlm.loadtest.plan import Pace
from zlm.loadtest.report import page, write_records
from zlm.loadtest.session import Level
from zlm.loadtest.stream import Record
from zlm.loadtest.svg import Axis, Line, chart

VOID = {"meta", "br"}


def level(concurrency: int, number: int = 6) -> Level:
    records = []
    for at in range(number):
        record = Record(4, 3, intended=at * 0.1, sent=at * 0.1, usage_tokens=4)
        record.times = array("d", [at * 0.1 + 0.05 * n * concurrency for n in range(1, 5)])
        record.counts, record.ended = array("L", [1] * 4), record.times[-1]
        records.append(record)
    records.append(Record(4, intended=0.3, sent=0.3, ended=0.4, error="http_503", detail="<b>busy"))
    pace = Pace(concurrency=concurrency)
    found = figures(Seen(records, 0.01), pace) | {"prompt": 3, "output": "uniform:2:4"}
    return Level(pace, found, records)


class Strict(HTMLParser):
    """Fails at a tag that closes another, and collects what would ask the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [f"{n}={v}" for n, v in attrs if n in ("src", "href", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("servers", [1, 2])
def test_the_page_is_whole_and_needs_nothing(servers: int) -> None:
    tests = [(f"http://<{n}>", [level(1), level(4)]) for n in range(servers)]
    text = page(tests)
    assert Strict(text).links == []
    assert not re.search(r"@import|url\(|<script", text)
    assert "<b>busy" not in text and "http://<0>" not in text, "what came from outside is escaped"
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 4 + 7
    for svg in svgs:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    assert "errors: 1 x http_503" in text and "TTFT p99, ms" in text
    assert ("B / A" in text) == (servers == 2)
    found = tests[0][1][1].figures
    assert f"<td>{found['ttft_p50_ms']:.0f}</td>" in text


def test_a_page_of_one_level_without_an_answer() -> None:
    empty = level(1, 0)
    text = page([("m", [empty])])
    assert Strict(text).links == [] and "<td>-</td>" in text


def test_records_are_lines(tmp_path: Path) -> None:
    write_records(tmp_path / "r", [("m", [level(2)])])
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert len(rows) == 7 and rows[1]["ttft_s"] == pytest.approx(0.1)
    assert rows[1]["read_s"] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert (rows[6]["error"], rows[6]["detail"]) == ("http_503", "<b>busy")


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_has_round_ticks_in_order(is_log: bool) -> None:
    axis = Axis(0.9 if is_log else 0.0, 237.0, 60, 560, is_log)
    ticks = axis.ticks()
    assert ticks == ([1, 2, 5, 10, 20, 50, 100, 200] if is_log else [0, 50, 100, 150, 200])
    places = [axis.at(tick) for tick in ticks]
    assert places == sorted(places) and axis.at(237.0) == pytest.approx(560)


def test_a_chart_of_equal_values_is_one() -> None:
    for value in (0.0, 5.0):
        svg = chart("t", "x", "y", [Line("a", [(value, value)] * 3)], log_x=True)
        ElementTree.fromstring(svg)
        assert "nan" not in svg

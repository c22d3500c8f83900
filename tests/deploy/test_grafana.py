"""The Grafana dashboard reads what /metrics shows: each name and label that it asks for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from specs import small_spec

from zlm.config import Config, ModelOptions, Resolved
from zlm.frontend.exposition import Exposition

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "zlm.json"
NAME = re.compile(r"\b(?:vllm:|zlm:|http_)[a-z0-9_]+")
BY = re.compile(r"by \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
SELECTOR = re.compile(r"((?:vllm:|zlm:|http_)[a-z0-9_]+)\{([^}]*)\}")


def panels() -> list[dict[str, Any]]:
    board = json.loads(DASHBOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def exported() -> dict[str, set[str]]:
    """The samples of a server that has counted one of everything, with their labels."""
    resolved = Resolved(
        config=Config(model=ModelOptions(model="m")),
        spec=small_spec(vocab_size=100, max_position=256),
        model_path="m",
        tokenizer_path="m",
        served_names=("m",),
        device="cpu",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_groups=(),
    )
    counted = {"http\t/v1/completions\tPOST\t200": [1.0], "rejected\tnot_found": [1.0],
        "queue\tfrontend 0": [1.0]}  # fmt: skip
    text = Exposition(resolved).text({"frontend": {0: counted}}, {"engine 0": 1}).decode()
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_reads_what_there_is(panel: dict[str, Any]) -> None:
    samples = exported()
    assert panel["description"] and panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        names = NAME.findall(expression)
        assert names
        for name in names:
            assert name in samples, f"{name} is not exported"
        for name, selector in SELECTOR.findall(expression):
            for label in re.findall(r"(\w+)=", selector):
                assert label in samples[name], f"{name} has no label {label}"
        labels = {label.strip() for found in BY.findall(expression) for label in found.split(",")}
        assert labels <= set().union(*(samples[name] for name in names))
        assert set(LEGEND.findall(target["legendFormat"])) <= labels
        if "histogram_quantile" in expression:
            assert all(name.endswith("_bucket") for name in names) and "le" in labels


def test_every_family_that_counts_is_on_the_board() -> None:
    read = {name for p in panels() for t in p["targets"] for name in NAME.findall(t["expr"])}
    stems = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in read}
    left = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in exported()} - stems
    assert left == {
        "vllm:lora_requests_info", "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
    }, "what this version has none of"  # fmt: skip


def test_panels_have_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model"}

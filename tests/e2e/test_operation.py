"""What an operator sees of a running server: logs as JSON, metrics of two front ends, idle CPU."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL, Answer, Server, eventually_true
from tiny import tiny_checkpoint

IDLE_SECONDS = 4.0
MOST_IDLE_CPU = 0.01  # of one core


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operation")
    model = tiny_checkpoint(folder / "model", "llama")
    flags = ["--served-model-name", MODEL, "--log-format", "json", "--api-server-count", "2"]
    flags += ["--num-gpu-blocks-override", "64", "--cpu-threads", "1"]
    with Server(model, folder / "log", flags) as running:
        yield running


def records(server: Server) -> list[dict[str, Any]]:
    """All that was logged so far; each line must be an object."""
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def awaited(server: Server, number: int, field: str, value: str) -> list[dict[str, Any]]:
    """The records of that value; an answer is on its way to the client before it is logged."""

    def found() -> list[dict[str, Any]]:
        return [each for each in records(server) if each.get(field) == value]

    assert eventually_true(lambda: len(found()) >= number, 10)
    return found()


def counted(server: Server) -> dict[tuple[str, ...], float]:
    """The counters of one scrape, by name and labels, without those that the scrape changes."""
    text = server.request("GET", "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.type != "gauge" else ():
            labels = sample.labels
            if labels.get("route") not in ("/metrics", "/health"):
                key = (sample.name, *(f"{name}={labels[name]}" for name in sorted(labels)))
                found[key] = sample.value
    return found


def total(found: dict[tuple[str, ...], float], *wanted: str) -> float:
    return sum(value for key, value in found.items() if set(wanted) <= set(key))


def test_requests_are_counted_once_whichever_front_end_answers_and_is_asked(
    server: Server,
) -> None:
    before = counted(server)
    requests = 40

    def ask(number: int) -> Answer:
        if number % 4 == 3:
            return server.complete("a", nonsense=1)
        return server.complete([5, 6, 7], n=1 + number % 2, ignore_eos=True, max_tokens=5)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(requests)))
    assert [answer.status for answer in answers].count(200) == 30
    log = awaited(server, requests, "path", "/v1/completions")
    assert {each["process"] for each in log} == {"frontend", "frontend 1"}, "both had requests"
    assert eventually_true(lambda: server.metrics()["zlm:queue_requests"] == 0, 10)
    scrapes = [counted(server) for _ in range(12)]  # of either front end
    assert all(scrape == scrapes[0] for scrape in scrapes)

    def grown(*wanted: str) -> float:
        return total(scrapes[0], *wanted) - total(before, *wanted)

    route = "route=/v1/completions"
    assert grown("http_requests_total", route, "status=200") == 30
    assert grown("http_requests_total", route, "status=400") == 10
    assert grown("zlm:requests_rejected_total", "reason=unknown_field") == 10
    assert grown("vllm:request_success_total", "finished_reason=length") == 40
    assert grown("vllm:request_success_total") == 40
    assert grown("vllm:request_params_n_count") == 30
    assert grown("vllm:prompt_tokens_total") == 90
    assert grown("vllm:generation_tokens_total") == 200
    assert grown("vllm:e2e_request_latency_seconds_count") == 40
    assert grown("vllm:inter_token_latency_seconds_count") == 160
    assert total(scrapes[0], "zlm:engine_restarts_total") == 0


def test_the_start_is_told_as_a_table(server: Server) -> None:
    lines = [each["message"] for each in records(server) if each["process"] == "supervisor"]
    head = next(i for i, line in enumerate(lines) if line.startswith("process  "))
    end = next(i for i, line in enumerate(lines) if line.startswith("total  "))
    table = lines[head : end + 1]
    assert len({len(line) for line in table}) == 1
    assert [line.split()[:2] for line in table if line.startswith("worker")] == [["worker", "0"]]
    phases = [line[14:44].strip() for line in table]
    assert {"reading the model", "loading weights", "warming up"} <= set(phases)
    assert "waiting for the worker" in phases, "what passes in waiting is told apart"
    rows = [line.split() for line in table[1:]]
    assert all(float(row[-1]) > 10 for row in rows), "each process has some MiB"
    assert all(0 <= float(row[-3]) <= float(row[-2]) <= float(rows[-1][-2]) for row in rows)
    assert sum(line.startswith(("frontend", "engine", "tokenizer")) for line in table) == 4


def test_each_line_of_the_log_is_an_object_and_a_request_has_its_facts(server: Server) -> None:
    headers = {"X-Request-Id": "operation-1", "Content-Type": "application/json"}
    body = json.dumps(
        {"prompt": "private words", "max_tokens": 4, "ignore_eos": True, "stream": True}
    )
    start = time.time()
    assert server.request("POST", "/v1/completions", body.encode(), headers).status == 200
    (told,) = awaited(server, 1, "request_id", "operation-1")
    passed = time.time() - start
    assert told["level"] == "info" and told["logger"] == "zlm.frontend.access"
    assert told["method"] == "POST" and told["path"] == "/v1/completions"
    assert told["status"] == 200 and told["stream"] is True
    assert told["output_tokens"] == 4 and told["prompt_tokens"] > 4
    assert told["finish_reason"] == "length"
    parts = [told[f"{part}_seconds"] for part in ("queue", "prefill", "decode")]
    assert min(parts) >= 0 and sum(parts) <= told["seconds"] + 0.01
    assert told["seconds"] <= passed
    assert "private" not in server.log.read_text()


def test_an_idle_tree_uses_no_cpu(server: Server) -> None:
    ticks = os.sysconf("SC_CLK_TCK")

    def cpu_seconds() -> float:
        used = 0
        for pid in server.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])
        return used / ticks

    quiet = eventually_true(lambda: server.metric("vllm:num_requests_running") == 0, 10)
    assert quiet
    before, start = cpu_seconds(), time.monotonic()
    time.sleep(IDLE_SECONDS)  # what is measured is this time
    used = cpu_seconds() - before
    assert used <= MOST_IDLE_CPU * (time.monotonic() - start), f"{used} s of CPU time"

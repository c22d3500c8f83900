"""/metrics: every family of the list, counted once each, the sum of all processes' counts."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zlm.engine.stats import Statistics
from zlm.frontend.metrics import FrontendMetrics
from zlm.messages import Delta, Deltas, Failed
from zlm.metrics import STEP_TIME, histogram_buckets
from zlm.process import heartbeat
from zlm.process.counts import CountPage, path_of

LABELS = {"model_name": "tiny", "engine": "0"}

# Family → its type, for what an operator's dashboards and alerts may read.
FAMILIES = {
    **dict.fromkeys(
        (
            "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
            "vllm:lora_requests_info", "vllm:cache_config_info", "zlm:queue_requests",
            "zlm:process_memory_bytes",
        ), "gauge",
    ),
    **dict.fromkeys(
        (
            "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions",
            "vllm:prompt_tokens", "vllm:prompt_tokens_cached", "vllm:generation_tokens",
            "vllm:request_success", "vllm:spec_decode_num_drafts",
            "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
            "zlm:engine_steps", "zlm:run_ahead_stalls", "zlm:engine_restarts",
            "zlm:requests_rejected", "http_requests",
        ), "counter",
    ),
    **dict.fromkeys(
        (
            "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
            "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens",
            "vllm:request_generation_tokens", "vllm:iteration_tokens_total",
            "vllm:request_params_n", "vllm:request_params_max_tokens", STEP_TIME,
        ), "histogram",
    ),
}  # fmt: skip


def families(text: bytes) -> dict[str, Any]:
    return {f.name: f for f in text_string_to_metric_families(text.decode())}


def value(found: dict[str, Any], family: str, suffix: str = "", **labels: str) -> float:
    """The one sample of *family* that has these labels, and the model's if none is given."""
    samples = [s for s in found[family].samples if s.name == family + suffix]
    wanted = {**LABELS, **labels} if family.startswith("vllm") else labels
    (sample,) = [s for s in samples if wanted.items() <= s.labels.items()]
    return sample.value


def scrape(house: Any) -> dict[str, Any]:
    response = house.ask("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return families(response.body)


def test_every_family_is_there_from_the_start(house):
    found = scrape(house)
    assert {name: found[name].type for name in FAMILIES} == FAMILIES
    assert set(found) == set(FAMILIES)
    for family in found.values():
        assert family.documentation.strip() and family.documentation != family.name


@pytest.mark.parametrize("name", histogram_buckets(256))
def test_buckets(house, name):
    family = name if ":" in name else f"vllm:{name}"
    samples = [s for s in scrape(house)[family].samples if s.name == f"{family}_bucket"]
    bounds = [float(sample.labels["le"]) for sample in samples]
    assert bounds == [*histogram_buckets(256)[name], float("inf")]


def test_what_the_engine_core_counts(tmp_path: Path, make_resolved):
    statistics = Statistics(256, CountPage(path_of(tmp_path, "engine", 0)))
    statistics.show(num_running=3, num_waiting=1, kv_usage=0.25, num_blocks=64, steps_in_flight=2)
    statistics.looked_up(100, 40)
    statistics.prompt_tokens += 100
    statistics.prompt_tokens_cached += 40
    statistics.generation_tokens += 50
    statistics.preemptions += 2
    for gap in (0.004, 0.03, 100.0):
        statistics.next_token(gap)
    statistics.computed(0.004, stalled=True)
    statistics.planned(9)
    metrics = FrontendMetrics(0, tmp_path)
    metrics.configure(make_resolved())
    found = families(metrics.render())
    assert value(found, "vllm:num_requests_running") == 3
    assert value(found, "vllm:num_requests_waiting") == 1
    assert value(found, "vllm:kv_cache_usage_perc") == 0.25
    assert value(found, "vllm:prompt_tokens", "_total") == 100
    assert value(found, "vllm:prompt_tokens_cached", "_total") == 40
    assert value(found, "vllm:generation_tokens", "_total") == 50
    assert value(found, "vllm:prefix_cache_queries", "_total") == 100
    assert value(found, "vllm:prefix_cache_hits", "_total") == 40
    assert value(found, "vllm:num_preemptions", "_total") == 2
    assert value(found, "zlm:engine_steps", "_total") == 1
    assert value(found, "zlm:run_ahead_stalls", "_total") == 1
    gaps = "vllm:inter_token_latency_seconds"
    assert value(found, gaps, "_sum") == pytest.approx(100.034)
    assert value(found, gaps, "_count") == 3
    assert value(found, gaps, "_bucket", le="0.01") == 1
    assert value(found, gaps, "_bucket", le="80.0") == 2
    assert value(found, gaps, "_bucket", le="+Inf") == 3
    assert value(found, STEP_TIME, "_bucket", le="0.005") == 1
    assert value(found, "zlm:queue_requests", process="engine 0") == 1
    assert value(found, "zlm:queue_requests", process="worker 0") == 2
    assert value(found, "zlm:engine_restarts", "_total") == 0
    (info,) = found["vllm:cache_config_info"].samples
    assert info.labels["num_gpu_blocks"] == "64" and info.labels["block_size"] == "16"


def test_answers_by_route_and_status_and_rejections_by_reason(house):
    house.complete()
    house.complete(n=0)
    house.complete(nonsense=1)
    house.ask("GET", "/nowhere")
    house.ask("GET", "/health")
    house.ask("DELETE", "/health")  # what probes are told is no rejection
    house.ask("DELETE", "/v1/completions")
    house.ask("TRACE", "/v1/completions")
    found = scrape(house)

    def answers(route: str, method: str, status: str) -> float:
        return value(found, "http_requests", "_total", route=route, method=method, status=status)

    assert answers("/v1/completions", "POST", "200") == 1
    assert answers("/v1/completions", "POST", "400") == 2
    assert answers("(unknown)", "GET", "404") == 1
    assert answers("/health", "GET", "200") == 1
    assert answers("/health", "DELETE", "405") == 1
    assert answers("/v1/completions", "DELETE", "405") == 1
    assert answers("/v1/completions", "other", "405") == 1
    rejected = {s.labels["reason"]: s.value for s in found["zlm:requests_rejected"].samples}
    assert rejected == {
        "bad_request": 1, "unknown_field": 1, "not_found": 1, "method_not_allowed": 2,
    }  # fmt: skip


def _ends(found) -> dict[str, float]:
    samples = found["vllm:request_success"].samples
    return {s.labels["finished_reason"]: s.value for s in samples if s.value}


def test_each_sequence_is_counted_once_however_it_ends(house):
    house.complete(n=3)
    assert _ends(scrape(house)) == {"stop": 3}
    house.complete(stream=True)
    assert _ends(scrape(house)) == {"stop": 4}

    def half(command):
        """One of the choices ends, then the request fails."""
        first = Delta(command.request_id, 0, "a", 5, 0, 1, finish_reason="length")
        return [Deltas([first]), Failed(command.request_id, 500, "internal_error", "it broke")]

    house.tokenizer = half
    house.complete(n=3, stream=True)
    assert _ends(scrape(house)) == {"stop": 4, "length": 1, "error": 2}

    house.tokenizer = lambda command: [
        Failed(command.request_id, 400, "invalid_request_error", "no", code="unfit")
    ]
    house.complete(n=2)  # refused: no sequence of it ever ran
    house.tokenizer = lambda command: []
    client = house.client()
    client.request("POST", "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    found = scrape(house)
    assert value(found, "zlm:queue_requests", process="frontend 0") == 1
    assert value(found, "zlm:queue_requests", process="tokenizer 0") == 1
    client.leave()
    found = scrape(house)
    assert _ends(found) == {"stop": 4, "length": 1, "error": 2, "abort": 4}
    assert value(found, "zlm:requests_rejected", "_total", reason="unfit") == 1
    assert value(found, "zlm:queue_requests", process="frontend 0") == 0


def test_what_is_lost_with_the_engine_has_failed_and_was_not_rejected(house):
    house.tokenizer = lambda command: [
        Failed(command.request_id, 503, "overloaded_error", "restarting", retry_after_seconds=1)
    ]
    assert house.complete(n=2).status == 503
    found = scrape(house)
    assert _ends(found) == {"error": 2} and not found["zlm:requests_rejected"].samples


def test_any_front_end_tells_the_sum_of_all(tmp_path: Path, make_resolved):
    front_ends = [FrontendMetrics(index, tmp_path) for index in range(3)]
    for number, metrics in enumerate(front_ends, 1):
        metrics.configure(make_resolved())
        metrics._count_answer("/v1/completions", "POST", 200)
        metrics._finished["stop"][0] += number
        metrics.show_queues(number, [number, 10])
    texts = {metrics.render() for metrics in front_ends}
    assert len(texts) == 1
    found = families(texts.pop())
    assert value(found, "http_requests", "_total", route="/v1/completions") == 3
    assert value(found, "vllm:request_success", "_total", finished_reason="stop") == 6
    assert value(found, "zlm:queue_requests", process="frontend 1") == 2
    assert value(found, "zlm:queue_requests", process="tokenizer 0") == 6
    assert value(found, "zlm:queue_requests", process="tokenizer 1") == 30


def test_the_memory_of_each_process(tmp_path: Path, make_resolved):
    heartbeat.create(tmp_path, 4)
    heartbeat.Heartbeat(tmp_path, 0, "engine", 0)
    heartbeat.Heartbeat(tmp_path, 2, "frontend", 1)
    metrics = FrontendMetrics(0, tmp_path)
    metrics.configure(make_resolved())
    found = families(metrics.render())
    for process in ("engine 0", "frontend 1"):  # both are this one
        assert value(found, "zlm:process_memory_bytes", process=process) > 10 * 2**20


def test_a_front_end_s_successor_goes_on_and_ends_what_was_open(tmp_path: Path, make_resolved):
    killed = FrontendMetrics(0, tmp_path)
    killed._count_answer("/v1/completions", "POST", 200)
    killed.begun(5)
    killed.show_queues(2, [2])
    successor = FrontendMetrics(0, tmp_path)
    successor.configure(make_resolved())
    found = families(successor.render())
    assert value(found, "http_requests", "_total", route="/v1/completions") == 1
    assert _ends(found) == {"abort": 5}
    assert value(found, "zlm:queue_requests", process="frontend 0") == 0


def test_an_engine_core_s_successor_is_counted(tmp_path: Path, make_resolved):
    metrics = FrontendMetrics(0, tmp_path)
    metrics.configure(make_resolved())
    for restarts in range(3):
        statistics = Statistics(256, CountPage(path_of(tmp_path, "engine", 0)))
        statistics.generation_tokens += 10
        found = families(metrics.render())
        assert value(found, "zlm:engine_restarts", "_total") == restarts
        assert value(found, "vllm:generation_tokens", "_total") == 10 * (restarts + 1)


def test_before_the_launch_there_are_none(bare_house):
    bare_house.ask("GET", "/health")
    assert bare_house.ask("GET", "/metrics").status == 503

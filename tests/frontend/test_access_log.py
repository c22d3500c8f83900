"""The log's line for each request, as text and as fields."""

import logging

from zlm.messages import Delta, Deltas, Failed


def test_a_line_a_request(house, caplog):
    with caplog.at_level(logging.INFO, logger="zlm"):
        house.post("/v1/completions", {"prompt": "private text"}, {"X-Request-Id": "my-id"})
        house.ask("GET", "/health")
        house.ask("GET", "/a%0ab?secret=1")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # probes are not logged at this level
    assert lines[0].startswith("POST /v1/completions 200 0.")
    assert lines[0].endswith("s prompt=5 cached=2 output=4 finish=stop id=my-id")
    assert lines[1].startswith("GET /a%0ab 404 ") and " rejected=not_found " in lines[1]
    assert "private" not in caplog.text and "secret" not in caplog.text


def test_the_same_facts_as_fields(house, caplog):
    def tokenizer(command):
        times = (command.arrival + 0.25, command.arrival + 0.75)
        first = [Delta(command.request_id, i, "a", 5, 2 * (i == 0), 1) for i in range(2)]
        last = [
            Delta(command.request_id, i, "", 5, 2 * (i == 0), 3, finish_reason=reason, times=times)
            for i, reason in enumerate(("stop", "length"))
        ]
        return [Deltas(first), Deltas(last)]

    house.tokenizer = tokenizer
    with caplog.at_level(logging.INFO, logger="zlm"):
        house.complete(n=2, stream=True)
    (record,) = caplog.records
    facts = record.fields
    assert facts["method"] == "POST" and facts["path"] == "/v1/completions"
    assert facts["status"] == 200 and facts["stream"] is True and facts["sequences"] == 2
    assert facts["prompt_tokens"] == 5 and facts["cached_tokens"] == 2
    assert facts["output_tokens"] == 6 and facts["finish_reason"] == "stop,length"
    assert facts["queue_seconds"] == 0.25 and facts["prefill_seconds"] == 0.5
    assert len(facts["request_id"]) == 32
    assert " sequences=2 stream finish=stop,length queue=0.250s prefill=0.500s " in record.message


def test_a_stream_that_breaks_says_why(house, caplog):
    house.tokenizer = lambda command: [Deltas([Delta(command.request_id, 0, "a", 5, 0, 1)])]
    client = house.client()
    with caplog.at_level(logging.INFO, logger="zlm"):
        client.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
        house.loop.turn()
        request_id = house.generated().request_id
        house.take(Failed(request_id, 500, "internal_error", "it broke"))
    (record,) = caplog.records
    assert " 200 " in record.message and record.message.endswith(" cut off: it broke")
    assert record.fields["fault"] == "it broke"


def test_a_request_that_fails_before_its_answer_says_why(house, caplog):
    lost = "the engine is being restarted"
    house.tokenizer = lambda c: [Failed(c.request_id, 503, "overloaded_error", lost)]
    with caplog.at_level(logging.INFO, logger="zlm"):
        assert house.complete().status == 503
    (record,) = caplog.records
    assert " 503 " in record.message and record.message.endswith(f" failed: {lost}")
    assert record.fields["failure"] == lost and "rejected" not in record.fields


def test_the_log_can_be_turned_off(make_house, caplog):
    with caplog.at_level(logging.DEBUG, logger="zlm"):
        make_house(log_requests=False).complete()
    assert caplog.records == []


def test_a_client_that_left(house, caplog):
    house.tokenizer = lambda command: []
    client = house.client()
    client.request("POST", "/v1/completions", {"prompt": "x"})
    with caplog.at_level(logging.INFO, logger="zlm"):
        client.leave()
    (record,) = caplog.records
    assert " 499 " in record.getMessage() and record.levelno == logging.INFO
    assert record.fields["client_gone"] is True


def test_probes_are_told_at_debug_level(house, caplog):
    with caplog.at_level(logging.DEBUG, logger="zlm.frontend.access"):
        house.ask("GET", "/health")
        house.ask("GET", "/metrics")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2

"""GET /ui/events: what is told, of which processes, to whom; and that it costs nothing unseen."""

import threading
from pathlib import Path
from typing import Any

import pytest
from frontend_house import House, delta, resolved

from zlm.engine.stats import Statistics
from zlm.frontend.dashboard import LONGEST_SECONDS, MOST_VIEWERS, SECONDS
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.recent import SLOT_BYTES, SLOTS, RecentRequests
from zlm.frontend.server import Server
from zlm.messages import Administer, Deltas, Drain, Failed, Generate, Launch, ServerState
from zlm.process import notes
from zlm.process.counts import CountPage, path_of


def house_at(runtime: Path, index: int = 0, **server: Any) -> House:
    """A front end whose counts and requests others may read in *runtime*."""
    house = House(index=index)
    house.open = OpenRequests(index, house.loop.call_soon)
    metrics, recent = FrontendMetrics(index, runtime), RecentRequests(index, runtime)
    house.server = Server(house.open, metrics, None, recent, runtime=runtime)
    house.server.dashboard.later = house.loop.call_later  # type: ignore[assignment]
    house.open.connect([house._sender(0)])
    house.take(Launch(resolved(**server)))
    house.take(ServerState("ready"))
    return house


def watch(house: House, **headers: str):
    client = house.client()
    client.request("GET", "/ui/events", headers=headers)
    return client


def events(client) -> list[Any]:
    (response,) = client.responses()
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.events()


def timers(house: House) -> int:
    waiting = [timer for timer in house.loop.timers if not timer.cancelled]
    return len([timer for timer in waiting if timer.when - house.loop.now == SECONDS])


def test_it_needs_the_key(make_house):
    house = make_house(api_keys=("secret",))
    assert house.ask("GET", "/ui/events").status == 401
    (event,) = events(watch(house, Authorization="Bearer secret"))
    assert event["state"] == "ready"


def test_the_first_event_has_all_and_each_second_brings_another(house):
    client = watch(house)
    (first,) = events(client)
    about = first["about"]
    assert about["models"] == ["tiny"] and about["max_model_len"] == 256
    assert first["rates"] is None and first["recent"] == []
    assert set(first["counters"]) >= {"generation_tokens", "hits", "queries", "preemptions"}
    house.loop.advance(SECONDS)
    house.complete()
    house.loop.advance(SECONDS)
    _, second, third = events(client)
    assert "about" not in second and "recent" not in second
    assert set(second["rates"].values()) == {0.0}
    assert third["counters"]["finished"] == 1 and third["rates"]["finished"] > 0
    (ended,) = third["recent"]
    assert ended["route"] == "/v1/completions" and ended["finish"] == "stop"


def test_without_viewers_there_is_no_timer_and_nothing_is_read(house, monkeypatch):
    reads = []
    pages = house.server._metrics.pages
    monkeypatch.setattr(house.server._metrics, "pages", lambda: reads.append(1) or pages())
    house.complete()
    assert not reads and not timers(house)
    clients = [watch(house) for _ in range(3)]
    assert len(reads) == 1 and timers(house) == 1, "one look for all of them"
    house.loop.advance(SECONDS)
    assert len(reads) == 2 and timers(house) == 1
    for client in clients:
        client.leave()
    house.loop.advance(SECONDS)
    house.loop.advance(SECONDS)
    assert len(reads) == 2 and not timers(house)
    (again,) = events(watch(house))
    assert again["rates"] is None, "nobody knows how long it was away"


def test_one_who_is_behind_is_sent_nothing_until_it_has_caught_up(house):
    client, other = watch(house), watch(house)
    client.protocol.pause_writing()
    house.loop.advance(SECONDS)
    assert len(events(client)) == 1 and len(events(other)) == 2
    client.protocol.resume_writing()
    house.loop.advance(SECONDS)
    assert len(events(client)) == 2 and len(events(other)) == 3


def test_a_head_request_ends(house):
    response = house.ask("HEAD", "/ui/events")
    assert response.status == 200 and not timers(house)


def test_so_many_may_watch(house):
    for _ in range(MOST_VIEWERS):
        watch(house)
    message = house.refused(house.ask("GET", "/ui/events"), 503)
    assert str(MOST_VIEWERS) in message


def test_a_stream_ends_in_time_and_its_connection_goes_on(house, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("zlm.frontend.dashboard.time.monotonic", lambda: clock[0])
    client = watch(house)
    clock[0] += LONGEST_SECONDS + 1
    house.loop.advance(SECONDS)
    assert client.responses()[0].ended and not client.transport.closed
    assert not timers(house)
    client.request("GET", "/version")
    assert client.responses()[1].status == 200


def test_draining_sends_viewers_away(house):
    client = watch(house)
    house.take(Drain())
    house.loop.turn()
    assert client.responses()[0].ended and client.transport.closed and not timers(house)


def test_an_abort_of_all_requests_leaves_viewers_alone(make_house):
    house = make_house(admin_api_keys=("boss",))
    client = watch(house)
    house.tokenizer = lambda command: []
    working = house.client()
    working.request("POST", "/v1/completions", {"prompt": "x"})
    assert house.server.admin.perform(Administer(1, "abort_requests")).count == 1
    house.loop.advance(SECONDS)
    assert len(events(client)) == 2


def test_what_cannot_be_read_ends_the_streams(house, monkeypatch, caplog):
    client = watch(house)

    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(house.server._metrics, "pages", fail)
    house.loop.advance(SECONDS)
    assert client.responses()[0].ended and "Too many open files" in caplog.text
    house.assert_serves()


def test_the_state_and_its_reason(house):
    client = watch(house)
    house.take(ServerState("restarting", "the engine was lost"))
    house.loop.advance(SECONDS)
    last = events(client)[-1]
    assert (last["state"], last["reason"]) == ("restarting", "the engine was lost")


# ------------------------------------------------------------------------- several processes


def test_any_front_end_tells_of_all(tmp_path):
    engine = Statistics(256, CountPage(path_of(tmp_path, "engine", 0)))
    houses = [house_at(tmp_path, index) for index in range(3)]
    for number, house in enumerate(houses):
        for _ in range(number + 1):
            house.complete()
    houses[2].complete(n=0)
    engine.show(num_running=3, num_waiting=1, kv_usage=0.25, num_blocks=64, steps_in_flight=2)
    engine.looked_up(100, 40)
    engine.generation_tokens += 50
    engine.next_token(0.03)
    told = [events(watch(house))[0] for house in houses]
    for event in told:
        assert event["finished"] == {"stop": 6, "length": 0, "abort": 0, "error": 0}
        assert event["counters"]["rejected"] == 1
        assert event["counters"]["generation_tokens"] == 50
        assert (event["counters"]["queries"], event["counters"]["hits"]) == (100, 40)
        assert (event["running"], event["waiting"], event["kv_usage"]) == (3, 1, 0.25)
        bounds = event["about"]["bounds"]["gap"]
        counts = event["histograms"]["gap"]
        assert len(counts) == len(bounds) + 2 and sum(counts[:-1]) == 1
        assert counts[bounds.index(0.05)] == 1 and counts[-1] == pytest.approx(0.03)
        assert len(event["recent"]) == 7
        assert [each["at"] for each in event["recent"]] == sorted(
            (each["at"] for each in event["recent"]), reverse=True
        )
    assert told[0]["recent"] == told[1]["recent"] == told[2]["recent"]


def test_rates_are_growth_over_the_time_between(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("zlm.frontend.dashboard.time.monotonic", lambda: clock[0])
    house = house_at(tmp_path)
    engine = Statistics(256, CountPage(path_of(tmp_path, "engine", 0)))
    client = watch(house)
    engine.generation_tokens += 50
    engine.looked_up(30, 10)
    clock[0] += 2.0
    house.loop.advance(SECONDS)
    rates = events(client)[-1]["rates"]
    assert rates["generation_tokens"] == 25 and rates["queries"] == 15 and rates["hits"] == 5


def test_notes_are_told_when_they_are_written(tmp_path):
    house = house_at(tmp_path)
    client = watch(house)
    assert events(client)[0]["about"]["memory"] is None
    house.loop.advance(SECONDS)
    assert "about" not in events(client)[-1]
    plan = {"title": "a card", "parts": [["KV cache", 5]], "groups": []}
    notes.write(tmp_path, notes.MEMORY, plan)
    notes.write(tmp_path, notes.START, {"seconds": 2.5, "phases": []})
    house.loop.advance(SECONDS)
    about = events(client)[-1]["about"]
    assert about["memory"] == plan and about["start"]["seconds"] == 2.5
    house.loop.advance(SECONDS)
    assert "about" not in events(client)[-1]


# --------------------------------------------------------------------------- recent requests


def stream(house: House, *, begun: bool) -> Any:
    """Ask for a stream that does not end; return the connection."""
    house.tokenizer = lambda command: (
        [Deltas([delta(command, 0, "a", 1)])] if begun and isinstance(command, Generate) else []
    )
    client = house.client()
    client.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    house.loop.turn()
    return client


def recent(house: House) -> list[dict[str, Any]]:
    return events(watch(house))[0]["recent"]


def test_each_request_by_how_it_ended(tmp_path):
    house = house_at(tmp_path)
    house.complete(stream=True)
    house.complete(n=0)
    house.tokenizer = lambda c: [Failed(c.request_id, 500, "internal_error", "it broke")]
    house.complete()
    stream(house, begun=True)
    failure = Failed(house.generated().request_id, 500, "internal_error", "it broke")
    house.take(failure)
    stream(house, begun=False).leave()
    stream(house, begun=True).leave()
    house.ask("GET", "/v1/models")
    house.ask("GET", "/metrics")
    ended = recent(house)
    told = [(e["status"], e.get("problem", ""), e.get("finish", "")) for e in ended]
    assert told[::-1] == [
        (200, "", "stop"), (400, "bad_request", ""), (500, "failed", ""), (200, "cut off", ""),
        (499, "client gone", ""), (200, "client gone", ""),
    ]  # fmt: skip
    first = ended[-1]
    assert (first["prompt"], first["cached"], first["output"]) == (5, 2, 4)
    assert first["stream"] is True and first["sequences"] == 1


def test_nothing_that_a_client_wrote_is_told(tmp_path):
    house = house_at(tmp_path, api_keys=("secret",))
    key = {"Authorization": "Bearer secret"}
    house.ask("POST", "/v1/completions?q=aardvark", {"prompt": "aardvark"},
              {**key, "X-Request-Id": "aardvark"})  # fmt: skip
    body = {"prompt": "x", "model": "aardvark", "user": "aardvark"}
    assert house.ask("POST", "/v1/completions", body, key).status == 404
    assert house.ask("POST", "/v1/completions", {"aardvark": 1}, key).status == 400
    assert house.ask("POST", "/aardvark", {}, key).status == 404
    client = watch(house, **key)
    assert len(events(client)[0]["recent"]) == 3
    assert b"aardvark" not in client.output and b"secret" not in client.output
    pages = b"".join(path.read_bytes() for path in tmp_path.glob("recent-*"))
    assert b"aardvark" not in pages and b"completions" in pages


def test_the_oldest_make_room_for_the_newest(tmp_path):
    house = house_at(tmp_path)
    for number in range(SLOTS + 5):
        house.complete(max_tokens=number + 1)
    page = tmp_path / "recent-0"
    assert page.stat().st_size == SLOTS * SLOT_BYTES
    told = recent(house)
    assert len(told) == 50 and told[0]["at"] >= told[-1]["at"]
    again = house_at(tmp_path)
    assert recent(again) == told, "a successor goes on with the page"


def test_a_slot_that_is_being_written_is_left_out(tmp_path):
    house = house_at(tmp_path)
    house.complete()
    house.complete()
    page = tmp_path / "recent-0"
    data = bytearray(page.read_bytes())
    data[12] ^= 1
    page.write_bytes(data)
    assert len(recent(house)) == 1


def test_readers_and_a_writer_at_once(tmp_path):
    """What is read beside the writing is whole, and of this server."""
    house = house_at(tmp_path)
    reader = RecentRequests(1, tmp_path)
    stop, read = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            read.append({each.route for each in reader.newest()})

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(200):
        house.complete()
    stop.set()
    thread.join()
    assert read and set().union(*read) <= {"/v1/completions"}


def test_a_stream_that_its_client_left_is_counted_as_aborted(house):
    """It has a status already, so the count goes by whether the client is gone."""
    stream(house, begun=True).leave()
    assert events(watch(house))[0]["finished"]["abort"] == 1

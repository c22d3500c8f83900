"""The connection: order, limits, timers, back-pressure, and what a hostile client may send.

CASES 88 and 90.
"""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: zlm\r\n\r\n"
GET_VERSION = b"GET /version HTTP/1.1\r\nHost: zlm\r\n\r\n"
COMPLETIONS = "/v1/completions"
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_health_answer_is_whole_and_one_write(house):
    client = house.client()
    client.send(GET_HEALTH)
    assert len(client.transport.written) == 1
    head = client.output.decode()
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    (response,) = client.responses()
    assert response.headers["content-length"] == "0"
    assert response.headers["server"] == "zlm"
    assert response.headers["date"].endswith("GMT")
    assert "content-type" not in response.headers
    assert not client.transport.closed


def test_many_posts_on_one_connection(house):
    client = house.client()
    for _ in range(20):
        client.request("POST", COMPLETIONS, {"prompt": "x"})
        house.loop.turn()
    assert [r.status for r in client.responses()] == [200] * 20
    assert not client.transport.closed


def test_pipelined_requests_are_answered_in_order(house, render_request):
    client = house.client()
    client.methods = ["POST", "GET", "POST"]
    first = render_request("POST", COMPLETIONS, {"prompt": "x"})
    client.send(first + GET_VERSION + render_request("POST", "/tokenize", {"prompt": "y"}))
    assert client.output == b""
    house.loop.turn()
    completion, version, tokens = client.responses()
    assert "choices" in completion.json()
    assert "version" in version.json()
    assert tokens.json()["tokens"] == [7, 8]


def test_error_of_a_pipelined_request_waits_for_its_turn(house, render_request):
    client = house.client()
    client.methods = ["POST", "GET"]
    client.send(render_request("POST", COMPLETIONS, {"prompt": "x"}) + b"GARBAGE\r\n\r\n")
    house.loop.turn()
    assert [r.status for r in client.responses()] == [200, 400]
    assert client.transport.eof_written


def test_reading_pauses_behind_a_request_in_progress(house, render_request):
    client = house.client()
    house.tokenizer = lambda command: []
    client.request("POST", COMPLETIONS, {"prompt": "x"})
    client.send(GET_VERSION * 500)
    assert client.transport.reading  # up to a point, so that a close is noticed
    client.send(GET_VERSION * 1500)
    assert not client.transport.reading
    house.take(_whole(house))
    house.loop.turn()
    assert client.transport.reading
    assert [r.status for r in client.responses()] == [200] * 2001


def test_answers_pause_while_the_socket_is_behind(house):
    client = house.client()
    client.protocol.pause_writing()
    client.send(GET_VERSION * 3)
    assert client.output == b""
    client.protocol.resume_writing()
    assert len(client.responses()) == 3


def test_chunked_body(house):
    client = house.client()
    body = b'{"prompt":"x"}'
    client.methods = ["POST", "GET"]
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: zlm\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1;ext=1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\nTrailer: x\r\n\r\n"
        + GET_VERSION
    )
    house.loop.turn()
    assert [r.status for r in client.responses()] == [200, 200]
    assert house.generated().prompts == ["x"]


def test_expect_continue(house):
    client = house.client()
    body = b'{"prompt":"x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: zlm\r\nExpect: 100-continue\r\n"
    client.methods = ["POST"]
    client.send(head + b"Content-Length: %d\r\n\r\n" % len(body))
    assert client.output == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(body)
    house.loop.turn()
    assert [r.status for r in client.responses()] == [100, 200]


def test_expect_continue_waits_for_the_request_before_it(house, render_request):
    client = house.client()
    client.methods = ["POST", "POST"]
    first = render_request("POST", COMPLETIONS, {"prompt": "x"})
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: z\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n"
    )
    client.send(first + head)
    assert client.output == b""
    house.loop.turn()
    client.send(b'{"prompt":"x"}')
    house.loop.turn()
    assert [r.status for r in client.responses()] == [200, 100, 200]


@pytest.mark.parametrize(
    "length", [b"Content-Length: 1000000", b"Expect: 100-continue\r\nContent-Length: 14"]
)
def test_refusal_before_the_body_comes_closes(house, length):
    client = house.client()
    client.send(b"POST /nowhere HTTP/1.1\r\nHost: z\r\n" + length + b"\r\n\r\n")
    (response,) = client.responses()
    assert response.status == 404
    assert response.headers["connection"] == "close"
    assert client.transport.eof_written


def test_head_and_options(house):
    client = house.client()
    for path in ("/health", "/ping", "/version", "/v1/models"):
        client.request("HEAD", path)
    client.request("OPTIONS", COMPLETIONS)
    *heads, options = client.responses()
    assert [r.status for r in heads] == [200] * 4
    assert int(heads[2].headers["content-length"]) > 0
    assert options.status == 204
    assert "content-length" not in options.headers


def test_http_1_0(house):
    client = house.client()
    client.send(b"GET /version HTTP/1.0\r\n\r\n")
    assert client.responses()[0].headers["connection"] == "close"
    assert client.transport.closed
    client = house.client()
    client.send(b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert client.responses()[0].headers["connection"] == "keep-alive"
    assert not client.transport.closed


def test_http_1_0_stream_ends_with_the_connection(house):
    client = house.client()
    body = b'{"prompt":"x","stream":true}'
    client.send(
        b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    house.loop.turn()
    (response,) = client.responses()
    assert "transfer-encoding" not in response.headers
    assert response.headers["connection"] == "close"
    assert response.events()[-1] == "[DONE]"
    assert client.transport.closed


def test_connection_close_is_honoured(house):
    client = house.client()
    client.request("GET", "/version", headers={"Connection": "close"})
    assert client.responses()[0].headers["connection"] == "close"
    assert client.transport.closed


def test_upgrade_to_h2c_is_passed_over(house):
    client = house.client()
    body = b'{"prompt":"x"}'
    client.methods = ["POST", "GET"]
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: z\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AA\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    client.send(GET_VERSION)
    house.loop.turn()
    assert [r.status for r in client.responses()] == [200, 200]
    assert house.generated().prompts == ["x"]


SMUGGLING = {
    "length and chunked": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "length list": b"Content-Length: 3, 3\r\n\r\nabc",
    "negative length": b"Content-Length: -3\r\n\r\nabc",
    "huge length": b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "xchunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"Host: a\r\nHost: b\r\n\r\n",
    "folded header": b"A: b\r\n c\r\n\r\n",
    "nul in a header": b"A: \x00\r\n\r\n",
    "bad chunk size": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLING.values(), ids=SMUGGLING.keys())
def test_ambiguous_framing_is_refused_and_the_connection_closed(house, rest):
    client = house.client()
    client.methods = ["POST"]
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: z\r\n" + rest + GET_VERSION)
    (response,) = client.responses()
    assert response.status == 400
    assert response.error["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"
    assert client.transport.eof_written
    house.assert_serves()


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/3.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: a\n\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_1_gets_400(house, data):
    client = house.client()
    client.send(data)
    assert [r.status for r in client.responses()] == [400]
    assert client.transport.eof_written
    house.assert_serves()


def test_long_headers(house):
    for size in (70_000, 1_000_000):
        client = house.client()
        data = b"GET /health HTTP/1.1\r\nHost: z\r\nA: " + b"x" * size + b"\r\n\r\n"
        for at in range(0, len(data), 10_000):
            client.send(data[at : at + 10_000])
        assert [r.status for r in client.responses()] == [431]
        house.assert_serves()


def test_unfinished_headers_do_not_pile_up(house):
    client = house.client()
    client.send(b"GET /health HTTP/1.1\r\nHost: z\r\nA: ")
    fed = 0
    while not client.output:
        client.send(b"x" * 1000)
        fed += 1000
    assert fed <= house.server.limits.max_header_bytes + 1000
    assert [r.status for r in client.responses()] == [431]


def test_many_headers_and_long_target(house):
    client = house.client()
    client.send(b"GET /health HTTP/1.1\r\nHost: z\r\n" + b"a: b\r\n" * 128 + b"\r\n")
    assert [r.status for r in client.responses()] == [431]
    client = house.client()
    client.send(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: z\r\n\r\n")
    assert [r.status for r in client.responses()] == [431]
    client = house.client()
    client.send(b"GET /health HTTP/1.1\r\nHost: z\r\n" + b"a: b\r\n" * 127 + b"\r\n")
    assert [r.status for r in client.responses()] == [200]


def test_body_over_the_limit_by_length(make_house):
    house = make_house(limits={"max_body_bytes": 1000})
    client = house.client()
    client.methods = ["POST"]
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Length: 1001\r\n\r\n")
    (response,) = client.responses()
    assert response.status == 413
    assert "1000" in response.error["message"]
    assert response.headers["connection"] == "close"
    # The rest is read and dropped, so that the client can see the answer.
    assert client.transport.eof_written and not client.transport.closed
    client.send(b"x" * 1001)
    house.loop.advance(2.0)
    assert client.transport.aborted
    house.assert_serves()


def test_body_over_the_limit_chunked(make_house):
    house = make_house(limits={"max_body_bytes": 1000})
    client = house.client()
    client.methods = ["POST"]
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1000):
        client.send(b"1\r\n \r\n")
    assert client.output == b""
    client.send(b"1\r\n \r\n" * 50)
    assert [r.status for r in client.responses()] == [413]
    client.send(b"1\r\n \r\n" * 50)
    assert [r.status for r in client.responses()] == [413]
    house.assert_serves()


def test_memory_of_a_refused_body_does_not_grow(make_house):
    import tracemalloc

    house = make_house(limits={"max_body_bytes": 100_000})
    client = house.client()
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    tracemalloc.start()
    for _ in range(160):  # 10 MB
        client.send(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_refused_request_with_a_small_body_keeps_the_connection(house, render_request):
    client = house.client()
    client.methods = ["POST", "POST", "GET"]
    client.send(render_request("POST", "/nowhere", b"x" * 1000))
    client.send(render_request("POST", COMPLETIONS, b"x", {"Content-Type": "text/plain"}))
    client.send(GET_VERSION)
    assert [r.status for r in client.responses()] == [404, 415, 200]
    assert not client.transport.closed


def test_slow_body_gets_408(house):
    client = house.client()
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: z\r\nContent-Length: 100\r\n\r\n")
    for _ in range(29):
        house.loop.advance(1.0)
        client.send(b" ")  # bytes that trickle in do not extend the time
    assert client.output == b""
    house.loop.advance(1.0)
    (response,) = client.responses()
    assert response.status == 408
    assert "30 seconds" in response.error["message"]
    house.assert_serves()


def test_slow_headers_get_408(house):
    client = house.client()
    client.send(b"GET /health HT")
    house.loop.advance(30.0)
    assert [r.status for r in client.responses()] == [408]


def test_time_of_a_body_starts_anew_with_each_request(house):
    client = house.client()
    half = len(GET_VERSION) // 2
    client.send(GET_VERSION[:half])
    house.loop.advance(20.0)
    client.send(GET_VERSION[half:] + GET_VERSION[:half])
    house.loop.advance(20.0)
    client.send(GET_VERSION[half:])
    assert [r.status for r in client.responses()] == [200, 200]


def test_long_generation_is_not_timed(house):
    client = house.client()
    house.tokenizer = lambda command: []
    client.request("POST", COMPLETIONS, {"prompt": "x"})
    client.send(GET_VERSION[:10])
    house.loop.advance(1000.0)
    assert client.output == b"" and not client.transport.closed
    house.take(_whole(house))
    house.loop.turn()
    client.methods.append("GET")
    client.send(GET_VERSION[10:])
    assert [r.status for r in client.responses()] == [200, 200]


def test_idle_connection_is_closed(house):
    silent, served = house.client(), house.client()
    house.loop.advance(70.0)
    served.send(GET_VERSION)
    house.loop.advance(10.0)
    assert silent.transport.closed and not silent.transport.aborted
    assert not served.transport.closed
    house.loop.advance(75.0)
    house.loop.turn()
    assert served.transport.closed
    assert house.server.connections == set()


def test_client_that_never_reads_its_answer_is_cut(house):
    client = house.client()
    client.send(GET_VERSION)
    client.transport.unsent_bytes = 10
    house.loop.advance(75.0)
    assert client.transport.closed and not client.transport.aborted
    house.loop.advance(75.0)
    assert client.transport.aborted


def test_stream_that_the_client_does_not_take_is_cut(house):
    client = house.client()
    house.tokenizer = lambda command: []
    client.request("POST", COMPLETIONS, {"prompt": "x", "stream": True})
    client.transport.unsent_bytes = 100_000
    client.protocol.pause_writing()
    client.transport.unsent_bytes = 90_000  # a slow client gets on, and is let be
    house.loop.advance(75.0)
    assert not client.transport.closed
    house.loop.advance(75.0)
    house.loop.turn()
    assert client.transport.aborted
    assert len(house.cancelled()) == 1 and len(house.open) == 0


def test_client_that_catches_up_is_not_cut(house):
    client = house.client()
    client.transport.unsent_bytes = 100_000
    client.protocol.pause_writing()
    house.loop.advance(70.0)
    client.protocol.resume_writing()
    client.send(GET_VERSION)
    house.loop.advance(70.0)
    assert not client.transport.closed


def test_fault_in_a_handler_is_a_500(house, monkeypatch):
    def broken(exchange):
        raise KeyError("secret")

    monkeypatch.setattr(house.server, "handle", broken)
    client = house.client()
    client.request("GET", "/version")
    (response,) = client.responses()
    assert response.status == 500
    assert "secret" not in response.error["message"]
    monkeypatch.undo()
    house.assert_serves()


def _whole(house):
    """The rest of the answer to the last Generate."""
    from zlm.messages import Delta, Deltas

    request_id = house.generated().request_id
    return Deltas([Delta(request_id, 0, "x", 1, 0, 1, finish_reason="stop")])


# ------------------------------------------------------------------------------------- fuzz

PIECES = [
    GET_HEALTH,
    b'POST /tokenize HTTP/1.1\r\nHost: z\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}',
    b"POST /tokenize HTTP/1.1\r\nHost: z\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'7\r\n{"promp\r\n7\r\nt":"x"}\r\n0\r\n\r\n',
    b"POST /nowhere HTTP/1.1\r\nHost: z\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /tokenize HTTP/1.1\r\nHost: z\r\n"
    b"Content-Length: 3\r\nContent-Type: text/plain\r\n\r\nabc",
    b"POST /tokenize HTTP/1.1\r\nHost: z\r\nContent-Length: 99999999\r\n\r\nabc",
    b"POST /tokenize HTTP/1.1\r\nHost: z\r\nUpgrade: h2c\r\nConnection: upgrade\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    b"GET /version HTTP/1.1\r\nHost: z\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: z\r\nA: " + b"a" * 3000 + b"\r\n\r\n",
    b"BROKEN\r\n\r\n",
]


def _outcome(house, pieces):
    client = house.client()
    client.methods = ["POST"] * 100
    for piece in pieces:
        client.send(piece)
        house.loop.turn()
    client.house.loop.turn()
    return [(r.status, r.body, r.headers.get("connection")) for r in client.responses()]


@FUZZ
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    st.lists(st.integers(1, 400), max_size=30),
)
def test_any_split_of_the_bytes_gives_the_same_answers(make_house, messages, sizes):
    house = make_house(limits={"max_header_bytes": 2000})
    data = b"".join(messages)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    pieces.append(data[at:])
    split = _outcome(house, [piece for piece in pieces if piece])
    assert split == _outcome(house, [data])


def test_byte_by_byte(house):
    for message in PIECES[:5]:
        whole = _outcome(house, [message])
        assert _outcome(house, [bytes([byte]) for byte in message]) == whole
        assert len(whole) == 1


@FUZZ
@given(st.data())
def test_broken_bytes_never_break_the_server(house, data):
    """Random edits of good requests: whatever comes, answers are well-formed and nothing raises."""
    raw = bytearray(b"".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=3))))
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    raw += data.draw(st.binary(max_size=50))
    client = house.client()
    for at in range(0, len(raw), 97):
        client.send(bytes(raw[at : at + 97]))
        house.loop.turn()
    assert client.output == b"" or client.output.startswith(b"HTTP/1.1 ")
    client.leave()
    assert client.protocol not in house.server.connections
    assert len(house.open) == 0
    house.assert_serves()

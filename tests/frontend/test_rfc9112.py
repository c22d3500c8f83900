"""The points of RFC 9112 (HTTP/1.1) that are checked, as a table, each with bytes that show it.

A row is a section, what it demands of a server, what is sent, and the statuses of the answers. With
``CLOSED`` at its end the connection carries no more requests: what follows in the same bytes is
nobody's. MARK is a request that must be answered where the connection lives, and must not be where
it does not: hidden in a body, or behind a message that two parsers may read in two ways, it is what
a smuggler wants answered.
"""

import pytest

MARK = b"GET /version HTTP/1.1\r\nHost: z\r\n\r\n"
CLOSED = -1
POST = b"POST /tokenize HTTP/1.1\r\nHost: z\r\n"
GET = b"GET /health/live HTTP/1.1\r\nHost: z\r\n"
BODY = b'{"prompt":"x"}'
CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n9\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = b"Content-Length: 14\r\n"

POINTS = [
    # ---- 2.2 message parsing
    ("2.2", "an empty line before the request line is passed over", b"\r\n" + GET + b"\r\n", [200]),
    ("2.2", "white space before the first header is refused",
        b"GET /version HTTP/1.1\r\n Host: z\r\n\r\n", [400, CLOSED]),
    ("2.2", "a bare LF ends no line of the head", b"GET /version HTTP/1.1\nHost: z\n\n",
        [400, CLOSED]),
    ("2.2", "a bare CR within a header is refused", GET + b"A: b\rc: d\r\n\r\n", [400, CLOSED]),
    ("2.2", "a zero byte within a header is refused", GET + b"A: b\0c\r\n\r\n", [400, CLOSED]),
    ("2.2", "what is no HTTP is answered 400", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        [400, CLOSED]),
    # ---- 2.3, 3 request line
    ("2.3", "HTTP/2.0 on this connection is refused", b"GET /version HTTP/2.0\r\n\r\n",
        [400, CLOSED]),
    ("2.3", "HTTP/0.9 is refused", b"GET /version\r\n\r\n", [400, CLOSED]),
    ("2.3", "the name of the protocol is of one case", b"GET /version http/1.1\r\nHost: z\r\n\r\n",
        [400, CLOSED]),
    ("3", "spaces before the target count as one, as the section allows",
        b"GET  /health/live HTTP/1.1\r\nHost: z\r\n\r\n", [200]),
    ("3", "white space within the target is refused",
        b"GET /ver sion HTTP/1.1\r\nHost: z\r\n\r\n", [400, CLOSED]),
    ("3", "a tab is no space", b"GET\t/version HTTP/1.1\r\nHost: z\r\n\r\n", [400, CLOSED]),
    ("3", "a line that is too long is refused",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: z\r\n\r\n", [431, CLOSED]),
    ("3.1", "a method is of one case", b"get /version HTTP/1.1\r\nHost: z\r\n\r\n", [400, CLOSED]),
    ("3.1", "a method that is not there is 405",
        b"DELETE /version HTTP/1.1\r\nHost: z\r\n\r\n", [405]),
    ("3.2", "HTTP/1.1 without Host is 400", b"GET /version HTTP/1.1\r\n\r\n", [400, CLOSED]),
    ("3.2", "two Host headers are 400",
        b"GET /version HTTP/1.1\r\nHost: z\r\nHost: y\r\n\r\n", [400, CLOSED]),
    ("3.2", "the same Host twice is 400, too",
        b"GET /version HTTP/1.1\r\nHost: z\r\nhost: z\r\n\r\n", [400, CLOSED]),
    ("3.2", "a Host that is none is 400",
        b"GET /version HTTP/1.1\r\nHost: a b\r\n\r\n", [400, CLOSED]),
    ("3.2", "a list of hosts is 400", b"GET /version HTTP/1.1\r\nHost: a, b\r\n\r\n",
        [400, CLOSED]),
    ("3.2", "Host may be empty, have a port, or be an IPv6 address",
        b"".join(b"GET /version HTTP/1.1\r\nHost: %b\r\n\r\n" % host
                 for host in (b"", b"z:8000", b"[::1]:8000")), [200, 200, 200]),
    ("3.2", "HTTP/1.0 needs no Host",
        b"GET /version HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", [200]),
    ("3.2.1", "the query is no part of the path", b"GET /version?a=b HTTP/1.1\r\nHost: z\r\n\r\n",
        [200]),
    ("3.2.2", "the absolute form is taken",
        b"GET http://other/version HTTP/1.1\r\nHost: z\r\n\r\n", [200]),
    ("3.2.3", "the authority form is for CONNECT, which is refused",
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n", [400, CLOSED]),
    ("3.2.4", "the asterisk form is taken for OPTIONS",
        b"OPTIONS * HTTP/1.1\r\nHost: z\r\n\r\n", [204]),
    # ---- 5 header fields
    ("5.1", "white space before the colon is refused", GET + b"A : b\r\n\r\n", [400, CLOSED]),
    ("5.1", "a header without a name is refused", GET + b": b\r\n\r\n", [400, CLOSED]),
    ("5.1", "a line without a colon is refused", GET + b"nonsense\r\n\r\n", [400, CLOSED]),
    ("5.1", "white space around a value is none of it",
        POST + b"Content-Type: \t application/json \t \r\n" + LENGTH + b"\r\n" + BODY, [200]),
    ("5.2", "a folded header is refused", GET + b"A: b\r\n c\r\n\r\n", [400, CLOSED]),
    ("5.2", "a folded Transfer-Encoding is refused",
        POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    # ---- 6.1 Transfer-Encoding
    ("6.1", "chunked is decoded", CHUNKED + CHUNKS, [200]),
    ("6.1", "chunked is known in any case",
        POST + b"transfer-encoding: Chunked\r\n\r\n" + CHUNKS, [200]),
    ("6.1", "a coding that is not known is refused",
        POST + b"Transfer-Encoding: gzip\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.1", "gzip, chunked is refused",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.1", "chunked that is not last is refused",
        POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.1", "chunked twice is refused",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        [400, CLOSED]),
    ("6.1", "a misspelt coding is refused",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.1", "a vertical tab is no white space",
        POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.1", "in HTTP/1.0 it is refused",
        b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    # ---- 6.2 and 6.3 Content-Length and the extent of a body
    ("6.2", "a length ends the body", POST + LENGTH + b"\r\n" + BODY, [200]),
    ("6.3", "without either there is no body", POST + b"\r\n", [400]),
    ("6.3", "length and coding together are refused",
        POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.3", "in the other order, too",
        POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKS, [400, CLOSED]),
    ("6.3", "length 0 with a coding, too",
        POST + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, [400, CLOSED]),
    ("6.3", "two lengths that differ are refused",
        POST + LENGTH + b"Content-Length: 15\r\n\r\n" + BODY, [400, CLOSED]),
    ("6.3", "two equal lengths, too", POST + LENGTH + LENGTH + b"\r\n" + BODY, [400, CLOSED]),
    ("6.3", "a list of lengths, too", POST + b"Content-Length: 14, 14\r\n\r\n" + BODY,
        [400, CLOSED]),
    *(("6.3", f"the length {wrong!r} is refused",
        POST + b"Content-Length: " + wrong + b"\r\n\r\n" + BODY, [400, CLOSED])
        for wrong in (b"-1", b"+14", b"0x0e", b"1e1", b"14.0", b"1_4", b"\xb2", b"14;", b"1 4",
                      b"99999999999999999999999")),
    ("6.3", "a length over the limit is 413", POST + b"Content-Length: 99999999999\r\n\r\n",
        [413, CLOSED]),
    ("6.3", "a body of GET is read, and is no request",
        GET + b"Content-Length: %d\r\n\r\n" % len(MARK) + MARK, [200]),
    # ---- 7.1 chunks
    ("7.1", "a size may have zeros in front and be of either case",
        CHUNKED + b"00e\r\n" + BODY + b"\r\n000\r\n\r\n", [200]),
    ("7.1.1", "extensions of chunks are passed over",
        CHUNKED + b"E;a=b;c\r\n" + BODY + b"\r\n0;d\r\n\r\n", [200]),
    ("7.1.2", "trailers are read and dropped",
        CHUNKED + b"E\r\n" + BODY + b"\r\n0\r\nAuthorization: Bearer x\r\nA: b\r\n\r\n", [200]),
    ("7.1.2", "a length among the trailers is refused",
        CHUNKED + b"E\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\n\r\n", [400, CLOSED]),
    ("7.1.2", "trailers count for the limit of headers",
        CHUNKED + b"E\r\n" + BODY + b"\r\n0\r\n" + b"a: b\r\n" * 200 + b"\r\n", [431, CLOSED]),
    *(("7.1", f"the size {wrong!r} is refused",
        CHUNKED + wrong + b"\r\n" + BODY + b"\r\n0\r\n\r\n", [400, CLOSED])
        for wrong in (b"0xe", b"-e", b"+e", b"g", b"", b" e", b"e ", b"ffffffffffffffffff")),
    ("7.1", "a chunk that is longer than its size is refused",
        CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n", [400, CLOSED]),
    ("7.1", "a bare LF ends no size", CHUNKED + b"E\n" + BODY + b"\r\n0\r\n\r\n", [400, CLOSED]),
    ("7.1", "a bare LF ends no chunk", CHUNKED + b"E\r\n" + BODY + b"\n0\r\n\r\n", [400, CLOSED]),
    ("7.1", "a bare LF in an extension ends no size",
        CHUNKED + b"E;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n", [400, CLOSED]),
    # ---- 9 connections
    ("9.3", "a connection of HTTP/1.1 lives on", GET + b"\r\n", [200]),
    ("9.3", "one of HTTP/1.0 does not", b"GET /version HTTP/1.0\r\n\r\n", [200, CLOSED]),
    ("9.3.2", "pipelined requests are answered in order",
        GET + b"\r\n" + b"GET /nowhere HTTP/1.1\r\nHost: z\r\n\r\n" + GET + b"\r\n",
        [200, 404, 200]),
    ("9.6", "Connection: close is kept", GET + b"Connection: close\r\n\r\n", [200, CLOSED]),
    ("9.6", "among others, and in any case", GET + b"Connection: foo, Close\r\n\r\n",
        [200, CLOSED]),
]  # fmt: skip


def run(house, data: bytes) -> tuple[list[int], bool]:
    """Return the statuses of the answers to *data* and then MARK, and whether MARK had one."""
    client = house.client()
    client.send(data + MARK)
    house.loop.turn()
    answers = client.responses()
    assert all(answer.ended for answer in answers)
    statuses = [answer.status for answer in answers]
    last = answers[-1]
    marked = last.status == 200 and b'"version"' in last.body
    closed = client.transport.closed or client.transport.eof_written
    assert closed == (last.headers.get("connection") == "close")
    return statuses, marked and not closed


@pytest.mark.parametrize(
    ("section", "point", "data", "expected"),
    POINTS,
    ids=[f"{section} {point}" for section, point, _, _ in POINTS],
)
def test_point(house, section, point, data, expected):
    statuses, lives = run(house, data)
    if expected[-1] == CLOSED:
        assert statuses == expected[:-1] and not lives
    else:
        assert statuses == [*expected, 200] and lives
    house.assert_serves()


@pytest.mark.parametrize(
    ("section", "point", "data", "expected"), POINTS[::3], ids=[p[1] for p in POINTS[::3]]
)
def test_point_byte_by_byte(house, section, point, data, expected):
    """However the bytes come, they mean the same."""
    client = house.client()
    for byte in data + MARK:
        client.send(bytes([byte]))
    house.loop.turn()
    statuses = [answer.status for answer in client.responses()]
    assert statuses == (expected[:-1] if expected[-1] == CLOSED else [*expected, 200])


def test_a_body_that_is_refused_hides_no_request(house):
    """A request in the body of one that is refused is not answered, whatever it was refused for."""
    for head in (
        b"POST /nowhere HTTP/1.1\r\nHost: z\r\n",
        b"GET /tokenize HTTP/1.1\r\nHost: z\r\n",
        POST + b"Content-Type: text/plain\r\n",
        POST + b"Content-Encoding: gzip\r\n",
    ):
        client = house.client()
        client.send(head + b"Content-Length: %d\r\n\r\n" % len(MARK) + MARK)
        house.loop.turn()
        (answer,) = client.responses()
        assert answer.status in (404, 405, 415)

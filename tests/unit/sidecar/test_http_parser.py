"""Requests come out the same in whatever portions their bytes come in; what is ambiguous is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.sidecar.http_parser import MAX_HEAD_BYTES, Head, RequestParser, parse_request_head, parse_response_head
from perdure.sidecar.problems import ProblemError


class Sink:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.bodies = 0

    def on_head(self, head: Head) -> None: ...

    def on_body(self, size: int) -> None:
        self.bodies += size

    def on_request(self, head: Head, body: bytes) -> None:
        self.requests.append((head.method, head.target, body))


def plain(n: int, body: bytes) -> bytes:
    return b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (n, len(body), body)


def chunked(n: int, body: bytes) -> bytes:
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7))
    return b"POST /%d HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n%b0\r\nTrailer: x\r\n\r\n" % (n, chunks)


@given(
    bodies=st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    gap=st.booleans(),
)
def test_requests_are_the_same_in_any_portions(bodies: list[tuple[bool, bytes]], cuts: list[int], gap: bool) -> None:
    data = b"".join((b"\r\n" if gap else b"") + (chunked if in_chunks else plain)(n, body) for n, (in_chunks, body) in enumerate(bodies))
    sink = Sink()
    parser = RequestParser(sink)
    at = 0
    for cut in sorted(cuts):
        parser.feed(data[at:cut])
        at = max(at, cut)
    parser.feed(data[at:])
    assert sink.requests == [("POST", f"/{n}", body) for n, (_, body) in enumerate(bodies)]
    assert sink.bodies == sum(len(body) for _, body in bodies)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/2\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\na",
        b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\naa",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"GET /" + b"a" * MAX_HEAD_BYTES,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    sink = Sink()
    with pytest.raises(ProblemError) as refused:
        RequestParser(sink).feed(data)
    assert refused.value.problem.status in (400, 431)
    assert not sink.requests


def test_after_an_upgrade_the_bytes_are_not_http_any_more() -> None:
    sink = Sink()
    parser = RequestParser(sink)
    parser.feed(b"GET /s HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n\x81\x85GET / HTTP/1.1\r\n\r\n")
    assert parser.upgraded
    assert parser.rest == b"\x81\x85GET / HTTP/1.1\r\n\r\n"
    assert len(sink.requests) == 1


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", True),
        (b"GET / HTTP/1.1\r\nConnection: Close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive", True),
    ],
)
def test_keep_alive_follows_the_version_and_the_header(lines: bytes, keep_alive: bool) -> None:
    assert parse_request_head(lines).keep_alive is keep_alive


def test_headers_are_lower_case_trimmed_and_joined() -> None:
    head = parse_request_head(b"GET /a?b=c HTTP/1.1\r\nX-A:  1 2 \r\nx-a:3\r\nEmpty:")
    assert head.headers == {"x-a": "1 2, 3", "empty": ""}
    assert head.length == 0


def test_a_response_is_its_status_and_headers() -> None:
    assert parse_response_head(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket") == (101, {"upgrade": "websocket"})
    assert parse_response_head(b"HTTP/1.1 503")[0] == 503
    with pytest.raises(ProblemError):
        parse_response_head(b"SSH-2.0-OpenSSH")

"""HTTP/1.1 messages out of bytes, strictly (RFC 9112): what could be read in two ways is refused, not guessed.

Only what a server on loopback and a WebSocket client need. Bytes come in any portions; :class:`RequestParser` calls its sink when a head
and when a whole request is there.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from msgspec import Struct

from perdure.sidecar.problems import refuse

MAX_HEAD_BYTES: Final = 32_768
_MAX_CHUNK_LINE: Final = 1024
_END: Final = b"\r\n\r\n"

_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?")
_HEADER: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*((?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?)[ \t]*"
)
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")

_SINGLE: Final = frozenset({"content-length", "transfer-encoding", "host", "authorization"})


class Head(Struct, frozen=True):
    """``headers`` have lower-case names; repeated ones are joined with ``, ``. ``length`` None: chunked."""

    method: str
    target: str
    headers: dict[str, str]
    keep_alive: bool
    length: int | None

    @property
    def upgrade(self) -> str:
        """What the client wants the connection to become, "" when nothing."""
        options = {option.strip().lower() for option in self.headers.get("connection", "").split(",")}
        return self.headers.get("upgrade", "").lower() if "upgrade" in options else ""


class Sink(Protocol):
    """Both may raise ProblemError; the parser is then of no more use."""

    def on_head(self, head: Head) -> None: ...
    def on_body(self, size: int) -> None:
        """``size`` more bytes of the body are being kept."""

    def on_request(self, head: Head, body: bytes) -> None: ...


def parse_headers(lines: list[bytes]) -> dict[str, str]:
    """Raises ProblemError."""
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise refuse("bad-request", f"not a header: {line[:80]!r}")
        name, value = found[1].decode("ascii").lower(), found[2].decode("latin-1")
        if name not in headers:
            headers[name] = value
        elif name in _SINGLE:
            raise refuse("bad-request", f"the header {name} is there twice")
        else:
            headers[name] += f", {value}"
    return headers


def parse_request_head(data: bytes) -> Head:
    """``data`` without the empty line at its end. Raises ProblemError."""
    line, *rest = data.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise refuse("bad-request", f"not the first line of an HTTP/1.1 request: {line[:80]!r}")
    headers = parse_headers(rest)
    connection = {option.strip().lower() for option in headers.get("connection", "").split(",")}
    keep_alive = "close" not in connection and (found[3] == b"1" or "keep-alive" in connection)
    encoding, length = headers.get("transfer-encoding"), headers.get("content-length", "0")
    if encoding is not None and (encoding.lower() != "chunked" or "content-length" in headers):
        raise refuse("bad-request", "of transfer encodings only chunked is known, and not together with Content-Length")
    if not (length.isascii() and length.isdecimal() and len(length) <= 15):
        raise refuse("bad-request", f"Content-Length is {length[:40]!r}")
    return Head(found[1].decode("ascii"), found[2].decode("ascii"), headers, keep_alive, None if encoding else int(length))


def parse_response_head(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ProblemError."""
    line, *rest = data.split(b"\r\n")
    found = _STATUS_LINE.fullmatch(line)
    if found is None:
        raise refuse("bad-request", f"not the first line of an HTTP/1.1 response: {line[:80]!r}")
    return int(found[1]), parse_headers(rest)


class RequestParser:
    """The requests of one connection, one after the other. After a request that asks for an upgrade nothing more is parsed: what came
    behind it is in :attr:`rest`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = bytearray()
        self._head: Head | None = None
        self._left = 0
        self._body: list[bytes] = []
        self._step = self._read_head
        self.upgraded = False

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)

    def feed(self, data: bytes) -> None:
        """Raises ProblemError."""
        self._buffer += data
        while not self.upgraded and self._step():
            pass

    # Each step takes something from the buffer and gives True, or needs more and gives False.

    def _read_head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):
            del self._buffer[:2]
        end = self._buffer.find(_END)
        if (end if end >= 0 else len(self._buffer)) > MAX_HEAD_BYTES:
            raise refuse("headers-too-large", f"the head of a request may have {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return False
        self._head = head = parse_request_head(bytes(self._buffer[:end]))
        del self._buffer[: end + len(_END)]
        self._sink.on_head(head)
        self._left = head.length or 0
        self._step = self._read_chunk_line if head.length is None else self._read_body
        return True

    def _read_body(self) -> bool:
        if self._left:
            part = bytes(self._buffer[: self._left])
            if not part:
                return False
            del self._buffer[: len(part)]
            self._left -= len(part)
            self._sink.on_body(len(part))
            self._body.append(part)
            return True
        head, body = self._head, b"".join(self._body)
        assert head is not None
        if head.length is None:
            self._step = self._read_chunk_end
            return True
        self._complete(head, body)
        return True

    def _complete(self, head: Head, body: bytes) -> None:
        self._body.clear()
        self._step = self._read_head
        self.upgraded = bool(head.upgrade)
        self._sink.on_request(head, body)

    def _line(self, limit: int) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, limit + 2)
        if end < 0:
            if len(self._buffer) > limit:
                raise refuse("bad-request", "a line of the chunked body is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _read_chunk_line(self) -> bool:
        line = self._line(_MAX_CHUNK_LINE)
        if line is None:
            return False
        found = _CHUNK_SIZE.fullmatch(line)
        if found is None:
            raise refuse("bad-request", f"not the size of a chunk: {line[:40]!r}")
        self._left = int(found[1], 16)
        self._step = self._read_body if self._left else self._read_trailer
        return True

    def _read_chunk_end(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise refuse("bad-request", "a chunk is longer than its size says")
        del self._buffer[:2]
        self._step = self._read_chunk_line
        return True

    def _read_trailer(self) -> bool:
        line = self._line(MAX_HEAD_BYTES)
        if line is None:
            return False
        if not line:
            assert self._head is not None
            self._complete(self._head, b"".join(self._body))
        return True

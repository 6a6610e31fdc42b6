"""Ways to a gateway: by its address, or by a connection that somebody else makes (a port-forward). Connections are kept and used again."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

KEPT = 4
"""Idle connections: the threads of one command."""


class Route:
    """``url`` is http or https. ``dial``: makes a connected socket, instead of resolving the url's host, which is what the certificate must
    say all the same; ``why``: tells what is known of a connection that ended at once. ``ca``: PEM text; only what it signed is trusted, or,
    if ``system_ca``, what this machine trusts as well.
    """

    def __init__(
        self, url: str, *, dial: Callable[[], socket.socket] | None = None, why: Callable[[], str] = str, ca: str = "",
        system_ca: bool = True, name: str = "", connect_seconds: float | None = None,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        self._name = name or url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._dial = dial or (lambda: socket.create_connection((self._host, self._port), timeout=connect_seconds))
        self._why = why
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context() if system_ca or not ca else ssl.create_default_context(cadata=ca)
            if ca and system_ca:
                self._tls.load_verify_locations(cadata=ca)
        self._idle: list[http.client.HTTPConnection] = []

    def __str__(self) -> str:
        return self._name

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A new connection, ready to be asked. Raises OSError."""
        raw = self._dial()
        try:
            raw.settimeout(timeout)
            connected = self._tls.wrap_socket(raw, server_hostname=self._host) if self._tls is not None else raw
        except OSError as error:
            raw.close()
            if reason := self._why():
                raise ConnectionError(reason) from error
            raise
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        connection.sock = connected
        # Opening anew is this class's: http.client would do without dial and TLS.
        connection.auto_open = 0
        return connection

    def exchange(self, method: str, path: str, data: bytes | None, headers: dict[str, str], timeout: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError or HTTPException. Asked again where a kept connection turns out to have ended."""
        with contextlib.suppress(IndexError, ConnectionError, http.client.HTTPException):
            return self._ask(self._idle.pop(), method, path, data, headers)
        return self._ask(self.connect(timeout), method, path, data, headers)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            raw = response.read()
        except BaseException:
            connection.close()
            raise
        # Where the other side closes, HTTPConnection has given up its socket.
        if connection.sock is not None and len(self._idle) < KEPT:
            self._idle.append(connection)
        else:
            connection.close()
        return response.status, raw

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

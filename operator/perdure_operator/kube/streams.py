"""Requests to an apiserver that go on: the logs of a pod, a connection to a port of a pod. For the command line; the operator needs none.

They are apart from :mod:`client`, whose requests are answered at once, counted and limited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from perdure_operator.kube.connection import Connection
from perdure_operator.kube.errors import KubeUnavailable
from perdure_operator.kube.refusals import refusal

CONNECT_SECONDS = 5.0
PING_SECONDS = 30.0
"""Less than what load balancers before apiservers take for the end of a quiet connection."""

MAX_LINE_BYTES = 1 << 22


class Streams:
    """A session of its own. Close it, or use it as a context manager. Raises the errors of :mod:`errors`."""

    def __init__(self, connection: Connection, user_agent: str) -> None:
        self._connection = connection
        endpoint = connection.endpoint
        self._proxy, self._server_name = endpoint.proxy, endpoint.server_name
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=endpoint.tls()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"User-Agent": user_agent},
            read_bufsize=MAX_LINE_BYTES,
            trust_env=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @asynccontextmanager
    async def read(self, path: str, query: Mapping[str, str]) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of an answer, as it comes."""
        try:
            async with self._session.get(
                self._url(path, query), headers=await self._headers(), proxy=self._proxy, server_hostname=self._server_name
            ) as response:
                if response.status >= 300:
                    raise refusal(response.status, response.headers, await response.read(), f"get {path}")
                yield response.content
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _cut(path, error) from error

    @asynccontextmanager
    async def websocket(self, path: str, query: Mapping[str, str], protocol: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        try:
            async with self._session.ws_connect(
                self._url(path, query), protocols=[protocol], headers=await self._headers(), proxy=self._proxy,
                server_hostname=self._server_name, heartbeat=PING_SECONDS, max_msg_size=0,
            ) as socket:  # fmt: skip
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            raise refusal(error.status, error.headers or {}, error.message.encode(), f"connect {path}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _cut(path, error) from error

    def _url(self, path: str, query: Mapping[str, str]) -> URL:
        return URL(self._connection.endpoint.server + path, encoded=True).with_query(query)

    async def _headers(self) -> dict[str, str]:
        authorization = await self._connection.authorization()
        return {} if authorization is None else {"Authorization": authorization}


def _cut(path: str, error: Exception) -> KubeUnavailable:
    return KubeUnavailable(f"{path}: the connection to the apiserver failed: {str(error) or type(error).__name__}")

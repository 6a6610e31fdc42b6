"""A Postgres that speaks TLS, with a certificate of its own authority: what the embedded one, built without it, says in plain text.

It does what Postgres does: it says yes to an SSLRequest, then TLS, then what the client and the server say to each other.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

from tests.harness.authority import Authority

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


@asynccontextmanager
async def speaking_tls(dsn: str, authority: Authority, host: str = "localhost", *, asks: bool = False) -> AsyncIterator[str]:
    """Gives the DSN of the same database over TLS, without an sslmode. ``host``: whom the certificate is for; ``asks``: clients must show
    one of the authority's."""
    server = authority.issue("postgres", host)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.pem)
    context.load_cert_chain(server.certificate, server.key)
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    parts = urlsplit(dsn)
    talks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            if await reader.readexactly(len(_SSL_REQUEST)) != _SSL_REQUEST:
                return  # plain text: not with this server
            writer.write(b"S")
            await writer.drain()
            await writer.start_tls(context)
            inner = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                await asyncio.gather(_pass(reader, inner[1]), _pass(inner[0], writer))
            finally:
                inner[1].close()
        except (OSError, EOFError):
            pass
        finally:
            talks.discard(task)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    login = f"{parts.username}:{parts.password}@" if parts.password else f"{parts.username}@"
    try:
        yield urlunsplit(("postgresql", f"{login}localhost:{port}", parts.path, "", ""))
    finally:
        listening.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

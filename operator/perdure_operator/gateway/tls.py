"""The gateway's certificate, as it is now: whoever issues it replaces the files while the gateway runs.

Connections that are open stay as they are; the next handshake shows the new certificate.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)
LOOK_SECONDS = 10.0


class Certificate:
    """``context`` is for a listener. Raises OSError when the files cannot be read or, as ssl.SSLError, are no certificate and its key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(certificate, key)
        self._loaded = self._contents()

    def refresh(self) -> None:
        """Takes files that have changed. The old certificate stays when they do not fit together, as in the middle of a replacement."""
        try:
            if (contents := self._contents()) == self._loaded:
                return
            # First into a context that nobody uses: a key that does not fit must not break the one in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self.context.load_cert_chain(*self._files)
        except OSError as error:
            log.warning("the new certificate cannot be used; the old one stays", error=str(error))
            return
        self._loaded = contents
        log.info("the certificate was replaced", file=str(self._files[0]))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def _contents(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files)

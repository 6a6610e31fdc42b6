"""How a JSON value is stored: small ones in place, others once a run as a compressed blob addressed by (run, hash).

The stored form says of itself which it is: ``\\x00`` + the JSON, or ``\\x01`` + run id (16 bytes) + sha256 (32 bytes). The address
carries its run because results travel: a parent's wait holds its child's output. No addressing across runs: it would leak equality
between tenants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

import asyncpg
import zstandard

from perdure_operator.domain.errors import CorruptPayload

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

INLINE_BYTES = 1024
LARGEST_BYTES = 64 * 1024 * 1024
"""No value that was ever accepted is larger."""
_INLINE, _BLOB = b"\x00", b"\x01"
_compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
_decompressor = zstandard.ZstdDecompressor()


@dataclass(frozen=True, slots=True)
class Blob:
    run: UUID
    hash: bytes
    data: bytes


def encode(run: UUID, raw: bytes) -> tuple[bytes, Blob | None]:
    """The stored form of ``raw`` for ``run``, and the blob that must be written with it, if any."""
    if len(raw) <= INLINE_BYTES:
        return _INLINE + raw, None
    digest = hashlib.sha256(raw).digest()
    return _BLOB + run.bytes + digest, Blob(run, digest, _compressor.compress(raw))


def weight(run: UUID, raw: bytes) -> tuple[int, int]:
    """Bytes of JSON, and as they are stored."""
    stored, blob = encode(run, raw)
    return len(raw), len(stored) + (len(blob.data) if blob is not None else 0)


def in_place(stored: bytes) -> bytes | None:
    """The JSON of a value that is small enough to be stored where it is used; None for one that must be loaded."""
    return stored[1:] if stored[:1] == _INLINE else None


class Room:
    """How many bytes of JSON a reading may hold: ``total``, and ``each`` for a single value."""

    def __init__(self, total: int, each: int | None = None) -> None:
        self.left = total
        self._each = total if each is None else each

    def take(self, size: int) -> bool:
        """False, and nothing taken, if it does not fit."""
        if size > self.left or size > self._each:
            return False
        self.left -= size
        return True

    def begin(self, size: int) -> bool:
        """As ``take``, but what passes the limit is taken as well, as the last one."""
        fits = self.left > 0
        self.left -= size
        return fits

    def charge(self, size: int) -> None:
        """For what is there in any case."""
        self.left -= size


class Payloads:
    """Resolves stored forms to JSON, all blobs of one reading in one query: collect with ``want``, ``load``, then ``get``.

    A reading whose size nobody knows is measured first (``measure``, ``size``): a frame says how much it unpacks to, so what is not taken
    is neither read nor unpacked. A few bytes can stand for two megabytes."""

    def __init__(self) -> None:
        self._wanted: set[bytes] = set()
        self._found: dict[bytes, bytes] = {}
        self._sizes: dict[bytes, int] = {}

    @classmethod
    async def of(cls, connection: Connection, stored: Iterable[bytes | None]) -> Payloads:
        """All of these, loaded."""
        payloads = cls()
        payloads.want(stored)
        await payloads.load(connection)
        return payloads

    def want(self, stored: Iterable[bytes | None]) -> None:
        self._wanted.update(s for s in stored if s is not None and s[:1] == _BLOB)

    async def measure(self, connection: Connection, stored: Iterable[bytes | None]) -> None:
        """Afterwards ``size`` knows these."""
        missing = [s for s in {s for s in stored if s is not None and s[:1] == _BLOB} if s not in self._sizes]
        if not missing:
            return
        rows = await connection.fetch(
            "select run_id, hash, substring(data for 18) as head "
            "from perdure.blobs join unnest($1::uuid[], $2::bytea[]) as w(run_id, hash) using (run_id, hash)",
            [UUID(bytes=s[1:17]) for s in missing],
            [s[17:49] for s in missing],
        )
        for row in rows:
            if (size := _unpacked(row["head"])) is not None:
                self._sizes[_BLOB + row["run_id"].bytes + row["hash"]] = size

    def size(self, stored: bytes | None) -> int:
        """Bytes of JSON, of what was measured. Raises CorruptPayload."""
        if stored is None:
            return len(b"null")
        if stored[:1] == _INLINE:
            return len(stored) - 1
        try:
            return self._sizes[stored]
        except KeyError:
            raise _broken(stored) from None

    def here(self, stored: bytes | None) -> bool:
        """Whether ``get`` would give it."""
        return stored is None or stored[:1] == _INLINE or stored in self._found

    async def load(self, connection: Connection) -> None:
        missing = [s for s in self._wanted if s not in self._found]
        if not missing:
            return
        rows = await connection.fetch(
            "select run_id, hash, data from perdure.blobs join unnest($1::uuid[], $2::bytea[]) as w(run_id, hash) using (run_id, hash)",
            [UUID(bytes=s[1:17]) for s in missing],
            [s[17:49] for s in missing],
        )
        for row in rows:
            with suppress(zstandard.ZstdError):  # a broken one counts as missing
                if _unpacked(row["data"][:18]) is not None:
                    self._found[_BLOB + row["run_id"].bytes + row["hash"]] = _decompressor.decompress(row["data"])

    def get(self, stored: bytes | None) -> bytes:
        """The JSON; ``null`` for nothing. Raises CorruptPayload."""
        if stored is None:
            return b"null"
        if stored[:1] == _INLINE:
            return stored[1:]
        try:
            return self._found[stored]
        except KeyError:
            raise _broken(stored) from None


def _unpacked(head: bytes) -> int | None:
    """To how many bytes a frame unpacks, by its head; None if it says nothing, or more than any value has: it is none of ours."""
    try:
        size = zstandard.frame_content_size(head)
    except zstandard.ZstdError:
        return None
    return size if 0 <= size <= LARGEST_BYTES else None


def _broken(stored: bytes) -> CorruptPayload:
    return CorruptPayload(f"blob {stored[17:49].hex()} of run {UUID(bytes=stored[1:17])} is missing or broken")

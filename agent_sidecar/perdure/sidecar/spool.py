"""A write-ahead log on disk: what is here survives the death of this process, until it is acknowledged.

Segments are files of records ``[length 4][type 1][sequence 8][crc32 4][payload]``, big-endian; ``length`` is that of the payload, the
CRC covers type, sequence and payload. An acknowledgement is a record too (type 2, its sequence is the acknowledged one, no payload). A
segment is emptied, or goes, when all that it holds is acknowledged. A torn tail, the trace of a crash in the middle of a write, is cut;
a record with a bad CRC is reported and skipped, never given back.

Appending only buffers; :meth:`Spool.take_buffer` and :meth:`Spool.write` are apart so that the slow half (write, fsync) can run in a
thread while the event loop appends on.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

ENTRY: Final = 1
ACKNOWLEDGED: Final = 2

SEGMENT_BYTES: Final = 4 * 1024 * 1024
_EMPTY_SHARE: Final = 1 / 16
"""A segment that is this full and holds only acknowledged entries is emptied."""

MAX_RECORD_BYTES: Final = 16 * 1024 * 1024

_HEAD: Final = struct.Struct(">IBQI")
_CHECKED: Final = struct.Struct(">BQ")
_SUFFIX: Final = ".wal"


class Record(Struct, frozen=True):
    sequence: int
    payload: bytes


class Damage(Struct, frozen=True):
    """``what``: torn-tail (was cut), bad-crc (one record), bad-length (the rest of the segment). ``size`` in bytes."""

    segment: str
    offset: int
    size: int
    what: str


class Recovery(Struct, frozen=True):
    """What was found at the start: entries without an acknowledgement by sequence, and what could not be read."""

    records: tuple[Record, ...]
    damage: tuple[Damage, ...]


def encode_record(kind: int, sequence: int, payload: bytes) -> bytes:
    checked = _CHECKED.pack(kind, sequence)
    return _HEAD.pack(len(payload), kind, sequence, zlib.crc32(payload, zlib.crc32(checked))) + payload


class Spool:
    """One process owns a folder. Raises OSError where the disk does."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._fd: int | None = None
        self._segment = ""
        self._segment_size = 0
        self._buffer = bytearray()
        self._next = 1
        self._open: dict[int, str] = {}
        """Unacknowledged sequence -> its segment; "" while it is only buffered."""
        self._buffered: list[int] = []
        self._sealed: list[str] = []
        self._damaged: set[str] = set()
        self._next_segment = 1

    @property
    def last_sequence(self) -> int:
        return self._next - 1

    @property
    def unacknowledged(self) -> int:
        return len(self._open)

    # -------------------------------------------------------------------------------------------- recovery

    def recover(self) -> Recovery:
        """Reads the folder (made if it is not there), cuts a torn tail, removes what is acknowledged. To be called once, first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[int, Record] = {}
        damage: list[Damage] = []
        segments = sorted(self._folder.glob(f"*{_SUFFIX}"))
        for path in segments:
            for entry in self._scan(path, found, last=path == segments[-1]):
                damage.append(entry)
                if entry.what == "torn-tail":
                    _truncate(path, entry.offset)
                else:
                    self._damaged.add(path.name)
            self._sealed.append(path.name)
            self._next_segment = int(path.stem, 16) + 1
        self._drop_finished()
        return Recovery(records=tuple(found[sequence] for sequence in sorted(self._open)), damage=tuple(damage))

    def _scan(self, path: Path, found: dict[int, Record], *, last: bool) -> Iterator[Damage]:
        """Behind a damaged record its neighbours may be found wrongly, so nothing is cut there: a person may want to look."""
        data = path.read_bytes()
        at, sound = 0, True
        while at < len(data):
            left = len(data) - at
            size = _HEAD.unpack_from(data, at)[0] if left >= _HEAD.size else 0
            if left < _HEAD.size + size or not any(data[at : at + _HEAD.size]):
                yield Damage(path.name, at, left, "torn-tail" if last and sound else "bad-length")
                return
            _, kind, sequence, crc = _HEAD.unpack_from(data, at)
            payload = data[at + _HEAD.size : at + _HEAD.size + size]
            if zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, sequence))) != crc:
                sound = False
                yield Damage(path.name, at, _HEAD.size + size, "bad-crc")
            elif kind == ENTRY:
                found[sequence] = Record(sequence, payload)
                self._open[sequence] = path.name
                self._next = max(self._next, sequence + 1)
            elif kind == ACKNOWLEDGED:
                self._open.pop(sequence, None)
                self._next = max(self._next, sequence + 1)
            at += _HEAD.size + size

    # -------------------------------------------------------------------------------------------- writing

    def append(self, payload: bytes) -> int:
        """Buffers an entry and gives its sequence. It is on disk when the next ``take_buffer`` has gone through ``write``."""
        if len(payload) > MAX_RECORD_BYTES:
            raise ValueError(f"a spool record may have {MAX_RECORD_BYTES} bytes, this has {len(payload)}")
        sequence = self._next
        self._next += 1
        self._buffer += encode_record(ENTRY, sequence, payload)
        self._open[sequence] = ""
        self._buffered.append(sequence)
        return sequence

    def acknowledge(self, sequence: int) -> None:
        """The entry has done its work. Written with the next flush; lost in a crash it only means one more, idempotent, replay."""
        if self._open.pop(sequence, None) is None:
            return
        if self._open or self._fd is None or self._segment_size < self._segment_bytes * _EMPTY_SHARE:
            self._buffer += encode_record(ACKNOWLEDGED, sequence, b"")
        else:
            # Emptied rather than removed, and not each time: measured, a new or emptied file makes the next fsync four times as slow.
            self._buffer.clear()
            os.ftruncate(self._fd, 0)
            self._segment_size = 0
        self._drop_finished()

    def take_buffer(self) -> bytes:
        """What is to be written next; the caller passes it to :meth:`write` before it takes again."""
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._fd is None or self._segment_size + len(data) > self._segment_bytes:
            self._close()
            self._segment = f"{self._next_segment:016x}{_SUFFIX}"
            self._next_segment += 1
        for sequence in self._buffered:
            if sequence in self._open:
                self._open[sequence] = self._segment
        self._buffered.clear()
        self._segment_size += len(data)
        return data

    def write(self, data: bytes) -> None:
        """Appends to the segment and waits for the disk. After an error the next write begins a new segment."""
        try:
            if self._fd is None:
                self._fd = os.open(self._folder / self._segment, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                _sync_folder(self._folder)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError:
            self._close()
            raise

    def close(self) -> None:
        """The clean end: nothing stays on disk unless something is unacknowledged."""
        self._close()
        self._drop_finished()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._sealed.append(self._segment)
        self._segment, self._segment_size = "", 0

    def _drop_finished(self) -> None:
        """Removes the oldest sealed segments as long as they hold nothing open. In order: an acknowledgement must not outlive its entry's
        segment, nor go before it. Damaged ones are set aside for a person."""
        in_use = set(self._open.values())
        while self._sealed and self._sealed[0] not in in_use:
            name = self._sealed.pop(0)
            path = self._folder / name
            if name in self._damaged:
                path.rename(path.with_suffix(".damaged"))
            else:
                path.unlink(missing_ok=True)


def _truncate(path: Path, size: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

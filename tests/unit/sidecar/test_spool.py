"""Whatever is done to the spool and wherever it is cut, what was flushed and not acknowledged comes back, unchanged, and nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from perdure.sidecar import spool as module
from perdure.sidecar.spool import ACKNOWLEDGED, ENTRY, Recovery, Spool, encode_record

HEAD = 17
payloads = st.binary(max_size=200)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="perdure-spool-"))
    yield path
    shutil.rmtree(path)


def flush(spool: Spool) -> None:
    spool.write(spool.take_buffer())


def recover(folder: Path) -> tuple[Spool, Recovery]:
    spool = Spool(folder)
    return spool, spool.recover()


def fill(folder: Path, *entries: bytes) -> Path:
    spool, _ = recover(folder)
    for entry in entries:
        spool.append(entry)
    flush(spool)
    spool.close()
    (segment,) = folder.glob("*.wal")
    return segment


def test_the_record_is_length_type_sequence_crc_and_payload() -> None:
    assert encode_record(ENTRY, 7, b"abc").hex(" ") == "00 00 00 03 01 00 00 00 00 00 00 00 07 b7 c2 2a 69 61 62 63"
    assert len(encode_record(ACKNOWLEDGED, 1, b"")) == HEAD


class Life(RuleBasedStateMachine):
    """A spool that is used, killed and opened again. The model: what is on disk, and of that what is acknowledged on disk."""

    entries = Bundle("entries")

    @initialize(segment_bytes=st.sampled_from([300, 5000]))
    def begin(self, segment_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-spool-"))
        self.open: dict[int, bytes] = {}
        self.unflushed: dict[int, bytes] = {}
        self.acknowledged_since_flush: dict[int, bytes] = {}
        self.segment_bytes = segment_bytes
        self.spool = Spool(self.folder, segment_bytes=segment_bytes)
        assert self.spool.recover() == Recovery((), ())

    @rule(target=entries, payload=payloads)
    def append(self, payload: bytes) -> int:
        sequence = self.spool.append(payload)
        assert sequence not in self.open
        self.unflushed[sequence] = payload
        return sequence

    @rule()
    @precondition(lambda self: self.unflushed)
    def flush(self) -> None:
        flush(self.spool)
        self.open |= self.unflushed
        self.unflushed.clear()
        self.acknowledged_since_flush.clear()

    @rule(sequence=consumes(entries))
    def acknowledge(self, sequence: int) -> None:
        if sequence in self.open:
            self.spool.acknowledge(sequence)
            self.acknowledged_since_flush[sequence] = self.open.pop(sequence)

    @rule(torn=st.binary(max_size=HEAD + 20), keep=st.integers(0, 2**32))
    def die(self, torn: bytes, keep: int) -> None:
        """The process goes; of what it was writing some part is on disk."""
        if self.spool._fd is not None:
            os.close(self.spool._fd)
        segments = sorted(self.folder.glob("*.wal"))
        if segments:
            record = encode_record(ENTRY, 10**9, torn)
            with segments[-1].open("ab") as file:
                file.write(record[: keep % len(record)])
        self.spool = Spool(self.folder, segment_bytes=self.segment_bytes)
        found = self.spool.recover()
        records = {record.sequence: record.payload for record in found.records}
        assert list(records) == sorted(records)
        assert self.open.items() <= records.items(), "nothing that was flushed is missing"
        lost_acknowledgements = records.keys() - self.open.keys()
        assert lost_acknowledgements <= self.acknowledged_since_flush.keys(), (
            "only what was acknowledged after the last flush may come again"
        )
        assert {damage.what for damage in found.damage} <= {"torn-tail"}
        self.open = records
        self.unflushed.clear()
        self.acknowledged_since_flush.clear()

    @invariant()
    def counts(self) -> None:
        assert self.spool.unacknowledged == len(self.open) + len(self.unflushed)

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.spool.close()
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(entries=st.lists(payloads, min_size=1, max_size=6), cut=st.integers(0, 2**32))
@settings(deadline=None)
def test_a_tail_torn_anywhere_is_cut_to_the_last_whole_record(entries: list[bytes], cut: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="perdure-spool-"))
    try:
        segment = fill(folder, *entries)
        data = segment.read_bytes()
        size = cut % (len(data) + 1)
        segment.write_bytes(data[:size])
        whole, at = 0, 0
        while whole < len(entries) and at + HEAD + len(entries[whole]) <= size:
            at += HEAD + len(entries[whole])
            whole += 1
        _, found = recover(folder)
        assert [record.payload for record in found.records] == entries[:whole]
        assert [(damage.what, damage.offset, damage.size) for damage in found.damage] == (
            [("torn-tail", at, size - at)] if size > at else []
        )
        if whole:
            assert segment.stat().st_size == at
    finally:
        shutil.rmtree(folder)


@given(entries=st.lists(payloads, min_size=1, max_size=6), position=st.integers(0, 2**32), flip=st.integers(1, 255))
@settings(deadline=None)
def test_a_byte_changed_anywhere_is_seen_and_never_given_back(entries: list[bytes], position: int, flip: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="perdure-spool-"))
    try:
        segment = fill(folder, *entries)
        data = bytearray(segment.read_bytes())
        data[position % len(data)] ^= flip
        segment.write_bytes(bytes(data))
        _, found = recover(folder)
        assert found.damage, "it is reported"
        originals = dict(enumerate(entries, 1))
        for record in found.records:
            assert originals[record.sequence] == record.payload
        assert len(found.records) < len(entries)
    finally:
        shutil.rmtree(folder)


def test_a_bad_record_costs_its_neighbours_nothing_and_is_set_aside(folder: Path) -> None:
    segment = fill(folder, b"one", b"two", b"three")
    data = bytearray(segment.read_bytes())
    data[2 * HEAD + 3] ^= 1
    segment.write_bytes(bytes(data))
    spool, found = recover(folder)
    assert [record.payload for record in found.records] == [b"one", b"three"]
    assert [(damage.what, damage.offset) for damage in found.damage] == [("bad-crc", HEAD + 3)]
    for record in found.records:
        spool.acknowledge(record.sequence)
    assert [path.suffix for path in folder.iterdir()] == [".damaged"]
    assert recover(folder)[1] == Recovery((), ())


def test_a_tail_of_zeros_is_a_torn_tail(folder: Path) -> None:
    segment = fill(folder, b"one")
    segment.write_bytes(segment.read_bytes() + bytes(4096))
    _, found = recover(folder)
    assert [(damage.what, damage.size) for damage in found.damage] == [("torn-tail", 4096)]
    assert [record.payload for record in found.records] == [b"one"]


def test_what_is_acknowledged_is_gone_from_the_disk(folder: Path) -> None:
    spool = Spool(folder, segment_bytes=100)
    spool.recover()
    sequences = []
    for n in range(20):
        sequences.append(spool.append(b"%d" % n * 20))
        flush(spool)
    assert len(list(folder.iterdir())) > 5
    for sequence in sequences[1:]:
        spool.acknowledge(sequence)
    assert list(folder.iterdir()), "the first is still open"
    spool.acknowledge(sequences[0])
    assert [path.stat().st_size for path in folder.iterdir()] == [0]
    spool.append(b"next")
    flush(spool)
    assert len(recover(folder)[1].records) == 1


def test_a_clean_end_leaves_only_what_is_open(folder: Path) -> None:
    spool, _ = recover(folder)
    sequence = spool.append(b"done")
    flush(spool)
    spool.acknowledge(sequence)
    assert [path.stat().st_size for path in folder.iterdir()] == [HEAD + 4], "not worth the disk's time"
    spool.close()
    assert not list(folder.iterdir())
    spool, _ = recover(folder)
    spool.append(b"open")
    flush(spool)
    spool.close()
    assert [record.payload for record in recover(folder)[1].records] == [b"open"]


def test_a_write_that_fails_does_not_spoil_what_comes_after(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, _ = recover(folder)
    spool.append(b"kept")
    flush(spool)
    real, calls = module.os.write, []

    def half(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", half)
    spool.append(b"lost")
    with pytest.raises(OSError, match="No space"):
        flush(spool)
    monkeypatch.setattr(module.os, "write", real)
    spool.append(b"later")
    flush(spool)
    assert [record.payload for record in recover(folder)[1].records] == [b"kept", b"later"]


def test_a_record_has_a_largest_size(folder: Path) -> None:
    with pytest.raises(ValueError, match="may have"):
        Spool(folder).append(bytes(module.MAX_RECORD_BYTES + 1))

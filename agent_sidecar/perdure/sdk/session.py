"""The session: named, typed slices of state that outlive any process (C1, C6).

A slice is declared once, at module level, and read from ``run.session``. Changed slices travel with the next commit of the run: the end
of a step, a wait, a checkpoint, the end of the run. What changed is found by comparing encoded bytes, so nothing has to be announced;
an append-only slice sends only what is new.

Code that is started again finds the session as it was last committed. So change it inside steps, or drive the code from it and take
checkpoints; a change that the agent itself makes between two steps is made again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import msgspec

from perdure import protocol
from perdure.sdk.codec import Codec, codec_of, encode
from perdure.sdk.errors import InvalidDeclaration
from perdure.sdk.signature import checked_name

T = TypeVar("T")
Migration = Callable[[Any], Any]
Report = Callable[[str, int, int, str], None]
"""Told when a stored slice cannot be used: name, stored version, declared version, reason."""


class _Declared(Generic[T]):
    """``version`` is raised when the type changes so that old values no longer fit."""

    def __init__(self, name: str, kind: type[T], *, version: int = 1, default: Callable[[], T] | None = None) -> None:
        self.name = checked_name(name, "slice")
        self.codec: Codec[T] = codec_of(kind)
        self.version = version
        self.default = default or kind
        self._migrations: dict[int, Migration] = {}

    def migration(self, from_version: int) -> Callable[[Migration], Migration]:
        """Registers how plain JSON of ``from_version`` becomes plain JSON of the version after it."""

        def register(fn: Migration) -> Migration:
            self._migrations[from_version] = fn
            return fn

        return register

    def migrate(self, data: bytes, version: int) -> bytes:
        """Raises ValueError when there is no way from ``version`` to the declared one."""
        if version == self.version:
            return data
        value = msgspec.json.decode(data)
        for step in range(version, self.version):
            if step not in self._migrations:
                raise ValueError(f"there is no migration from version {step}")
            value = self._migrations[step](value)
        if version > self.version:
            raise ValueError(f"it was written by a later version, {version}")
        return encode(value, f"slice {self.name}")


class Slice(_Declared[T]):
    """One value, replaced as a whole. ``default`` makes the first one; without it the type is called with no arguments."""


class AppendSlice(_Declared[T]):
    """A list that only grows, for instance a transcript. ``kind`` is the type of one item."""


class Appended(Sequence[T]):
    """The live value of an append-only slice. Items are not to be changed once they are in it."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)

    def append(self, item: T) -> None:
        self._items.append(item)

    def extend(self, items: Iterable[T]) -> None:
        self._items.extend(items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Appended({self._items!r})"


class Snapshot:
    """The slices as they were at one moment, as JSON by name. ``Session.rollback`` takes it back."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def to_json(self) -> bytes:
        return protocol.encode_json({name: msgspec.Raw(value) for name, value in self.values.items()})

    @staticmethod
    def from_json(data: bytes) -> Snapshot:
        return Snapshot({name: bytes(raw) for name, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()})


class _Whole:
    """An open slice of one value. ``sent``: the bytes that the store has, None when it must be sent in any case."""

    def __init__(self, declared: Slice[Any], value: Any, sent: bytes | None) -> None:
        self.declared = declared
        self.value = value
        self.sent = sent

    def encoded(self) -> bytes:
        return encode(self.value, f"slice {self.declared.name}")

    def take(self) -> protocol.Slice | None:
        data = self.encoded()
        if data == self.sent:
            return None
        self.sent = data
        return protocol.Slice(name=self.declared.name, value=msgspec.Raw(data), version=self.declared.version)

    def restore(self, data: bytes) -> None:
        self.value = self.declared.codec.decode(data)

    def forget_sent(self) -> None:
        self.sent = None


class _Growing:
    """An open append-only slice. ``sent``: how many items the store has, None when all must be sent in place of what it has."""

    def __init__(self, declared: AppendSlice[Any], value: Appended[Any], sent: int | None) -> None:
        self.declared = declared
        self.value = value
        self.sent = sent

    def encoded(self) -> bytes:
        return encode(self.value._items, f"slice {self.declared.name}")

    def take(self) -> protocol.Slice | None:
        start, end = self.sent or 0, len(self.value)
        if self.sent == end:
            return None
        data = encode(self.value._items[start:end], f"slice {self.declared.name}")
        whole, self.sent = self.sent is None, end
        return protocol.Slice(name=self.declared.name, value=msgspec.Raw(data), version=self.declared.version, append=not whole)

    def restore(self, data: bytes) -> None:
        items = [self.declared.codec.decode(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
        if self.sent is not None and (self.sent > len(items) or encode(self.value._items[: self.sent]) != encode(items[: self.sent])):
            self.sent = None
        self.value._items[:] = items

    def forget_sent(self) -> None:
        self.sent = None


class Session:
    """``run.session``. ``session[SLICE]`` opens a slice and gives its live value; assigning replaces it."""

    def __init__(self, stored: Iterable[protocol.SliceState], report: Report) -> None:
        self._stored = {state.name: state for state in stored}
        self._open: dict[str, _Whole | _Growing] = {}
        self._report = report

    @overload
    def __getitem__(self, declared: Slice[T]) -> T: ...
    @overload
    def __getitem__(self, declared: AppendSlice[T]) -> Appended[T]: ...
    def __getitem__(self, declared: Slice[T] | AppendSlice[T]) -> T | Appended[T]:
        return cast("T | Appended[T]", self._opened(declared).value)

    def __setitem__(self, declared: Slice[T], value: T) -> None:
        entry = self._opened(declared)
        if not isinstance(entry, _Whole):
            raise InvalidDeclaration(f"slice {declared.name} is append-only; append to it")
        entry.value = value

    def __contains__(self, declared: Slice[Any] | AppendSlice[Any]) -> bool:
        """Whether there is a value, stored or made in this attempt."""
        return declared.name in self._open or declared.name in self._stored

    def latest(self, declared: Slice[T] | AppendSlice[T]) -> T | None:
        """The slice's value, or the last item of an append-only one; None when there is none. Opens nothing that does not exist."""
        found = self.all(declared)
        return found[-1] if found else None

    def all(self, declared: Slice[T] | AppendSlice[T]) -> tuple[T, ...]:
        if declared not in self:
            return ()
        value = self._opened(declared).value
        return tuple(value) if isinstance(value, Appended) else (cast("T", value),)

    def snapshot(self) -> Snapshot:
        return Snapshot({name: entry.encoded() for name, entry in self._open.items()})

    def rollback(self, snapshot: Snapshot) -> None:
        """Puts every slice back to the snapshot. Read values again from the session afterwards: whole values are new objects."""
        for name, entry in list(self._open.items()):
            if (data := snapshot.values.get(name)) is not None:
                entry.restore(data)
            else:
                del self._open[name]
                self._opened(entry.declared).forget_sent()

    def take(self) -> list[protocol.Slice]:
        """What changed since the last call, to travel in a commit. Raises NotEncodable, PayloadTooLarge."""
        taken: list[protocol.Slice] = []
        try:
            for entry in self._open.values():
                if (part := entry.take()) is not None:
                    taken.append(part)
        except Exception:
            self.not_committed(taken)
            raise
        return taken

    def not_committed(self, slices: Iterable[protocol.Slice]) -> None:
        """The commit that these travelled in was refused: they are sent again, as wholes."""
        for part in slices:
            self._open[part.name].forget_sent()

    def _opened(self, declared: Slice[Any] | AppendSlice[Any]) -> _Whole | _Growing:
        entry = self._open.get(declared.name)
        if entry is None:
            entry = self._open[declared.name] = self._load(declared)
        elif entry.declared is not declared:
            raise InvalidDeclaration(f"slice {declared.name} is declared twice")
        return entry

    def _load(self, declared: Slice[Any] | AppendSlice[Any]) -> _Whole | _Growing:
        stored = self._stored.get(declared.name)
        if stored is not None:
            try:
                return _load_growing(declared, stored) if isinstance(declared, AppendSlice) else _load_whole(declared, stored)
            except Exception as error:  # noqa: BLE001  # a migration is agent code and may raise anything
                self._report(declared.name, stored.version, declared.version, str(error))
        if isinstance(declared, AppendSlice):
            return _Growing(declared, Appended(), 0 if stored is None else None)
        whole = _Whole(declared, declared.default(), None)
        if stored is None:
            whole.sent = whole.encoded()
        return whole


def _load_whole(declared: Slice[Any], stored: protocol.SliceState) -> _Whole:
    data = bytes(stored.chunks[-1])
    value = declared.codec.decode(declared.migrate(data, stored.version))
    whole = _Whole(declared, value, None)
    if stored.version == declared.version:
        whole.sent = whole.encoded()
    return whole


def _load_growing(declared: AppendSlice[Any], stored: protocol.SliceState) -> _Growing:
    raws = [raw for chunk in stored.chunks for raw in msgspec.json.decode(chunk, type=list[msgspec.Raw])]
    items = [declared.codec.decode(declared.migrate(bytes(raw), stored.version)) for raw in raws]
    return _Growing(declared, Appended(items), len(items) if stored.version == declared.version else None)

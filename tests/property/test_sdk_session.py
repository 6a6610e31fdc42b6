"""The session against a model: whatever is changed, committed, refused, rolled back, the store has what was seen at the last commit."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from perdure import AppendSlice, Slice, protocol
from perdure.sdk.session import Session, Snapshot


@dataclass
class Notes:
    lines: list[str] = field(default_factory=list)


NOTES = Slice("notes", Notes)
TALK = AppendSlice("talk", str)
texts = st.text(max_size=3)


class SessionMachine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, list[protocol.Slice]] = {}
        self.committed: tuple[list[str], list[str]] = ([], [])
        self.sent_items = 0
        self.session = self.load()

    def load(self) -> Session:
        stored = [
            protocol.SliceState(name=name, version=1, append=parts[0].append, chunks=[part.value for part in parts])
            for name, parts in self.store.items()
        ]
        return Session(stored, lambda *about: self.fail(about))

    def fail(self, about: object) -> None:
        raise AssertionError(about)

    def seen(self, session: Session) -> tuple[list[str], list[str]]:
        return list(session[NOTES].lines), list(session[TALK])

    @rule(text=texts)
    def change(self, text: str) -> None:
        self.session[NOTES].lines.append(text)

    @rule(text=texts)
    def replace(self, text: str) -> None:
        self.session[NOTES] = Notes([text])

    @rule(items=st.lists(texts, max_size=3))
    def append(self, items: list[str]) -> None:
        self.session[TALK].extend(items)

    @rule()
    def commit(self) -> None:
        for part in self.session.take():
            if part.append:
                self.store.setdefault(part.name, []).append(part)
            else:
                self.store[part.name] = [part]
        self.committed = self.seen(self.session)

    @rule()
    def refused(self) -> None:
        self.session.not_committed(self.session.take())

    @rule()
    def crash(self) -> None:
        self.session = self.load()
        assert self.seen(self.session) == self.committed

    @rule(target=snapshots)
    def snapshot(self) -> tuple[bytes, tuple[list[str], list[str]]]:
        self.seen(self.session)
        return self.session.snapshot().to_json(), self.seen(self.session)

    @rule(taken=consumes(snapshots))
    def rollback(self, taken: tuple[bytes, tuple[list[str], list[str]]]) -> None:
        self.session.rollback(Snapshot.from_json(taken[0]))
        assert self.seen(self.session) == taken[1]

    @invariant()
    def what_is_stored_is_what_was_committed(self) -> None:
        assert self.seen(self.load()) == self.committed

    @invariant()
    def no_chunk_is_empty(self) -> None:
        for part in self.store.get("talk", []):
            if part.append:
                assert msgspec.json.decode(part.value)


TestSession = SessionMachine.TestCase

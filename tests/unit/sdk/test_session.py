"""The session: C1, C6, C7."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from perdure import AppendSlice, InvalidDeclaration, NotEncodable, Slice, Snapshot, protocol
from perdure.sdk.session import Session


@dataclass
class Notes:
    title: str = ""
    lines: list[str] = field(default_factory=list)


class Message(BaseModel):
    role: str
    text: str


NOTES = Slice("notes", Notes)
TALK = AppendSlice("talk", Message)


class Reports(list[tuple[str, int, int, str]]):
    def __call__(self, *about: Any) -> None:
        self.append(about)


def opened(*stored: protocol.SliceState) -> tuple[Session, Reports]:
    reports = Reports()
    return Session(stored, reports), reports


def state(name: str, *chunks: object, version: int = 1, append: bool = False) -> protocol.SliceState:
    return protocol.SliceState(
        name=name, version=version, append=append, chunks=[msgspec.Raw(msgspec.json.encode(chunk)) for chunk in chunks]
    )


def sent(session: Session) -> dict[str, tuple[Any, bool]]:
    return {part.name: (msgspec.json.decode(part.value), part.append) for part in session.take()}


def test_only_what_changed_is_sent() -> None:
    session, _ = opened()
    notes = session[NOTES]
    assert sent(session) == {}
    notes.lines.append("a")
    assert sent(session) == {"notes": ({"title": "", "lines": ["a"]}, False)}
    assert sent(session) == {}
    notes.title = "t"
    assert sent(session)["notes"][0]["title"] == "t"


def test_assigning_replaces() -> None:
    session, _ = opened()
    session[NOTES] = Notes("new")
    assert session[NOTES].title == "new"
    assert sent(session)["notes"][0]["title"] == "new"


def test_append_only_sends_new_items_only() -> None:
    session, _ = opened(state("talk", [{"role": "u", "text": "1"}], [{"role": "a", "text": "2"}], append=True))
    talk = session[TALK]
    assert [message.text for message in talk] == ["1", "2"]
    talk.append(Message(role="u", text="3"))
    assert sent(session) == {"talk": ([{"role": "u", "text": "3"}], True)}
    talk.extend([Message(role="u", text="4"), Message(role="u", text="5")])
    assert [item["text"] for item in sent(session)["talk"][0]] == ["4", "5"]
    assert sent(session) == {}
    assert talk[-1].text == "5"
    assert len(talk) == 5


def test_a_refused_commit_is_sent_again_as_a_whole() -> None:
    session, _ = opened()
    session[TALK].append(Message(role="u", text="1"))
    session[NOTES].title = "t"
    parts = session.take()
    session[TALK].append(Message(role="u", text="2"))
    session.not_committed(parts)
    again = sent(session)
    assert [item["text"] for item in again["talk"][0]] == ["1", "2"]
    assert again["talk"][1] is False
    assert again["notes"][0]["title"] == "t"


def test_latest_and_all() -> None:
    session, _ = opened(state("talk", [{"role": "u", "text": "1"}], append=True))
    assert session.latest(NOTES) is None
    assert session.all(NOTES) == ()
    assert NOTES not in session
    assert session.latest(TALK) == Message(role="u", text="1")
    session[NOTES].title = "x"
    assert session.latest(NOTES) == Notes("x")
    assert session.all(NOTES) == (Notes("x"),)


def test_rollback() -> None:
    session, _ = opened(state("talk", [{"role": "u", "text": "1"}], append=True))
    session[NOTES].title = "before"
    session[TALK].append(Message(role="u", text="2"))
    snapshot = Snapshot.from_json(session.snapshot().to_json())
    session.take()
    session[NOTES].title = "after"
    session[TALK].append(Message(role="u", text="3"))
    session.rollback(snapshot)
    assert session[NOTES].title == "before"
    assert [message.text for message in session[TALK]] == ["1", "2"]
    assert sent(session) == {}


def test_rollback_behind_what_is_committed_sends_the_whole() -> None:
    session, _ = opened()
    session[TALK].append(Message(role="u", text="1"))
    snapshot = session.snapshot()
    session[TALK].append(Message(role="u", text="2"))
    session[NOTES].title = "opened after the snapshot"
    session.take()
    session.rollback(snapshot)
    assert sent(session) == {"talk": ([{"role": "u", "text": "1"}], False), "notes": ({"title": "", "lines": []}, False)}


def test_migrations_are_walked_step_by_step() -> None:
    declared = Slice("notes", Notes, version=3)
    declared.migration(1)(lambda old: {"heading": old["h"]})
    declared.migration(2)(lambda old: {"title": old["heading"].upper()})
    session, reports = opened(state("notes", {"h": "hello"}, version=1))
    assert session[declared].title == "HELLO"
    assert reports == []
    assert session.take()[0].version == 3


def test_append_only_migrates_each_item() -> None:
    declared = AppendSlice("talk", Message, version=2)
    declared.migration(1)(lambda old: {"role": "u", "text": old})
    session, _ = opened(state("talk", ["1"], ["2"], version=1, append=True))
    session[declared].append(Message(role="a", text="3"))
    part = session.take()[0]
    assert ([item["text"] for item in msgspec.json.decode(part.value)], part.append, part.version) == (["1", "2", "3"], False, 2)


@pytest.mark.parametrize(
    ("stored", "version"),
    [
        (state("notes", {"h": 1}, version=1), 2),
        (state("notes", {"title": "x"}, version=9), 2),
        (state("notes", {"title": 5}, version=2), 2),
    ],
    ids=["no migration", "written by later code", "does not decode"],
)
def test_what_cannot_be_read_starts_fresh_and_is_reported(stored: protocol.SliceState, version: int) -> None:
    session, reports = opened(stored)
    declared = Slice("notes", Notes, version=version)
    assert session[declared] == Notes()
    assert [report[:3] for report in reports] == [("notes", stored.version, version)]
    assert session.take()[0].version == version


def test_misuse() -> None:
    session, _ = opened()
    with pytest.raises(InvalidDeclaration):
        session[TALK] = []  # type: ignore[call-overload,index]
    session[NOTES]
    with pytest.raises(InvalidDeclaration, match="twice"):
        session[Slice("notes", Notes)]
    with pytest.raises(InvalidDeclaration):
        Slice("a/b", Notes)
    session[NOTES].title = object()  # type: ignore[assignment]
    session[TALK].append(Message(role="u", text="1"))
    with pytest.raises(NotEncodable, match="slice notes"):
        session.take()
    session[NOTES].title = "fine"
    assert set(sent(session)) == {"notes", "talk"}

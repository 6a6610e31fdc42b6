"""The checker of the soak: it finds nothing in honest evidence, and whatever is tampered with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.soak.checker import check
from tests.soak.evidence import Evidence, Json, Shown
from tests.unit.soak.honest import honest


def run(evidence: Evidence, name: str) -> Shown:
    return next(shown for shown in evidence.runs if shown.name == name)


def items(evidence: Evidence, name: str = "main") -> list[Json]:
    found: list[Json] = run(evidence, name).view["result"]["items"]
    return found


def line(evidence: Evidence, identity: str) -> Json:
    return next(one for one in evidence.world if one["identity"] == identity)


def ack(evidence: Evidence, what: str, **about: Any) -> Json:
    return next(one for one in evidence.acks if one["what"] == what and about.items() <= one.items())


def event(evidence: Evidence, name: str, kind: str) -> Json:
    return run(evidence, name).of(kind)[0]


def deduplicated(evidence: Evidence) -> Json:
    return next(one for one in evidence.world if one.get("repeated"))


def asked(evidence: Evidence) -> Json:
    return event(evidence, "main", "activity.resolved")


def drop(rows: list[Any], row: Any) -> None:
    rows.remove(row)


def double(rows: list[Any], row: Any) -> None:
    rows.append(copy.deepcopy(row))


def swap(one: Json, other: Json, key: str) -> None:
    one[key], other[key] = other[key], one[key]


def set_(where: Json, **values: Any) -> None:
    where.update(values)


def events(evidence: Evidence, name: str) -> list[Json]:
    return run(evidence, name).events


def journal(evidence: Evidence, name: str) -> list[Json]:
    return run(evidence, name).journal


# What was done to the evidence; what kind of violation it is, by which rule.
TAMPERED: dict[str, tuple[str, str, Callable[[Evidence], Any]]] = {
    "a run is gone": ("lost", "created", lambda e: drop(e.runs, run(e, "other"))),
    "a run is there twice": ("twice", "created", lambda e: double(e.runs, run(e, "other"))),
    "a run's creation was never acknowledged": ("twice", "created", lambda e: drop(e.acks, ack(e, "created", name="other"))),
    "a run has another id": ("lost", "created", lambda e: set_(ack(e, "created", name="other"), run="id-stranger")),
    "a run has not ended": ("lost", "ended", lambda e: set_(run(e, "other").view, state="Suspended")),
    "a run failed that should not": ("lost", "ended", lambda e: set_(run(e, "other").view, state="Failed")),
    "a run's result is gone": ("lost", "ended", lambda e: set_(run(e, "other").view, result=None)),
    "a run was cancelled by nobody": ("lost", "ended", lambda e: set_(run(e, "other").view, state="Cancelled")),
    "a run succeeded that should fail": ("lost", "ended", lambda e: set_(run(e, "fails").view, state="Succeeded")),
    "a run succeeded that was cancelled": ("lost", "ended", lambda e: set_(run(e, "hangs").view, state="Succeeded")),
    "a cancel was never acknowledged": ("lost", "ended", lambda e: drop(e.acks, ack(e, "cancel"))),
    "a child was cancelled by nobody": ("lost", "ended", lambda e: set_(run(e, "main-a5c0").view, state="Cancelled")),
    "a run that nobody began": ("wrong", "ended", lambda e: set_(run(e, "other").view, input={"path": "stranger"})),
    "a signal is not in the log": ("lost", "signals", lambda e: drop(events(e, "main"), event(e, "main", "signal.received"))),
    "a signal is in the log twice": ("twice", "signals", lambda e: double(events(e, "main"), event(e, "main", "signal.received"))),
    "a signal was accepted elsewhere": ("lost", "signals", lambda e: set_(ack(e, "signal", id="r1"), seq=99)),
    "a signal was never acknowledged": ("wrong", "signals", lambda e: drop(e.acks, ack(e, "signal", id="r3"))),
    "a signal was taken twice": ("twice", "signals", lambda e: double(journal(e, "main"), journal(e, "main")[1])),
    "a signal was taken that nobody sent": ("wrong", "signals", lambda e: set_(journal(e, "main")[1]["data"]["fired"][0], id="x")),
    "a refused signal is there": ("wrong", "signals", lambda e: set_(ack(e, "refused"), run="id-main", signal="red", id="r3")),
    "a signal was received and not taken": ("lost", "received", lambda e: drop(journal(e, "main"), journal(e, "main")[1])),
    "a signal was taken and not received": ("lost", "received", lambda e: set_(items(e)[2], got=[])),
    "a signal was received twice": ("lost", "received", lambda e: double(items(e)[2]["got"], items(e)[2]["got"][0])),
    "a signal's payload is another": ("wrong", "received", lambda e: set_(items(e)[2]["got"][0], amount=70)),
    "two signals' payloads are swapped": ("wrong", "received", lambda e: swap(*e.acks[1:3], "amount")),
    "two signals are out of order": ("wrong", "received", lambda e: swap(events(e, "main")[0], events(e, "main")[1], "data")),
    "an effect that nobody was told to do": ("wrong", "effects", lambda e: set_(line(e, "other/a1"), identity="other/a9")),
    "an effect happened twice": ("twice", "effects", lambda e: double(e.world, line(e, "other/a1"))),
    "an effect of a failed run happened twice": ("twice", "effects", lambda e: double(e.world, line(e, "fails/a0"))),
    "an effect happened twice under two keys": (
        "twice", "effects", lambda e: (double(e.world, line(e, "other/a1")), set_(e.world[-1], key="another")),
    ),
    "an effect happened once more than a person said": ("twice", "effects", lambda e: double(e.world, line(e, "main/a4"))),
    "no person said that it had not happened": ("twice", "effects", lambda e: drop(events(e, "main"), asked(e))),
    "it was no person who said so": ("twice", "effects", lambda e: set_(asked(e)["data"], by="query")),
    "a deduplicated effect happened twice": ("twice", "effects", lambda e: set_(deduplicated(e), repeated=False)),
    "a harmless effect happened without an intent": ("twice", "effects", lambda e: double(e.world, line(e, "main-a5c0/a1"))),
    "an intent is not in the log": ("twice", "effects", lambda e: drop(events(e, "other"), event(e, "other", "activity.started"))),
    "an effect did not happen": ("lost", "results", lambda e: drop(e.world, line(e, "other/a1"))),
    "an effect's result is another": ("lost", "results", lambda e: set_(items(e)[1], ref="ref of nobody")),
    "two effects' results are swapped": ("lost", "results", lambda e: swap(items(e)[1], items(e)[6], "ref")),
    "two runs' results are swapped": ("lost", "results", lambda e: swap(run(e, "main").view, run(e, "other").view, "result")),
    "an effect is unknown that can be asked for": ("lost", "results", lambda e: set_(items(e)[1], unknown=True)),
    "a step was not executed": ("wrong", "results", lambda e: drop(e.world, line(e, "other/a0"))),
    "a step's execution is written down twice": ("twice", "results", lambda e: double(e.world, line(e, "other/a0"))),
    "a step is not in the journal": ("wrong", "results", lambda e: drop(journal(e, "other"), journal(e, "other")[0])),
    "a step's journaled result is another": ("wrong", "results", lambda e: set_(journal(e, "other")[0], output="x")),
    "a step's returned result is another": ("wrong", "results", lambda e: set_(items(e, "other")[0], nonce="x")),
    "two steps' results are swapped": ("wrong", "results", lambda e: swap(items(e)[0], items(e)[10], "nonce")),
    "an action was left out": ("lost", "results", lambda e: items(e).pop()),
    "the session lost a step": ("lost", "results", lambda e: run(e, "main").view["result"]["trail"].pop()),
    "the session has a step twice": ("lost", "results", lambda e: double(run(e, "main").view["result"]["trail"], "nonce of main/a0")),
    "the value is another": ("wrong", "results", lambda e: set_(run(e, "main").view["result"], value=31)),
    "a wait gave nothing": ("lost", "results", lambda e: set_(items(e)[3], got=items(e)[3]["got"][:1])),
    "a wait that should time out gave a signal": ("lost", "results", lambda e: set_(items(e)[8], got=items(e)[2]["got"])),
    "a child is gone": ("lost", "children", lambda e: drop(e.runs, run(e, "main-a5c0"))),
    "a child is there twice": (
        "twice", "children", lambda e: (double(e.runs, run(e, "main-a5c0")), set_(e.runs[-1].view, runId="id-twin", name="twin")),
    ),
    "a child that was not to be": ("twice", "children", lambda e: set_(run(e, "other").view, parent="id-main")),
    "a child's end was told otherwise": ("wrong", "children", lambda e: set_(items(e)[5]["ended"][0], status="Failed")),
    "a child's result was told otherwise": ("wrong", "children", lambda e: items(e)[5]["ended"][0].update(result={"value": 2})),
    "a firing is gone": ("lost", "fired", lambda e: e.deliveries["wish"].clear()),
    "a firing made no run": ("lost", "fired", lambda e: set_(e.deliveries["wish"][0], state="DEAD")),
    "a firing's run is gone": ("lost", "fired", lambda e: drop(e.runs, run(e, "beat-1"))),
    "two firings made one run": ("twice", "fired", lambda e: double(e.deliveries["beat"], e.deliveries["beat"][0])),
    "a firing that nobody was told of": ("wrong", "fired", lambda e: drop(e.acks, ack(e, "emitted"))),
    "one wish was fired twice": ("twice", "fired", lambda e: e.acks.append(ack(e, "emitted") | {"delivery": "d-beat"})),
}  # fmt: skip


def test_honest_evidence_has_no_violation() -> None:
    assert check(honest()) == []


@pytest.mark.parametrize("name", TAMPERED)
def test_whatever_is_tampered_with_is_found(name: str) -> None:
    kind, rule, tamper = TAMPERED[name]
    evidence = honest()
    tamper(evidence)
    assert (kind, rule) in {(violation.kind, violation.rule) for violation in check(evidence)}


@pytest.mark.parametrize("source", ["world", "acks"])
def test_no_line_of_a_log_can_be_dropped(source: str) -> None:
    """But a refusal, which promises nothing; what runs did that have no result; and executions of which another one is on record."""
    spared = {"fails/a0", "hangs/a0", "main/a4", "main/a6", "main-a5c0/a1"}
    for n, row in enumerate(getattr(honest(), source)):
        if row["what"] == "refused" or row.get("identity") in spared:
            continue
        evidence = honest()
        del getattr(evidence, source)[n]
        assert check(evidence), row


def test_no_line_of_the_world_can_be_doubled() -> None:
    for n in range(len(honest().world)):
        evidence = honest()
        double(evidence.world, evidence.world[n])
        assert check(evidence), evidence.world[n]

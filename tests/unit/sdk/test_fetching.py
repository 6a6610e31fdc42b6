"""What a lease left behind: when it is asked for, in which portions, and what becomes of what cannot be read any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from tests.unit.sdk.conftest import Direct, Exits
from tests.unit.sdk.fake_sidecar import problem

from perdure import Agent, AppendSlice, Run, agent, protocol, step
from perdure.protocol import Fetch, Fetched, JournalEntry
from perdure.sdk.errors import Refused
from perdure.sdk.execution import Execution
from perdure.sdk.fetching import AHEAD, Fetching
from perdure.testing import Simulation
from perdure.testing.record import RunRecord

TRAIL = AppendSlice("trail", int)
executed: list[int] = []
LEFT: list[object] = []
"""Loops, attempts that were suspended, and what they wait for: they end with their process, never before. A loop alone keeps no task."""


@step
async def count(run: Run, n: int) -> int:
    executed.append(n)
    run.session[TRAIL].append(n)
    return n * 10


@agent
async def counting(run: Run, steps: int) -> dict[str, Any]:
    counted = [await count(run, n) for n in range(steps)]
    go = await run.wait_signal("go", str)
    return {"counted": counted, "trail": list(run.session[TRAIL]), "go": go.payload}


class Lean(Direct):
    """Leaves everything behind that can be: the journal's index comes two entries at a time, values as many as ``window``."""

    def __init__(self, record: RunRecord, *, window: int = 3, broken: str = "") -> None:
        super().__init__(record)
        self.window = window
        self.broken = broken
        self.fetches: list[Fetch] = []
        self.whole = msgspec.json.decode(b"{}", type=dict[str, Any])

    async def context(self) -> bytes:
        whole = msgspec.json.decode(await super().context(), type=protocol.RunContext)
        self.entries = {entry.key: entry for entry in sorted(whole.journal, key=lambda entry: entry.key)}
        self.chunks = {state.name: state.chunks for state in whole.slices}
        first = self._page("")
        slices = [msgspec.structs.replace(state, chunks=state.chunks[:1], fetch=[*range(1, len(state.chunks))]) for state in whole.slices]
        after = first.journal[-1].key if first.more else None
        lean = msgspec.structs.replace(whole, journal=first.journal, journal_after=after, slices=slices)
        return protocol.encode_json(lean)

    def _page(self, after: str) -> Fetched:
        keys = [key for key in self.entries if key > after]
        return Fetched(journal=[self._marked(self.entries[key]) for key in keys[:2]], more=len(keys) > 2)

    def _marked(self, entry: JournalEntry) -> JournalEntry:
        if entry.kind == "wait" and entry.state == "satisfied":
            return entry  # its payloads are left behind
        return msgspec.structs.replace(entry, output=protocol.NULL, fetch=entry.kind == "step")

    async def call(self, body: bytes) -> bytes:
        operation = protocol.decode_operation(body)
        if not isinstance(operation, Fetch):
            answer = await super().call(body)
            return self._without_payloads(answer)
        self.fetches.append(operation)
        if operation.after is not None:
            return protocol.encode_json(self._page(operation.after))
        asked: list[Any] = operation.keys or operation.fired or operation.chunks
        if self.broken and self.broken in msgspec.json.encode(asked[0]).decode():
            raise Refused(problem("corrupt-payload", status=500))
        if operation.keys:
            values = [self.entries[key].output for key in operation.keys]
        elif operation.chunks:
            values = [self.chunks[ref.name][ref.seq] for ref in operation.chunks]
        else:
            values = [self.payloads[ref.key, ref.index] for ref in operation.fired]
        return protocol.encode_json(Fetched(values=values[: self.window]))

    payloads: dict[tuple[str, int], msgspec.Raw]

    def _without_payloads(self, answer: bytes) -> bytes:
        try:
            waited = msgspec.json.decode(answer, type=protocol.WaitAnswer)
        except msgspec.ValidationError:
            return answer
        self.payloads = {(key, item.index): item.payload for key, outcome in waited.outcomes.items() for item in outcome.fired}
        for outcome in waited.outcomes.values():
            for item in outcome.fired:
                item.payload, item.fetch = protocol.NULL, True
        return protocol.encode_json(waited)


def attempt(agent: Agent[..., Any], transport: Direct) -> Exits:
    """One attempt, until it ends or suspends."""
    exits = Exits()

    async def main() -> None:
        context = await transport.context()
        ended = asyncio.create_task(agent.attempt(context, transport, exits))
        left = asyncio.create_task(exits.left.wait())
        LEFT.extend((ended, left, transport, exits, *asyncio.all_tasks()))
        async with asyncio.timeout(30):
            await asyncio.wait([ended, left], return_when=asyncio.FIRST_COMPLETED)
        LEFT.extend(asyncio.all_tasks())

    loop = asyncio.new_event_loop()
    LEFT.append(loop)
    loop.run_until_complete(main())
    return exits


def suspended(steps: int) -> RunRecord:
    """The record of a run that has done its steps and waits."""
    executed.clear()
    record = Simulation(counting, steps).record
    attempt(counting, Direct(record))
    assert record.state == "Suspended"
    assert executed == [*range(steps)]
    return record


def woken(steps: int, **options: Any) -> tuple[RunRecord, Lean]:
    record = suspended(steps)
    record.signal("go", msgspec.json.encode("west"), id="1")
    executed.clear()
    transport = Lean(record, **options)
    attempt(counting, transport)
    return record, transport


def test_a_redo_fetches_what_it_meets_and_executes_nothing() -> None:
    record, transport = woken(7)
    assert executed == []
    expected = {"counted": [n * 10 for n in range(7)], "trail": [*range(7)], "go": "west"}
    assert (record.state, msgspec.json.decode(record.output)) == ("Succeeded", expected)
    # Before the agent begins: the rest of the index, then of the session. Then each window of outputs once, and none of them twice.
    kinds = ["after" if f.after is not None else "chunks" if f.chunks else "keys" if f.keys else "fired" for f in transport.fetches]
    assert kinds == ["after"] * 3 + ["chunks"] * 2 + ["keys"] * 3
    assert [f.keys[0] for f in transport.fetches if f.keys] == ["step:count#0", "step:count#3", "step:count#6"]


def test_an_output_that_cannot_be_read_fails_its_step_for_good() -> None:
    record, _ = woken(3, broken="step:count#1", window=1)
    assert executed == []
    assert record.state == "Failed"
    assert record.error is not None
    assert record.error.type == "JournalCorrupt"


def test_a_slice_of_which_a_part_cannot_be_read_starts_fresh_and_says_so() -> None:
    record, _ = woken(3, broken="trail")
    assert (record.state, msgspec.json.decode(record.output)["trail"]) == ("Succeeded", [])
    assert any(event.kind == "agent.SliceStartedFresh" for event in record.log)


class Counted(dict[str, JournalEntry]):
    """Counts how many entries were looked at by going through all of them."""

    looked = 0

    def values(self) -> Any:
        for value in super().values():
            self.looked += 1
            yield value


async def test_a_redo_that_fetches_costs_what_it_meets_and_not_its_square() -> None:
    count = 3200
    entries = [JournalEntry(key=f"step:s#{n}", kind="step", name="s", state="succeeded", seq=n, fetch=True) for n in range(count)]
    journal = Counted((entry.key, entry) for entry in reversed(entries))
    windows: list[int] = []

    async def call(body: Fetch, _: object) -> Fetched:
        windows.append(len(body.keys))
        return Fetched(values=[msgspec.Raw(journal[key].key.removeprefix("step:s#").encode()) for key in body.keys])

    fetching = Fetching(cast(Execution, SimpleNamespace(journal=journal, call=call)))
    assert [int(bytes((await fetching.entry(entry)).output)) for entry in entries] == [*range(count)]
    assert windows == [AHEAD] * (count // AHEAD)
    assert journal.looked == count

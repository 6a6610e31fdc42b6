"""Tools from the client's side: E1-E5, E10."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import (
    Agent,
    EffectConflict,
    EffectFailed,
    EffectUnknown,
    InvalidDeclaration,
    NotEncodable,
    NotExecuted,
    PerdureError,
    Refused,
    ResultUndecodable,
    Run,
    Slice,
    agent,
    gather,
    step,
    tool,
)
from perdure.protocol import ActivityEnd
from perdure.testing import Provider, Simulation, kill_everywhere
from perdure.testing.record import RunRecord, refused


@dataclass
class Mail:
    id: str


@dataclass
class Notes:
    text: Any = ""


class Refusal(Exception):
    """The provider said no."""


def states(sim: Simulation) -> list[str]:
    return [entry.state for entry in sim.record.ledger.entries.values()]


async def test_outside_a_run_a_tool_is_its_function_and_gets_some_key() -> None:
    @tool(effect="external")
    async def send(to: str, *, key: str) -> str:
        return f"{to} {len(key)}"

    @tool
    def save(to: str) -> str:
        return to

    assert await send("ann", key="mine") == "ann 4"
    assert await send("ann") == "ann 36"  # type: ignore[call-arg]
    assert save("x") == "x"
    assert await save.aio("x") == "x"


def test_the_same_call_is_the_same_effect() -> None:
    mail = Provider()

    @tool(effect="external", scope=("to",), provider_ref=lambda result: result.id)
    async def send(to: str, *, key: str = "") -> Mail:
        return Mail(mail.act(key)["id"])

    @agent
    async def main(run: Run) -> list[Any]:
        one = await send("ann")
        again = await send.receipt("ann")
        other = await send("bob")
        second = await send.options(occurrence=1)("ann")
        await run.wait_signal("go")
        assert await send("ann") == one
        return [one.id, again.value.id, again.replayed, again.provider_ref, "occurrence" in again.message, other.id, second.id]

    sim = Simulation(main).signal("go", after=1).run()
    assert sim.result == ["ref-1", "ref-1", True, "ref-1", True, "ref-2", "ref-3"]
    mail.assert_once(3)


def test_the_key_and_only_the_key_parameter_is_filled_in() -> None:
    seen: list[str] = []

    @tool(effect="external", key_parameter="idempotency_key")
    async def put(key: str, value: int, idempotency_key: str = "") -> str:
        seen.append(idempotency_key)
        return key

    @agent
    async def main(run: Run) -> str:
        return await put("my-object", 1)

    sim = Simulation(main).run()
    assert sim.result == "my-object"
    assert seen == list(sim.record.ledger.entries)


def test_other_arguments_under_the_same_scope_are_a_conflict_unless_scope_is_identity() -> None:
    @tool(effect="external", scope=("to",))
    async def strict(to: str, body: str) -> str:
        return body

    @tool(effect="external", scope=("to",), scope_is_identity=True)
    async def loose(to: str, body: str) -> str:
        return body

    @tool(effect="external", ignore=("trace",))
    async def ignoring(to: str, trace: object) -> str:
        return to

    @agent
    async def main(run: Run) -> list[str]:
        await strict("ann", "one")
        try:
            await strict("ann", "two")
        except EffectConflict as error:
            found = [error.code, error.tool]
        return [*found, await loose("ann", "one"), await loose("ann", "two"), await ignoring("a", object()), await ignoring("a", 5)]

    sim = Simulation(main).run()
    assert sim.result == ["effect-conflict", "strict", "one", "one", "a", "a"]
    assert len(sim.record.ledger.entries) == 3


@pytest.mark.parametrize(
    ("effect", "policy", "state"),
    [("external", "fail", "UNKNOWN"), ("memory", None, "UNKNOWN"), ("local", None, "FAILED"), ("read_only", None, "FAILED")],
)
def test_an_exception_is_unknown_where_it_may_have_acted(effect: Any, policy: Any, state: str) -> None:
    @tool(effect=effect, on_unknown=policy)
    async def act() -> None:
        raise ConnectionError("who knows")

    @agent
    async def main(run: Run) -> str:
        try:
            await act()
        except (ConnectionError, EffectUnknown) as error:
            return type(error).__name__
        return "?"

    sim = Simulation(main).run()
    assert sim.result == ("EffectUnknown" if effect == "external" else "ConnectionError")
    assert states(sim) == [state]


def test_not_executed_is_failed_and_tried_again_under_the_same_key() -> None:
    keys: list[str] = []

    class Unreachable(Exception):
        pass

    @tool(effect="external", not_executed=(Unreachable,))
    async def send(*, key: str = "") -> int:
        keys.append(key)
        if len(keys) == 1:
            raise NotExecuted("no connection")
        if len(keys) == 2:
            raise Unreachable
        return len(keys)

    @agent
    async def main(run: Run) -> int:
        return await send()

    sim = Simulation(main).run()
    assert (sim.result, states(sim)) == (3, ["SUCCEEDED"])
    assert len(set(keys)) == 1


def test_retries_of_what_was_proven_not_executed_are_used_up() -> None:
    @tool(effect="external", retries=2)
    async def send() -> None:
        raise NotExecuted("no connection")

    @agent
    async def main(run: Run) -> str:
        try:
            await send()
        except EffectFailed as error:
            return f"{error.__cause__!r}"
        return "?"

    sim = Simulation(main).run()
    assert sim.result == "NotExecuted('no connection')"
    assert [entry.attempts for entry in sim.record.ledger.entries.values()] == [3]


def test_a_rejection_is_failed_and_the_agent_gets_it() -> None:
    @tool(effect="external", rejected=(Refusal,))
    async def send() -> None:
        raise Refusal("invalid address")

    @agent
    async def main(run: Run) -> str:
        try:
            await send()
        except Refusal as error:
            return str(error)
        return "?"

    sim = Simulation(main).run()
    assert (sim.result, states(sim)) == ("invalid address", ["FAILED"])


def test_retries_where_trying_again_is_harmless() -> None:
    tries: list[str] = []

    @tool(effect="memory", retries=3)
    async def remember(*, key: str = "") -> int:
        tries.append(key)
        if len(tries) < 3:
            raise ConnectionError
        return len(tries)

    @agent
    async def main(run: Run) -> int:
        return await remember()

    assert Simulation(main).run().result == 3
    assert len(set(tries)) == 1


@pytest.mark.parametrize("acted", [True, False])
def test_query_asks_the_provider(acted: bool) -> None:
    mail = Provider()

    @tool(effect="external", on_unknown="query")
    async def send(to: str, *, key: str = "") -> Mail:
        if not acted and not mail.calls:
            mail.calls.append(("attempt", None))
            raise ConnectionError("before it acted")
        return Mail(mail.act(key, to)["id"])

    @send.reconcile
    async def _(key: str) -> Mail | None:
        found = mail.find(key)
        return Mail(found["id"]) if found else None

    @agent
    async def main(run: Run) -> Mail:
        return await send("ann")

    if acted:
        mail.break_after(1)
    sim = Simulation(main).run()
    assert sim.result == {"id": "ref-1" if acted else "ref-2"}
    assert states(sim) == ["SUCCEEDED"]
    assert len(mail.calls) == (1 if acted else 2)


def test_query_waits_while_a_lost_worker_may_still_act() -> None:
    """Not found is no proof as long as the old process might be frozen in the middle of the call."""
    mail = Provider()
    asked: list[float] = []

    @tool(effect="external", on_unknown="query", timeout=100)
    async def send(*, key: str = "") -> Mail:
        await asyncio.sleep(50 if not asked else 0)
        return Mail(mail.act(key)["id"])

    @send.reconcile
    async def _(key: str) -> Mail | None:
        asked.append(asyncio.get_running_loop().time())
        return None

    @agent
    async def main(run: Run) -> Mail:
        return await send()

    sim = Simulation(main).lose_worker(after=10).run()
    assert sim.result == {"id": "ref-1"}
    assert asked[0] == 25
    assert asked[-1] >= 115


def test_not_found_counts_only_from_a_provider_that_was_asked_after_the_old_worker_had_ended() -> None:
    asked: list[float] = []

    @tool(effect="external", on_unknown="query", timeout=100)
    async def send() -> str:
        await asyncio.sleep(50 if not asked else 0)
        return "sent"

    @send.reconcile
    async def _(key: str) -> str | None:
        asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(100)  # it has looked at the beginning; meanwhile the old worker may act
        return None

    @agent
    async def main(run: Run) -> str:
        return await send()

    assert Simulation(main).lose_worker(after=10).run().result == "sent"
    assert len(asked) == 2
    assert asked[0] == 25
    assert asked[1] >= 115


def asking_a_provider_that_is_down(times: int) -> tuple[Agent[Any, Any], Provider, list[str]]:
    mail = Provider()
    mail.break_after(1)
    asked: list[str] = []

    @tool(effect="external", on_unknown="query")
    async def send(*, key: str = "") -> Mail:
        return Mail(mail.act(key)["id"])

    @send.reconcile
    def _(key: str) -> Mail | None:
        asked.append(key)
        if len(asked) <= times:
            raise ConnectionError("the provider is down")
        return Mail("found")

    @agent
    async def main(run: Run) -> Mail:
        return await send()

    return main, mail, asked


def test_a_provider_that_cannot_be_asked_is_asked_again() -> None:
    main, mail, asked = asking_a_provider_that_is_down(5)
    sim = Simulation(main, people_answer=False).run()
    assert (sim.result, sim.record.attempt, len(asked)) == ({"id": "found"}, 1, 6)
    mail.assert_once(1)


@pytest.mark.parametrize(("happened", "calls"), [(True, 1), (False, 2)])
def test_a_person_is_asked_when_the_provider_cannot_be(happened: bool, calls: int, caplog: pytest.LogCaptureFixture) -> None:
    main, mail, asked = asking_a_provider_that_is_down(1000)
    sim = Simulation(main, people_answer=False).run()
    assert (sim.state, sim.record.attempt, len(asked)) == ("Suspended", 1, 6)
    name = next(iter(sim.record.waits.open.values())).body.on[0].name
    assert "'reason': 'the provider could not be asked: ConnectionError: the provider is down'" in caplog.text
    answer = {"happened": True, "response": {"id": "seen"}} if happened else {"happened": False}
    sim.signal(name, answer).run()
    assert sim.result == {"id": "seen" if happened else "ref-1"}
    assert len(asked) == 6, "the person has answered: the provider need not"
    assert len(mail.calls) == calls


@pytest.mark.parametrize(("happened", "calls"), [(True, 1), (False, 2)])
def test_ask_suspends_until_a_person_answers(happened: bool, calls: int) -> None:
    mail = Provider()
    mail.break_after(1)

    @tool(effect="external")
    async def send(*, key: str = "") -> Mail:
        return Mail(mail.act(key)["id"])

    @agent
    async def main(run: Run) -> Mail:
        return await send()

    sim = Simulation(main, people_answer=False).run()
    assert sim.suspended
    assert states(sim) == ["UNKNOWN"]
    name = next(iter(sim.record.waits.open.values())).body.on[0].name
    # None of these is an answer: the question stays, and nothing that the agent could not read becomes the receipt.
    wrong = ["yes", {"happend": True}, {"happened": True, "respose": 1}, {"happened": True}, {"happened": True, "response": {"id": 5}}]
    for count, answer in enumerate(wrong, 1):
        sim.signal(name, answer).run()
        assert (sim.suspended, states(sim)) == (True, ["UNKNOWN"])
        assert sim.kinds().count("agent.AnswerRefused") == count
    assert sim.kinds().count("agent.EffectUnknown") == 1
    sim.signal(name, {"happened": happened, "response": {"id": "said"}}).run()
    assert sim.result == {"id": "said" if happened else "ref-1"}
    assert len(mail.calls) == calls
    assert [event.data["by"] for event in sim.record.log if event.kind == "activity.resolved"] == ["person"]


def test_an_answer_is_about_one_execution_only() -> None:
    mail = Provider()
    mail.break_after(1, 2)

    @tool(effect="external")
    async def send(*, key: str = "") -> Mail:
        return Mail(mail.act(key)["id"])

    @agent
    async def main(run: Run) -> Mail:
        return await send()

    sim = Simulation(main, people_answer=False).run()
    first = next(iter(sim.record.waits.open.values())).body.on[0].name
    sim.signal(first, {"happened": False}).run()
    assert sim.suspended
    second = next(iter(sim.record.waits.open.values())).body.on[0].name
    assert second != first
    assert sim.signal(second, {"happened": True, "response": {"id": "x"}}).run().result == {"id": "x"}


def test_a_timeout_is_unknown() -> None:
    @tool(effect="external", timeout=30, on_unknown="fail")
    async def send() -> None:
        await asyncio.sleep(31)

    @agent
    async def main(run: Run) -> str:
        try:
            await send()
        except EffectUnknown as error:
            return type(error.__cause__).__name__
        return "?"

    sim = Simulation(main).run()
    assert (sim.result, states(sim), sim.clock.now) == ("ToolTimedOut", ["UNKNOWN"], 30)


def test_cancellation_closes_the_token_as_unknown_at_once() -> None:
    @tool(effect="external")
    async def send() -> None:
        await asyncio.sleep(100)

    @agent
    async def main(run: Run) -> float:
        try:
            async with asyncio.timeout(5):
                await send()
        except TimeoutError:
            return asyncio.get_running_loop().time()
        return 0

    sim = Simulation(main).run()
    assert (sim.result, states(sim)) == (5, ["UNKNOWN"])


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_cancellation_in_the_middle_of_a_commit_leaves_no_token_open(at: int) -> None:
    """The commit is seen through: a token that nobody knows would block the effect until the lease ends."""
    acted: list[str] = []

    @tool(effect="external")
    async def send(*, key: str = "") -> str:
        acted.append(key)
        return "sent"

    @agent
    async def main(run: Run) -> list[Any]:
        task = asyncio.create_task(send())
        for _ in range(at):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return [task.cancelled(), states(sim), len(acted), await send(), len(acted)]

    sim = Simulation(main)
    sim.run()
    assert sim.result == [True, ["FAILED"], 0, "sent", 1]
    assert sim.clock.now < 1


def test_a_cancel_while_a_granted_retry_waits_closes_its_token() -> None:
    @tool(effect="external")
    async def send() -> None:
        raise NotExecuted("no connection")

    @agent
    async def main(run: Run) -> None:
        await send()

    sim = Simulation(main).cancel(after=0.15).run()
    assert (sim.state, states(sim)) == ("Cancelled", ["FAILED"])
    assert next(iter(sim.record.ledger.entries.values())).attempts == 3
    assert sim.kinds().count("activity.failed") == 3


def test_a_result_without_json_form_is_not_an_unknown_effect() -> None:
    @tool(effect="external")
    async def send() -> object:
        return object()

    @agent
    async def main(run: Run) -> str:
        try:
            await send()
        except NotEncodable as error:
            return error.code
        return "?"

    sim = Simulation(main).run()
    assert (sim.result, states(sim)) == ("not-encodable", ["SUCCEEDED"])


class Own:
    """A result that encodes itself, and cannot."""

    def model_dump_json(self, **_: object) -> str:
        raise KeyError("secret")


@pytest.mark.parametrize(
    ("result", "code"),
    [("x" * 3_000_000, "payload-too-large"), (object(), "not-encodable"), (Own(), "not-encodable"), ("refused", "payload-too-large")],
    ids=["too large", "not encodable", "raises while it is encoded", "refused by the gateway"],
)
def test_a_result_that_cannot_be_stored_is_the_same_error_when_the_call_is_replayed(
    result: object, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never None as if that had been the result: an agent that goes on with it would go on differently after each wait."""
    said: list[str] = []
    calls: list[int] = []
    apply = RunRecord._apply

    @tool(effect="external", provider_ref=lambda _: "m-1")
    async def send() -> Any:
        calls.append(1)
        return result

    @agent
    async def main(run: Run) -> str:
        try:
            value = await send()
        except PerdureError as error:
            said.append(str(error))
            value = error.problem_code if isinstance(error, Refused) else error.code
        await run.wait_signal("go")
        return f"{value}"

    def refusing(record: RunRecord, body: Any, live: bool) -> Any:
        if isinstance(body, ActivityEnd) and bytes(body.response) == b'"refused"':
            raise refused("payload-too-large", "no", status=413)
        return apply(record, body, live)

    monkeypatch.setattr(RunRecord, "_apply", refusing)
    sim = Simulation(main).signal("go", after=1).run()
    assert (sim.result, states(sim), len(calls)) == (code, ["SUCCEEDED"], 1)
    [entry] = sim.record.ledger.entries.values()
    assert entry.error is not None
    assert (entry.error.type, entry.provider_ref, entry.response) == (code, "m-1", b"null")
    assert len(said) == 2
    assert "the effect of tool send happened, and its result could not be stored" in said[1]


@pytest.mark.parametrize("reference", [lambda _: 1 // 0, lambda _: 7, lambda _: "x" * 1001], ids=["raises", "no text", "too long"])
def test_a_receipt_without_its_reference_has_its_result(reference: Any) -> None:
    calls: list[int] = []

    @tool(effect="external", provider_ref=reference)
    async def send() -> str:
        calls.append(1)
        return "sent"

    @agent
    async def main(run: Run) -> str:
        receipt = await send.receipt()
        await run.wait_signal("go")
        return f"{receipt.value}, {receipt.provider_ref}"

    sim = Simulation(main).signal("go", after=1).run()
    assert (sim.result, states(sim), len(calls)) == ("sent, None", ["SUCCEEDED"], 1)
    assert "agent.ProviderRefFailed" in sim.kinds()


@pytest.mark.parametrize("broken", ["a slice without JSON form", "a slice that is refused", "a response that is refused"])
def test_the_token_is_closed_whatever_cannot_be_stored_with_it(broken: str) -> None:
    notes = Slice("notes", Notes)
    apply = RunRecord._apply

    @tool(effect="external")
    async def send(run: Run) -> str:
        run.session[notes].text = object() if broken == "a slice without JSON form" else "x"
        return "sent"

    @agent
    async def main(run: Run) -> list[str]:
        try:
            return [await send.options(name="send")(run)]
        except Refused as error:
            run.session[notes].text = ""
            return [error.problem_code]
        finally:
            run.session[notes].text = ""

    def refusing(record: RunRecord, body: Any, live: bool) -> Any:
        if isinstance(body, ActivityEnd) and (body.slices if broken == "a slice that is refused" else bytes(body.response) != b"null"):
            raise refused("payload-too-large", "no", status=413)
        return apply(record, body, live)

    with pytest.MonkeyPatch.context() as patch:
        if broken != "a slice without JSON form":
            patch.setattr(RunRecord, "_apply", refusing)
        sim = Simulation(main).run()
    assert sim.result == ["payload-too-large" if broken == "a response that is refused" else "sent"]
    assert states(sim) == ["SUCCEEDED"]


def test_a_receipt_that_no_longer_decodes_is_an_error() -> None:
    kind: list[Any] = [str]
    calls: list[int] = []

    @agent
    async def main(run: Run) -> None:
        async def body() -> Any:
            calls.append(1)
            return "text"

        body.__annotations__["return"] = kind[0]
        await tool(name="load", effect="external")(body)()
        kind[0] = int
        await run.wait_signal("go")

    sim = Simulation(main, max_retries=0).signal("go", after=1).run()
    assert sim.error is not None
    assert (sim.error.type, len(calls)) == (ResultUndecodable.code, 1)


def test_the_same_call_at_once_is_executed_once() -> None:
    mail = Provider()

    @tool(effect="external")
    async def send(*, key: str = "") -> dict[str, Any]:
        await asyncio.sleep(3)
        return mail.act(key)

    @agent
    async def main(run: Run) -> list[str]:
        return [receipt["id"] for receipt in await gather(send(), send())]

    assert Simulation(main).run().result == ["ref-1", "ref-1"]
    mail.assert_once(1)


def test_repeatable_tools_are_counted_and_a_skipped_step_shifts_nothing() -> None:
    def build() -> Simulation:
        worlds.append(Provider())

        @tool(effect="external", repeatable=True, on_unknown="query")
        async def notify(text: str, *, key: str = "") -> dict[str, Any]:
            return worlds[-1].act(key, text)

        @notify.reconcile
        async def _(key: str) -> dict[str, Any] | None:
            return worlds[-1].find(key)

        @step
        async def inside() -> None:
            await notify("hello")
            await notify("hello")

        @agent
        async def main(run: Run) -> int:
            await notify("hello")
            await inside()
            await notify("hello")
            await notify("other")
            return len(worlds[-1].calls)

        return Simulation(main)

    worlds: list[Provider] = []
    kill_everywhere(build, lambda sim: worlds[-1].assert_once(5), seed=1, pairs=50)


def test_read_only_may_go_without_the_ledger() -> None:
    calls: list[int] = []

    @tool(effect="read_only", ledger=False)
    async def look(n: int) -> int:
        calls.append(n)
        return n

    @agent
    async def main(run: Run) -> int:
        return await look(1) + await look(1)

    sim = Simulation(main).run()
    assert (sim.result, calls, [commit.op for commit in sim.commits]) == (2, [1, 1], ["finish"])


def test_what_a_tool_puts_into_its_step_is_told_to_the_ledger() -> None:
    @tool(effect="local")
    async def save() -> None: ...

    @step
    async def work() -> None:
        await save()

    @agent
    async def main(run: Run) -> None:
        await work()

    assert [entry.step for entry in Simulation(main).run().record.ledger.entries.values()] == ["step:work#0"]


def test_declarations_that_cannot_work() -> None:
    async def send(to: str) -> None: ...

    with pytest.raises(InvalidDeclaration):
        tool(effect="external", ledger=False)(send)
    with pytest.raises(InvalidDeclaration):
        tool(scope=("subject",))(send)
    with pytest.raises(InvalidDeclaration):
        tool(timeout=0)(send)

    @agent
    async def main(run: Run) -> None:
        await tool(effect="external", on_unknown="query")(send)("x")

    sim = Simulation(main, max_retries=0).run()
    assert sim.error is not None
    assert sim.error.type == InvalidDeclaration.code


def test_an_id_beyond_the_integers_of_a_double_is_that_id() -> None:
    sent: list[int] = []

    @tool(effect="external")
    async def post(channel: int) -> int:
        sent.append(channel)
        return channel

    @agent
    async def run_it(run: Run) -> list[int]:
        one = 1152921504606846977
        return [await post(one), await post(one + 1), await post(one), await post(2**64 + 1), await post(2**64 + 1)]

    one = 1152921504606846977
    assert Simulation(run_it).run().result == [one, one + 1, one, 2**64 + 1, 2**64 + 1]
    assert sent == [one, one + 1, 2**64 + 1]


def test_equal_numbers_are_one_effect_in_a_simulation_as_at_a_gateway() -> None:
    sent: list[object] = []

    @tool(effect="external")
    async def post(channel: object) -> None:
        sent.append(channel)

    @agent
    async def run_it(run: Run) -> None:
        for channel in (1, 1.0, [2**60], [2.0**60], 2.0**60 + 256):
            await post(channel)

    Simulation(run_it).run()
    assert sent == [1, [2**60], 2.0**60 + 256]

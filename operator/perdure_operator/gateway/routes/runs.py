"""Create, list and read runs; cancel, pause, resume and signal them."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perdure import protocol as wire
from perdure_operator.domain.errors import InvalidInput, NotAsked, PoolNotFound, from_code
from perdure_operator.domain.ids import uuid7
from perdure_operator.domain.payload import check_json
from perdure_operator.domain.run import State
from perdure_operator.gateway.batching import Batcher
from perdure_operator.gateway.dispatch import Dispatcher
from perdure_operator.gateway.http import MAX_BODY, authorize, body, integer, reply
from perdure_operator.gateway.pools import Pools
from perdure_operator.gateway.views import RunView, question_of, run_view, why
from perdure_operator.kube.api.base import Labels, ObjectName
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import AgentRunSpec
from perdure_operator.services.submission import new_run, pool_name
from perdure_operator.services.why import trouble_of_pool
from perdure_operator.store.operations import Control
from perdure_operator.store.store import NewRun, Store

MAX_RUNS_A_REQUEST = 1000


class _Submission(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: ObjectName | None = None
    labels: Labels = Field(default_factory=dict)
    spec: AgentRunSpec


class Runs:
    def __init__(self, store: Store, batcher: Batcher, pools: Pools, dispatcher: Dispatcher) -> None:
        self._store = store
        self._batcher = batcher
        self._pools = pools
        self._dispatcher = dispatcher

    def routes(self) -> list[web.RouteDef]:
        base = "/v1/namespaces/{ns}/runs"
        return [
            web.post(base, self.create),
            web.get(base, self.list),
            web.get(base + "/{run}", self.read),
            web.get(base + "/{run}/why", self.why),
            web.get(base + "/{run}/tree", self.tree),
            web.post(base + "/{run}/signals/{signal}", self.signal),
            web.post(base + "/{run}/{verb:cancel|pause|resume}", self.verb),
        ]

    # -------------------------------------------------------------------------------------------------------- create

    async def create(self, request: web.Request) -> web.Response:
        await authorize(request, "create")
        namespace = request.match_info["ns"]
        if namespace == "-":
            raise InvalidInput("name the namespace in which the run shall be")
        _, content = await body(request, "the submission", limit=MAX_BODY)
        if not isinstance(content, dict):
            raise InvalidInput('the body must be an object: {"spec": …} or {"runs": […]}')
        many = "runs" in content
        if many and (len(content) > 1 or not isinstance(content["runs"], list)):
            raise InvalidInput("a batch has the one field runs, an array")
        items = content["runs"] if many else [content]
        if not 1 <= len(items) <= MAX_RUNS_A_REQUEST:
            raise InvalidInput(f"a batch has 1 to {MAX_RUNS_A_REQUEST} runs, not {len(items)}")
        key = request.headers.get("Idempotency-Key")
        if key is not None and not 1 <= len(key) <= 253:
            raise InvalidInput("Idempotency-Key has 1 to 253 characters")
        await self._know_pools(namespace, items)
        runs = [self._new(namespace, item, f"{key}/{n}" if key and many else key, n if many else None) for n, item in enumerate(items)]
        created = await self._store.create_runs(runs)
        self._dispatcher.kick()
        async with self._store.reader() as reader:
            rows = await reader.runs_by_id([result.run for result in created])
        views = [run_view(rows[result.run]) for result in created]
        return reply({"items": views} if many else views[0], 201)

    async def _know_pools(self, namespace: str, items: list[Any]) -> None:
        """A pool that was made a moment ago, at another gateway, counts: read again before saying that there is none."""
        wanted = {
            f"{namespace}/{(((item.get('spec') or {}).get('agent') or {}).get('poolRef') or {}).get('name')}"
            for item in items
            if _shaped(item)
        }
        if not wanted <= self._pools.specs.keys():
            await self._pools.refresh()

    def _new(self, namespace: str, item: Any, key: str | None, n: int | None) -> NewRun:
        where = f"runs[{n}]: " if n is not None else ""
        under = ("runs", n) if n is not None else ()
        try:
            submission = _Submission.model_validate(item, by_alias=True, by_name=False)
        except ValidationError as error:
            raise InvalidInput(in_words(error, _Submission, under=under)) from None
        spec = submission.spec
        if spec.agent.template is not None:
            raise InvalidInput(where + "a run from the public API names a pool (spec.agent.poolRef)")
        pool = self._pools.specs.get(f"{namespace}/{pool_name(spec)}")
        if pool is None:
            raise PoolNotFound(f"{where}there is no AgentPool {pool_name(spec)} in namespace {namespace}")
        input_json = wire.encode_json(spec.input)
        check_json(input_json, "spec.input")
        run_id = uuid7()
        name = submission.name or f"run-{run_id.hex[-12:]}"
        return new_run(run_id, namespace, name, spec, pool, input_json=input_json, labels=submission.labels, idempotency_key=key)

    # ---------------------------------------------------------------------------------------------------------- read

    async def list(self, request: web.Request) -> web.Response:
        await authorize(request, "list")
        query, namespace = request.query, request.match_info["ns"]
        state = query.get("state")
        if state is not None and state not in set(State):
            raise InvalidInput(f"state must be one of {', '.join(State)}, not {state!r}")
        limit = integer(request, "limit", 100, 1, 1000)
        async with self._store.reader() as reader:
            rows = await reader.runs(
                namespace=None if namespace == "-" else namespace,
                state=state,
                pool=query.get("pool"),
                parent=_uuid(query.get("parent"), "parent"),
                after=_uuid(query.get("after"), "after"),
                limit=limit,
            )
        views = [run_view(row) for row in rows]
        return reply({"items": views, "next": views[-1].run_id if len(views) == limit else None})

    async def _view(self, request: web.Request) -> RunView:
        async with self._store.reader() as reader:
            row = await reader.run(await reader.find(request.match_info["ns"], request.match_info["run"]))
            result = await reader.payload(row["result"]) if row["result"] is not None else None
            return run_view(row, given=await reader.given(row["run_id"]), result=result)

    async def read(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        return reply(await self._view(request))

    async def why(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        async with self._store.reader() as reader:
            row = await reader.run(await reader.find(request.match_info["ns"], request.match_info["run"]))
            view = run_view(row)
            keys = [key for wait in view.waiting_for if (key := question_of(wait)) is not None]
            calls = await reader.calls(row["run_id"], keys) if keys else []
            signals = [wait["name"] for wait in view.waiting_for if wait["kind"] == "signal"]
            refusals = await reader.refusals(row["run_id"], signals) if signals else {}
            return reply(why(view, calls, refusals, trouble_of_pool(row), self._store.limits if row["size_told"] else None))

    async def tree(self, request: web.Request) -> web.Response:
        await authorize(request, "get")
        async with self._store.reader() as reader:
            rows = await reader.tree(await reader.find(request.match_info["ns"], request.match_info["run"]))
        views = [run_view(row) for row in rows]
        return reply({"run": views[0], "descendants": views[1:]})

    # --------------------------------------------------------------------------------------------------------- verbs

    async def _find(self, request: web.Request) -> UUID:
        async with self._store.reader() as reader:
            return await reader.find(request.match_info["ns"], request.match_info["run"])

    async def signal(self, request: web.Request) -> web.Response:
        name = request.match_info["signal"]
        # To say what became of an effect decides whether money moves twice: that is a right of its own.
        answers = name.startswith(wire.QUESTIONS)
        await authorize(request, "answer" if answers else "signal")
        if not 1 <= len(name) <= 253 or "\x00" in name:
            raise InvalidInput("a signal's name has 1 to 253 characters")
        raw, _ = await body(request, "the signal's payload")
        if answers:
            _check_answer(raw)
        key = request.headers.get("Idempotency-Key") or str(uuid4())
        if len(key) > 253:
            raise InvalidInput("Idempotency-Key has 1 to 253 characters")
        run = await self._find(request)
        if answers:
            await self._check_asked(run, name, key)
        outcome = await _ok(
            self._batcher,
            # The request id is for our own second tries; the sender's is the signal's id, and it is told when that was there already.
            Control(run, "signal", {"name": name, "id": key}, request=uuid4(), payload=raw),
        )
        return reply({"seq": outcome["seq"], "duplicate": outcome["duplicate"], "id": key}, 202)

    async def _check_asked(self, run: UUID, name: str, id: str) -> None:
        """Raises NotAsked: an answer to nothing would look like one that was taken. The same answer sent again is none to nothing."""
        async with self._store.reader() as reader:
            asked = [wait["name"] for wait in run_view(await reader.run(run)).waiting_for if wait["name"].startswith(wire.QUESTIONS)]
            if name not in asked and not await reader.received(run, name, id):
                raise NotAsked(f"nobody asks about {name}" + (f"; the question is {', '.join(asked)}" if asked else ""))

    async def verb(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        person = await authorize(request, verb)
        _, content = await body(request, limit=16_384)
        if content is not None and (
            not isinstance(content, dict) or content.keys() - {"reason"} or not isinstance(content.get("reason", ""), str)
        ):
            raise InvalidInput('the body is empty or {"reason": "…"}')
        run = await self._find(request)
        await _ok(
            self._batcher, Control(run, verb, {"by": person.name, "reason": (content or {}).get("reason", "")[:1000]}, request=uuid4())
        )
        return reply(await self._view(request), 202)


async def _ok(batcher: Batcher, operation: Control) -> dict[str, Any]:
    outcome = await batcher.apply(operation)
    if outcome.code != "ok":
        raise from_code(outcome.code, outcome.detail)
    return outcome.answer


def _check_answer(raw: bytes) -> None:
    """Raises InvalidInput: better now, to the one who answers, than later in the run's log."""
    try:
        msgspec.json.decode(raw, type=wire.PersonAnswer)
    except msgspec.MsgspecError as error:
        raise InvalidInput(
            f'{error}; what became of the effect is said by {{"happened": false}} or {{"happened": true, "response": …}}'
        ) from None


def _shaped(item: Any) -> bool:
    spec = item.get("spec") if isinstance(item, dict) else None
    agent = spec.get("agent") if isinstance(spec, dict) else None
    return isinstance(agent, dict) and isinstance(agent.get("poolRef"), dict)


def _uuid(text: str | None, what: str) -> UUID | None:
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise InvalidInput(f"{what} must be a run id, not {text!r}") from None

"""One call of a tool: the conversation with the ledger until there is a result (E4, E5).

Begin, and follow the decision: execute with the key and close the token, whatever happens; take the receipt; wait; ask the provider; ask
a person. A token is closed as FAILED only when it is proven that nothing happened; every other end that is no success is UNKNOWN.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Final, Generic, Literal, TypeVar, cast
from uuid import uuid4

import msgspec

from perdure import protocol
from perdure.protocol import ActivityDecision, ActivityEnd, ErrorInfo
from perdure.sdk import errors
from perdure.sdk.codec import Codec, codec_of, encode, named
from perdure.sdk.here import HERE, Here
from perdure.sdk.identity import Claim, Scope
from perdure.sdk.signature import Signature
from perdure.sdk.tool_options import Receipt, ToolOptions

R = TypeVar("R")
_BUSY_PAUSES: Final = (0.05, 5.0)
_QUERY_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a provider that could not be asked is asked again."""
_PROOF_SECONDS: Final = 2.0
"""How often to look whether the earlier executor of a call is proven gone: that may be long before nobody expects it any more."""
_START_SECONDS: Final = 5.0
"""How old a grant may be when the call begins. One that is older was slept over, and the lease may have gone to another meanwhile."""
_HARMLESS: Final = ("local", "read_only")
_MAX_REFERENCE: Final = 1000
"""Characters of a provider's reference, as the protocol bounds them."""
_ANSWER: Final[Codec[protocol.PersonAnswer]] = codec_of(protocol.PersonAnswer)
_log = logging.getLogger("perdure")


def _clock() -> float:
    """Seconds that also pass while the machine sleeps, where there is such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class _NotAskedError(Exception):
    """A provider does not say what became of a call."""


class ToolCall(Generic[R]):
    def __init__(
        self,
        here: Here,
        signature: Signature,
        options: ToolOptions,
        arguments: msgspec.Raw,
        body: Callable[[str], Callable[[], Any]],
        reconcile: Callable[[str], Any] | None,
    ) -> None:
        self._here = here
        self._execution = here.execution
        self._signature = signature
        self._options = options
        self._arguments = arguments
        self._body = body
        self._reconcile = reconcile
        self._executions = 0
        self._busy_pause = _BUSY_PAUSES[0]
        self._asked_at = 0.0
        self._error: BaseException | None = None

    async def receipt(self) -> Receipt[R]:
        self._here = cast("Here", HERE.get())._replace(scope=self._here.scope)
        await self._execution.gate(self._here.strand)
        if not self._options.ledger:
            return self._made(await self._run_body(str(uuid4()), None, None), str(uuid4()))
        self._busy_until = self._execution.loop.time() + self._options.timeout
        decision = await self._begin()
        while True:
            step = await self._follow(decision)
            if not isinstance(step, ActivityDecision):
                return step
            decision = step

    async def _begin(self) -> ActivityDecision:
        options = self._options
        body = protocol.ActivityBegin(
            tool=options.name,
            arguments=self._arguments,
            effect=options.effect,
            scope=None if options.scope is None else list(options.scope),
            scope_is_identity=options.scope_is_identity,
            ignore=list(options.ignore),
            namespace=options.namespace,
            occurrence=options.occurrence,
            step=self._here.step,
            on_unknown=options.on_unknown,
            timeout_seconds=options.timeout,
            max_retries=options.retries,
        )
        self._asked_at = _clock()
        with self._here.strand.busy():
            return await self._execution.call(body, ActivityDecision)

    async def _follow(self, decision: ActivityDecision) -> Receipt[R] | ActivityDecision:
        """A result, or the next decision."""
        match decision.decision:
            case "execute" | "retry":
                return await self._execute(decision)
            case "receipt":
                return self._replayed(decision)
            case "busy":
                if self._execution.loop.time() > self._busy_until:
                    raise self._refusal(errors.EffectBusy, decision) from self._error
                await self._pause(max(self._busy_pause, decision.retry_after_seconds))
                self._busy_pause = min(self._busy_pause * 2, _BUSY_PAUSES[1])
                return await self._begin()
            case "unknown":
                return await self._find_out(decision)
            case "conflict":
                raise self._refusal(errors.EffectConflict, decision) from self._error
            case "failed":
                raise self._refusal(errors.EffectFailed, decision) from self._error
        raise self._refusal(errors.EffectDenied, decision) from self._error

    # ---------------------------------------------------------------------------------------------- executing

    async def _execute(self, decision: ActivityDecision) -> Receipt[R] | ActivityDecision:
        self._executions += 1
        with self._execution.receipt_due():
            end = ActivityEnd(key=decision.key, token=decision.token or "", state="unknown")
            error: BaseException | None = None
            value: Any = None
            began = False
            try:
                await self._back_off(decision.retry_after_seconds)
                await asyncio.sleep(0)  # a cancellation that came with the token ends the call here, before it can act
                start = await self._start_until(decision)
                began = True
                value = await self._run_body(decision.key, end, start)
                error = self._happened(end, value)
            except BaseException as caught:  # noqa: BLE001  # the token is closed whatever ended the call
                error = caught
                end.state = self._proven(caught, decision) if began else "failed"
                end.error = errors.describe(caught)
            await self._close(end)
        if self._execution.over:
            await self._execution.park()
        if error is None:
            if self._signature.result.untyped:
                value = self._signature.result.decode(end.response)
            return self._made(value, decision.key, provider_ref=end.provider_ref)
        if end.state == "succeeded" or not self._goes_on(error, end.state, decision):
            raise error
        self._error = error
        return await self._begin()

    def _happened(self, end: ActivityEnd, value: Any) -> errors.PerdureError | None:
        """Fills in the receipt of a call that has returned. If its result cannot be stored, the error is returned and stands in the receipt
        instead of it, so that every replay of the call raises it too."""
        end.state = "succeeded"
        unstored: errors.PerdureError | None = None
        try:
            end.response = msgspec.Raw(encode(value, f"result of tool {self._options.name}"))
        except errors.PerdureError as error:
            unstored = error
        except Exception as error:  # noqa: BLE001  # a result's own code, which says how it is encoded, may raise anything
            unstored = errors.NotEncodable(f"result of tool {self._options.name}: {errors.describe(error).message}")
            unstored.__cause__ = error
        if unstored is not None:
            end.error = errors.describe(unstored)
        try:
            end.provider_ref = self._reference(value)
        except Exception as error:  # noqa: BLE001  # without its reference the receipt is good still, and the effect did happen
            said = errors.describe(error)
            data: dict[str, object] = {"tool": self._options.name, "key": end.key, "error": f"{said.type}: {said.message[:2000]}"}
            self._execution.notice("ProviderRefFailed", data)
        return unstored

    def _reference(self, value: Any) -> str | None:
        """What ``provider_ref`` makes of a result. Raises what that raises, and ValueError for what is no reference."""
        found: object = self._options.provider_ref(value) if self._options.provider_ref else None
        if found is not None and (not isinstance(found, str) or len(found) > _MAX_REFERENCE):
            raise ValueError(f"provider_ref must return a text of at most {_MAX_REFERENCE} characters or None, not {found!r:.100}")
        return found

    async def _start_until(self, decision: ActivityDecision) -> float:
        """Until when the call may begin. A grant that was heard late, because somebody did not answer or because this process stood still,
        is good only if the lease is: asked once more. Raises NotExecuted."""
        age = _clock() - self._asked_at - decision.retry_after_seconds
        if age > _START_SECONDS:
            data = {"tool": self._options.name, "key": decision.key, "seconds": round(age, 1)}
            try:
                with self._here.strand.busy():
                    notice = protocol.EventAppend(kind="GrantHeardLate", data=msgspec.Raw(encode(data)))
                    await self._execution.call(notice, protocol.Recorded, receipt=True)
            except errors.PerdureError as error:
                raise errors.NotExecuted(f"the permission to call came {age:.0f} s after it was asked for, and is over: {error}") from error
        until = _clock() + _START_SECONDS
        self._may_begin(until)
        return until

    def _may_begin(self, until: float | None) -> None:
        """The last look before the function is called, in its own thread. Raises NotExecuted."""
        if until is None:
            return
        if self._execution.over:
            raise errors.NotExecuted("this attempt of the run was over before the call was made")
        if _clock() > until:
            raise errors.NotExecuted("this process stood still between the permission to call and the call")

    async def _run_body(self, key: str, end: ActivityEnd | None, until: float | None) -> Any:
        """The tool's function, at most for its timeout. It must leave nothing open: what happens in here is between it and its provider."""
        execution, strand, options = self._execution, self._here.strand, self._options
        own = execution.strands.begin(strand.lane, parent=strand)
        scope = Scope(f"{self._here.scope.path}/activity:{options.name}={key[:16]}".lstrip("/"))
        strand.enter()
        limit = asyncio.timeout(options.timeout)
        try:
            with execution.here(scope, own, self._here.step):
                async with limit:
                    if self._signature.is_async:
                        value = await self._body(key)()
                    else:
                        value = await self._in_thread(key, end, until)
                    execution.probe(key)
                    return value
        except TimeoutError as error:
            if limit.expired():
                raise errors.ToolTimedOut(f"tool {options.name} took longer than {options.timeout} s") from error
            raise
        finally:
            own.end()
            strand.leave()

    async def _in_thread(self, key: str, end: ActivityEnd | None, until: float | None) -> Any:
        """A thread cannot be stopped. If it is given up, nobody else may do the same until it has ended; how it ended is sent after all."""
        body = self._body(key)

        def in_time() -> Any:
            self._may_begin(until)
            return body()

        future = self._execution.threads.call(in_time, own_thread=True)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if end is not None and not future.done():
                end.still_running = True
            if end is not None:
                future.add_done_callback(lambda done: self._late(done, end))
            raise

    def _late(self, done: asyncio.Future[Any], end: ActivityEnd) -> None:
        if done.cancelled():
            return
        late = ActivityEnd(key=end.key, token=end.token, state="unknown")
        if (error := done.exception()) is not None:
            late.error = errors.describe(error)
        else:
            self._happened(late, done.result())
        self._execution.background(self._close(late))

    async def _close(self, end: ActivityEnd) -> None:
        """Every token is closed, after a lost lease too: then the receipt is evidence. What cannot be stored with it is left out, slices
        first, and a response that was left out is raised as Refused: that the effect happened is recorded all the same, with that error."""
        if not self._execution.over:
            try:
                end.slices = self._execution.session.take()
            except errors.PerdureError as error:
                _log.warning("the receipt of tool %s goes without the session: %s", self._options.name, error)
        refusal = await self._sent(end)
        if refusal is not None and end.slices:
            end.slices = []
            refusal = await self._sent(end)
        if refusal is not None and end.state == "succeeded":
            end.response, end.error = protocol.NULL, ErrorInfo(type=refusal.problem_code, message=str(refusal)[:2000], retryable=False)
            await self._sent(end)
        if refusal is not None and not self._execution.over:
            raise refusal

    async def _sent(self, end: ActivityEnd) -> errors.Refused | None:
        try:
            with self._here.strand.busy():
                await self._execution.call(end, protocol.ActivityRecorded, receipt=True)
        except errors.Refused as refusal:
            return refusal
        return None

    def _proven(self, error: BaseException, decision: ActivityDecision) -> Literal["failed", "unknown", "cancelled"]:
        if isinstance(error, (errors.NotExecuted, *self._options.not_executed, *self._options.rejected)):
            return "failed"
        if decision.effect in _HARMLESS:
            return "failed" if isinstance(error, Exception) else "cancelled"
        return "unknown"

    def _goes_on(self, error: BaseException, state: str, decision: ActivityDecision) -> bool:
        """Whether to begin again after a failed execution, or to let the agent have the error."""
        if not isinstance(error, Exception) or isinstance(error, self._options.rejected):
            return False
        if isinstance(error, (errors.NotExecuted, *self._options.not_executed)):
            return True
        if state == "unknown" and decision.policy not in ("retry-same-key", "assume-not-done"):
            return True
        return self._executions <= (self._options.retries or 0)

    # ---------------------------------------------------------------------------------------------- not executing

    async def _find_out(self, decision: ActivityDecision) -> ActivityDecision:
        """E5: nobody knows whether the effect happened."""
        unasked = ""
        # Once a person has been asked, it is the person's to answer: another process goes on from there.
        if decision.policy == "query" and self._reconcile is not None and self._question(decision, 0).key not in self._execution.journal:
            try:
                return await self._query(decision, self._reconcile)
            except _NotAskedError as error:
                unasked = str(error)
        if decision.policy in ("ask", "query"):
            told = decision.message if decision.policy == "ask" and self._options.on_unknown not in (None, "ask") else ""
            return await self._ask(decision, unasked or told)
        if decision.retry_after_seconds > 0:
            await self._pause(min(decision.retry_after_seconds, _PROOF_SECONDS))
            return await self._begin()
        raise self._refusal(errors.EffectUnknown, decision) from self._error

    async def _query(self, decision: ActivityDecision, reconcile: Callable[[str], Any]) -> ActivityDecision:
        found = await self._found(decision.key, reconcile)
        if found is None and decision.retry_after_seconds > 0:
            # The old executor may have acted since the provider looked: only who asks after it has ended hears that it did not happen.
            await self._pause(min(decision.retry_after_seconds, _PROOF_SECONDS))
            return await self._begin()
        body = protocol.ActivityResolve(key=decision.key, happened=found is not None, response=msgspec.Raw(encode(found)))
        resolved = await self._resolve(body)
        if resolved.decision == "unknown" and resolved.policy == "ask":
            return await self._ask(resolved, resolved.message)
        if resolved.decision == "unknown":
            await self._pause(min(resolved.retry_after_seconds or 1.0, _PROOF_SECONDS))
            return await self._begin()
        return resolved

    async def _found(self, key: str, reconcile: Callable[[str], Any]) -> Any:
        """What the provider says. Raises _NotAskedError when it could not be asked again and again."""
        scope = Scope(f"{self._here.scope.path}/activity:{self._options.name}={key[:16]}/reconcile".lstrip("/"))
        for pause in (*_QUERY_PAUSES, None):
            try:
                with self._here.strand.busy(), self._execution.here(scope, self._here.strand, self._here.step):
                    if inspect.iscoroutinefunction(reconcile):
                        return await reconcile(key)
                    found = await self._execution.threads.call(lambda: reconcile(key))
                    return await found if inspect.isawaitable(found) else found
            except Exception as error:
                message = f"the provider could not be asked: {errors.describe(error).type}: {error}"
                if pause is None:
                    raise _NotAskedError(message) from error
                _log.warning("tool %s: %s; it is asked again in %.0f s", self._options.name, message, pause)
            await self._pause(pause)
        raise AssertionError("unreachable")

    def _question(self, decision: ActivityDecision, count: int) -> Claim:
        return self._execution.root.claim("wait", "effect", f"{decision.key}.{decision.attempt}.{count}")

    async def _ask(self, decision: ActivityDecision, reason: str = "") -> ActivityDecision:
        """Suspends until a person answers by a signal. What cannot be an answer is refused, and the question stays open."""
        signal = protocol.question(decision.key, decision.attempt)
        refused = ""
        for count in itertools.count():
            claim = self._question(decision, count)
            if claim.key not in self._execution.journal:
                about: dict[str, object] = {"tool": self._options.name, "key": decision.key, "signal": signal, "expected": self._expected()}
                if refused:
                    self._execution.notice("AnswerRefused", about | {"reason": refused})
                else:
                    self._execution.notice("EffectUnknown", about | ({"reason": reason} if reason else {}))
            on = [protocol.Condition(kind="signal", name=signal)]
            outcome = await self._execution.waits.wait(self._here, claim, protocol.WaitBegin(key=claim.key, name=signal, on=on), 0.0)
            try:
                answer = self._understood(outcome.fired[0].payload)
            except ValueError as error:
                refused = str(error)
                continue
            said = protocol.ActivityResolve(
                key=decision.key, happened=answer.happened, by="person", response=answer.response, provider_ref=answer.provider_ref
            )
            resolved = await self._resolve(said)
            if resolved.decision != "unknown":
                return resolved
            await self._pause(resolved.retry_after_seconds or 1.0)
            return await self._begin()
        raise AssertionError("unreachable")

    def _understood(self, payload: msgspec.Raw) -> protocol.PersonAnswer:
        """Raises ValueError; also for a response that the agent could not be given: once it is the receipt, nobody can take it back."""
        answer = _ANSWER.decode(payload)
        if answer.happened:
            try:
                self._signature.result.decode(answer.response)
            except ValueError as error:
                raise ValueError(f"response is no {named(self._signature.result.type)}: {error}") from error
        return answer

    def _expected(self) -> str:
        kind = self._signature.result
        response = "" if kind.type is type(None) else f', "response": {"any JSON" if kind.untyped else named(self._signature.result.type)}'
        return f'{{"happened": false}} or {{"happened": true{response}}}'

    async def _resolve(self, body: protocol.ActivityResolve) -> ActivityDecision:
        self._asked_at = _clock()
        with self._here.strand.busy():
            return await self._execution.call(body, ActivityDecision)

    async def _back_off(self, seconds: float) -> None:
        """Before a call that is granted already. Raises NotExecuted when this process ends first: the token must not stay open."""
        if seconds > 0:
            with self._here.strand.busy():
                if await self._execution.stops_within(seconds):
                    raise errors.NotExecuted("this process ends before the call is made again")

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with self._here.strand.busy():
                await self._execution.pause(seconds)

    def _replayed(self, decision: ActivityDecision) -> Receipt[R]:
        if decision.error is not None:
            raise self._unstored(decision.error)
        data = protocol.NULL if decision.response is msgspec.UNSET else decision.response
        try:
            value = self._signature.result.decode(data)
        except ValueError as error:
            raise errors.ResultUndecodable(
                f"the receipt of tool {self._options.name} is no {self._signature.result.type}: {error}; deploy code that can read it"
            ) from error
        return self._made(value, decision.key, replayed=True, provider_ref=decision.provider_ref, message=decision.message)

    def _unstored(self, error: ErrorInfo) -> errors.PerdureError:
        """Of a receipt without its result: the kind of error that the call itself has raised."""
        message = f"the effect of tool {self._options.name} happened, and its result could not be stored: {error.message}"
        for kind in (errors.PayloadTooLarge, errors.NotEncodable):
            if error.type == kind.code:
                return kind(message)
        action = "return less, or store the result elsewhere and return a reference; a second effect takes another occurrence"
        return errors.Refused(
            protocol.Problem(
                type=f"urn:perdure:{error.type}",
                title="The result of a call could not be stored",
                status=409,
                detail=message,
                retryable=False,
                action=action,
            )
        )

    def _made(self, value: Any, key: str, **about: Any) -> Receipt[R]:
        return Receipt(value, key, **about)

    def _refusal(self, kind: type[errors.EffectError], decision: ActivityDecision) -> errors.EffectError:
        error: ErrorInfo | None = decision.error
        message = decision.message + (f" ({error.type}: {error.message})" if error else "")
        return kind(self._options.name, decision.key, message or decision.decision)

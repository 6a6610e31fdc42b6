"""Ends the run's lease on the agent's behalf when the agent cannot or does not: it is gone, hangs, was told to cancel or to pause.

Each ending is a ``finish`` of the sidecar's own. From its sending until its answer the agent's operations are refused: they would come
after the end.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Literal, Protocol

from perdure.protocol import ActivityEnd, Answer, ErrorInfo, Finish, encode_json
from perdure.sidecar.outbox import Outcome, Waiter
from perdure.sidecar.presence import Presence
from perdure.sidecar.run import HeldRun, State

RETRY_SECONDS = 0.5
NEWS_SECONDS = 0.5
"""An agent may have gone because its pod is being deleted, which is no failure of the run. The operator hears of that when the kubelet does
and tells the store; the agent's end must not get there before."""

log = logging.getLogger("perdure.sidecar.supervisor")


class Lease(Protocol):
    """What the supervisor needs of the pod."""

    held: HeldRun | None

    def submit(self, *, run: str, epoch: int, op: str, body: bytes, req: str, waiter: Waiter) -> None: ...
    def end(self, run: HeldRun, state: State, reason: str) -> None: ...
    def dismiss(self, reason: str) -> None: ...


class Supervisor:
    def __init__(self, pod: Lease, presence: Presence) -> None:
        self._pod = pod
        self._presence = presence
        self._timers: list[asyncio.TimerHandle] = []
        self._cancelling = False
        self._pausing = False
        self._gone: asyncio.Future[None] | None = None
        self.undecided = False
        """The agent has gone, and the store is to be told in a moment."""

    # -------------------------------------------------------------------------------------------- what happens

    def began(self, run: HeldRun) -> None:
        self._clear()
        self._presence.lease_began()

    def ended(self, run: HeldRun) -> None:
        self._clear()

    def _clear(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._cancelling = self._pausing = self.undecided = False
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._gone = None

    def poked(self, run: HeldRun) -> None:
        """A cancel or a pause may have come: the agent has the grace period to act on it."""
        loop = asyncio.get_running_loop()
        if run.cancel and not self._cancelling:
            self._cancelling = True
            self._timers.append(loop.call_later(run.grace_seconds, self._finish, run, "cancelled", "CancelGraceOver", "cancelled"))
        if run.pause and not self._pausing:
            self._pausing = True
            self._timers.append(loop.call_later(run.grace_seconds, self._pause, run))
        self.acknowledged(run)

    def acknowledged(self, run: HeldRun) -> None:
        if run.may_pause():
            self._pause(run)

    def _pause(self, run: HeldRun) -> None:
        if not run.cancel:
            self._finish(run, "paused", "", "paused")

    def session_closed(self, secret: str | None) -> None:
        """The agent has closed a session; ``secret`` is what it had shown: a session of an earlier run says nothing about this one."""
        run = self._pod.held
        if run is not None and run.admits(secret) and not run.over and not self.undecided:
            self.undecided = True
            self._timers.append(asyncio.get_running_loop().call_later(NEWS_SECONDS, self._still_closed, run))

    def _still_closed(self, run: HeldRun) -> None:
        self.undecided = False
        if not self._presence.sessions:
            self.agent_gone(run, "the agent closed its session before the run had finished or suspended")

    def agent_gone(self, run: HeldRun, message: str, *, proven: bool = False) -> asyncio.Future[None]:
        """Closes what the agent left open and gives the run back for another attempt. ``proven``: none of its processes is left. One that
        has only fallen silent may still act. The future is done when the lease is over."""
        done = self._gone
        if done is None:
            done = asyncio.get_running_loop().create_future()
            if run.over:
                done.set_result(None)
                return done
            self._gone = done
        if run.state is State.LIVE:
            error = ErrorInfo(type="AgentDisconnected", message=message)
            for token, key in run.activities.items():
                end = encode_json(ActivityEnd(key=key, token=token, state="unknown", still_running=not proven, error=error))
                self._pod.submit(run=run.run, epoch=run.epoch, op="activity.end", body=end, req=str(uuid.uuid4()), waiter=_ignore)
            run.activities.clear()
            self._finish(run, "cancelled" if run.cancel else "retry", "AgentDisconnected", message)
        return done

    def check_stalled(self, now: float) -> None:
        run = self._pod.held
        if run is not None and self._presence.stalled(run, now):
            self._finish(run, "stalled", "AgentStalled", "stalled")

    # -------------------------------------------------------------------------------------------- the ending

    def _finish(self, run: HeldRun, outcome: Literal["retry", "cancelled", "stalled", "paused"], error: str, reason: str) -> None:
        if run.state is not State.LIVE:
            return
        run.state = State.ENDING
        log.info("the sidecar ends the lease", extra={"run": run.run, "epoch": run.epoch, "outcome": outcome, "reason": reason})
        info = ErrorInfo(type=error, message=reason) if error else None
        body, req = encode_json(Finish(outcome=outcome, error=info)), str(uuid.uuid4())

        def send() -> None:
            if not run.over:
                self._pod.submit(run=run.run, epoch=run.epoch, op="finish", body=body, req=req, waiter=settled)

        def settled(answer: Outcome) -> None:
            if isinstance(answer, Answer):
                self._pod.end(run, State.RELEASED, reason)
                self._pod.dismiss(reason)
            elif answer.problem.retryable and not run.over:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, send)
            elif not run.over:
                self._refused(run, answer.problem.detail)

        send()

    def _refused(self, run: HeldRun, detail: str) -> None:
        """The gateway wants it otherwise (a cancel overtook a pause): the agent goes on, if there still is one."""
        log.warning("the gateway refused the end of the lease", extra={"run": run.run, "epoch": run.epoch, "detail": detail})
        if self._gone is not None:
            self._pod.end(run, State.LOST, detail)
            return
        run.state = State.LIVE
        run.pause = self._pausing = False
        run.last_operation = asyncio.get_running_loop().time()


def _ignore(outcome: Outcome) -> None:
    """Whether the gateway took it as the outcome or knew better makes no difference here."""

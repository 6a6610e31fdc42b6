"""The state of this pod between its gateway and its agent: which run it holds, what may pass, when its work is over.

Everything here runs on the event loop and awaits nothing but changes; ``link`` calls in from one side, ``app`` and ``session`` from the
other. The gateway decides about the lease, always: a clock of this process never does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from perdure.protocol import (
    PROTOCOL_VERSION,
    Answer,
    Beat,
    FromGateway,
    FromPod,
    Hello,
    Idle,
    Lease,
    LeaseLost,
    Push,
    Refusal,
    Retire,
    Welcome,
    encode_frame,
)
from perdure.sidecar import VERSION
from perdure.sidecar.link import Link
from perdure.sidecar.metrics import Metrics
from perdure.sidecar.outbox import Outbox, Outcome, Waiter
from perdure.sidecar.presence import Presence
from perdure.sidecar.problems import refuse
from perdure.sidecar.run import HeldRun, State, closed_token
from perdure.sidecar.supervisor import Supervisor
from perdure.websocket import Batch

LEASE_WAIT_SHARE = 0.5
"""After the welcome on a reconnect: the share of the lease's length that its redelivery may take before it counts as lost. Nobody else can
have the run before the lease expires, and a gateway whose database is just coming back is slow."""

CAN_PROVE = sys.platform == "linux"
"""Only there does the parent of a run's processes become the parent of all that they leave behind, so that it can say that none is left."""

_LEASE_LOST = "urn:perdure:lease-lost"

log = logging.getLogger("perdure.sidecar.pod")


class AgentChannel(Protocol):
    """An open connection of the agent that is told what happens to the run."""

    def poke(self, poke: bytes, parts: list[tuple[str, bytes]]) -> None: ...
    def lost(self, reason: str) -> None: ...
    def end(self) -> None:
        """Close it."""


def new_secret() -> str:
    return os.urandom(24).hex()


class Pod:
    """``over`` is set when the pod's work is done and the process may end. ``retiring``: why it takes no more runs, "" while it does.
    ``fetches``: the agent has said that it fetches what is too large to come with the run."""

    def __init__(self, *, reuse: bool, metrics: Metrics, time: Callable[[], float], secrets: Callable[[], str] = new_secret) -> None:
        self.batch = Batch()
        self.outbox = Outbox()
        self.presence = Presence()
        self.supervisor = Supervisor(self, self.presence)
        self.metrics = metrics
        self.channels: set[AgentChannel] = set()
        self.held: HeldRun | None = None
        self.welcome: Welcome | None = None
        self.link: Link | None = None
        self.retiring = ""
        self.over = asyncio.Event()
        self.reuse = reuse
        self.fetches = False
        self._time = time
        self._secrets = secrets
        self._open = False
        self._asked = False
        self._ended: tuple[str, int] | None = None
        self._said_ready = False
        self._connection = 0
        self._timer: asyncio.TimerHandle | None = None
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -------------------------------------------------------------------------------------------- agent side

    def perform(self, run: HeldRun, *, op: str, body: bytes, req: str, waiter: Waiter) -> None:
        """Takes an operation of the agent that :meth:`running` has let pass; its outcome goes to ``waiter``. Raises msgspec.DecodeError."""
        closed = closed_token(body) if op == "activity.end" else ""
        run.began(self._time())

        def settled(outcome: Outcome) -> None:
            waiter(outcome)
            run.acknowledged(op, closed, outcome.body if isinstance(outcome, Answer) else None, self._time())
            self.supervisor.acknowledged(run)

        self.submit(run=run.run, epoch=run.epoch, op=op, body=body, req=req, waiter=settled)

    def running(self, secret: str | None, op: str = "") -> HeldRun:
        """The held run, if who shows this secret may do ``op`` to it now. Raises ProblemError."""
        run = self.held
        if run is None:
            raise refuse("retiring", self.retiring) if self.retiring else refuse("no-run", "GET /v1/run waits for one")
        if not run.admits(secret):
            raise refuse("unauthorized", "this pod runs each run under its own secret")
        if run.state is not State.LIVE and op != "activity.end":
            code = "run-released" if run.state is State.RELEASED else "lease-lost"
            raise refuse(code, f"run {run.run}, epoch {run.epoch}: {run.reason or 'its lease is being ended'}")
        self.presence.seen()
        return run

    def submit(self, *, run: str, epoch: int, op: str, body: bytes, req: str, waiter: Waiter) -> None:
        """Without asking whether it may pass: for what the sidecar itself has to say."""
        self.outbox.add(run=run, epoch=epoch, req=req, op=op, body=body, waiter=waiter)
        self._pump()

    def asked(self) -> None:
        """There is an agent, and it waits for a run: from now on this pod may be given one. Before, the run would wait for its imports,
        while another pod could be ready, and a broken agent would cost every run an attempt."""
        self._asked = True
        self._tell_idle()

    async def context(self, secret: str | None, *, fetches: bool) -> bytes:
        """Waits until this pod holds a run; its context as JSON, marks in it only for who ``fetches``. Raises ProblemError."""
        self.fetches = fetches
        self.asked()
        while True:
            if self.held is None and not self.retiring:
                await self.change()
                continue
            if self.held is not None and self.held.state is State.RELEASED and not self.reuse:
                raise refuse("retiring", "the run of this pod has finished or suspended")
            run = self.running(secret)
            if not run.marked or fetches:
                return run.context
            # It was delivered for an agent that fetches; this one gets it whole, with the next hello.
            before = run.context
            if self.link is not None:
                self.link.close("the agent wants its run whole")
            while self.held is run and not run.over and run.context is before:
                await self.change()

    async def next_secret(self) -> str:
        """Waits until this pod holds a run that no process has been made for; gives its secret. Who asks has no child alive.
        Raises ProblemError."""
        self.asked()
        while True:
            run = self.held
            if run is not None and run.handed_out and not run.over:
                await asyncio.shield(self.supervisor.agent_gone(run, "the parent process asked for the next run"))
            elif run is not None and run.over:
                self._clean()
            elif self.retiring:
                raise refuse("retiring", self.retiring)
            elif run is None:
                await self.change()
            else:
                run.handed_out = True
                return run.secret or ""

    async def child_ended(self, *, clean: bool, exit_code: int | None) -> None:
        """The process of the run that was handed out has ended. A run still held is given back first, one that no process has been made
        for only if none can be."""
        run = self.held
        if run is not None and (run.handed_out or not clean):
            message = f"the agent process ended with code {exit_code}, the run had not finished or suspended"
            proven = clean and CAN_PROVE and run.handed_out
            await asyncio.shield(self.supervisor.agent_gone(run, message, proven=proven))
            if self.held is run:
                self._ended = (run.run, run.epoch) if proven else None
                self._clean(clean)
        elif not clean:
            self._clean(clean)

    async def change(self, timeout: float | None = None) -> None:
        """Returns at the next change of the lease or of the pod's own state, or after the timeout in seconds."""
        await asyncio.wait([self._change], timeout=timeout)

    def _changed(self) -> None:
        self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()

    def open_channel(self, channel: AgentChannel) -> None:
        self.channels.add(channel)
        run = self.held
        if run is None:
            if not self.reuse:
                self.asked()
            return
        if run.over:
            channel.lost(run.reason)
        elif flags := run.flags():
            channel.poke(b"{" + b",".join(part[1:-1] for _, part in flags) + b"}", flags)

    # -------------------------------------------------------------------------------------------- the lease

    def end(self, run: HeldRun, state: State, reason: str) -> None:
        """The lease is over. Does nothing the second time."""
        if run.over:
            return
        run.state, run.reason = state, reason
        log.info("the lease is over", extra={"run": run.run, "epoch": run.epoch, "state": state.value, "reason": reason})
        self.supervisor.ended(run)
        if state is State.LOST:
            for channel in tuple(self.channels):
                channel.lost(reason)
        if not self.reuse or self.retiring:
            self.over.set()
        else:
            asyncio.get_running_loop().call_later(run.grace_seconds, self._not_clean_in_time, run)
        self._changed()

    def dismiss(self, reason: str) -> None:
        """The sidecar has ended the lease: the agent, if it still hears, is to stop; its channels are closed."""
        for channel in tuple(self.channels):
            channel.lost(reason)
            channel.end()

    def _not_clean_in_time(self, run: HeldRun) -> None:
        if self.held is run:
            self.retire("the agent process did not end after its run had ended")

    def _clean(self, clean: bool = True) -> None:
        """Nothing of the last run is left: this pod may take another."""
        self.held, self._said_ready = None, False
        for channel in tuple(self.channels):
            channel.end()
        if not clean:
            self.retire("the last run left processes behind")
        elif self.retiring:
            self.over.set()
        else:
            self._tell_idle()
        self._changed()

    def _tell_idle(self) -> None:
        """Once after each run, and once for a pod that said hello before its agent was there."""
        if self._open and self._asked and not self._said_ready and self.held is None and not self.retiring:
            self._said_ready = True
            run, epoch = self._ended or (None, None)
            self._send(Idle(fetch=self.fetches, run=run, epoch=epoch))

    def retire(self, reason: str) -> None:
        """No more runs; a live one is stopped."""
        log.info("the pod retires", extra={"reason": reason})
        self.retiring = reason
        if self.held is not None:
            self.end(self.held, State.LOST, f"the pod retires: {reason}")
        self.over.set()
        self._changed()

    def drain(self, reason: str) -> None:
        """No more runs; a live one may come to its end."""
        self.retiring = reason
        if self.held is None or self.held.over:
            self.over.set()
        self._changed()

    # -------------------------------------------------------------------------------------------- gateway side: link.Endpoint

    def on_connected(self, link: Link) -> None:
        run = self.held
        self.link, self._open = link, False
        self.outbox.rewind()
        self._said_ready = self._asked and run is None
        # By the wall clock first, so that it grows over a restart of this process as well.
        self._connection = max(self._connection + 1, time.time_ns() // 1_000_000)
        # A lease that is over is still named until the pod is clean: a pod that names none may be given a run.
        self._send(
            Hello(
                protocol=PROTOCOL_VERSION,
                sidecar=f"perdure/{VERSION}",
                reuse=self.reuse,
                ready=self._said_ready,
                fetch=self.fetches,
                connection=self._connection,
                run=run.run if run else None,
                epoch=run.epoch if run else None,
                ended_run=self._ended[0] if self._ended else None,
                ended_epoch=self._ended[1] if self._ended else None,
            )
        )

    def on_disconnected(self, link: Link) -> None:
        self.link, self._open = None, False
        self._stop_waiting()

    def on_writable(self) -> None:
        self._pump()

    def on_frame(self, link: Link, frame: FromGateway) -> None:
        if isinstance(frame, (Answer, Refusal)):
            self._on_outcome(frame)
        elif isinstance(frame, Push):
            self._on_push(frame)
        elif isinstance(frame, Lease):
            self._on_lease(frame)
        elif isinstance(frame, Welcome):
            self._on_welcome(frame)
        elif isinstance(frame, LeaseLost):
            if self.held is not None and self.held.matches(frame.run, frame.epoch):
                self.end(self.held, State.LOST, frame.reason)
                self._resume()
        elif isinstance(frame, Retire):
            self.retire(frame.reason)
            self._resume()

    def _on_outcome(self, outcome: Outcome) -> None:
        pending = self.outbox.settle(outcome.id)
        if pending is None:
            return
        self.metrics.answered(pending, outcome, self._time())
        run = self.held
        # The state first: the agent may act on the answer at once.
        if run is not None and run.matches(pending.run, pending.epoch):
            if isinstance(outcome, Answer):
                if outcome.released:
                    self.end(run, State.RELEASED, "the run has finished or suspended")
            elif outcome.problem.type == _LEASE_LOST:
                self.end(run, State.LOST, outcome.problem.detail)
        for waiter in pending.waiters:
            waiter(outcome)

    def _on_push(self, frame: Push) -> None:
        run = self.held
        if run is None or run.over or not run.matches(frame.run, frame.epoch):
            return
        try:
            parts = run.poked(frame.poke)
        except msgspec.DecodeError as error:
            log.error("a push of the gateway cannot be read", extra={"error": str(error)})
            return
        for channel in tuple(self.channels):
            channel.poke(frame.poke, parts)
        self.supervisor.poked(run)

    def _on_lease(self, frame: Lease) -> None:
        run = self.held
        if run is not None and run.matches(frame.run, frame.epoch):
            run.context, run.marked = frame.context, frame.fetch
            self._resume()
            self._changed()
            return
        if run is not None:
            self.end(run, State.LOST, "the gateway gave this pod another lease")
        if self.retiring or (run is not None and not self.reuse):
            log.warning("a lease came to a pod that takes no more", extra={"run": frame.run, "epoch": frame.epoch})
            return
        for channel in tuple(self.channels):
            if run is not None:
                channel.end()
        self.held = HeldRun(frame, secret=self._secrets() if self.reuse else None, now=self._time())
        self.supervisor.began(self.held)
        log.info("the pod holds a run", extra={"run": frame.run, "epoch": frame.epoch})
        self._resume()
        self._changed()

    def _on_welcome(self, frame: Welcome) -> None:
        self.welcome = frame
        if self.held is None or self.held.over:
            self._resume()
            self._tell_idle()
        else:
            self._timer = asyncio.get_running_loop().call_later(frame.lease_seconds * LEASE_WAIT_SHARE, self._not_delivered, self.held)
        self._changed()

    def _not_delivered(self, run: HeldRun) -> None:
        self.end(run, State.LOST, "the gateway did not deliver the lease again")
        self._resume()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _resume(self) -> None:
        """This link takes operations. Those of a lease that is over go too: the gateway knows whether they were committed before."""
        self._stop_waiting()
        self._open = self.link is not None
        self._pump()

    def _pump(self) -> None:
        link = self.link
        if link is None or not self._open:
            return
        while link.writable and (pending := self.outbox.next_unsent()) is not None:
            if pending.sent_at is None:
                pending.sent_at = self._time()
            else:
                self.metrics.resent += 1
            link.send(pending.frame)

    def _send(self, frame: FromPod) -> None:
        if self.link is not None:
            self.link.send(encode_frame(frame))

    def beat(self, now: float) -> None:
        run = self.held if self.held is not None and not self.held.over else None
        self._send(Beat(run=run.run if run else None, epoch=run.epoch if run else None, agent=self.presence.age(now) if run else None))

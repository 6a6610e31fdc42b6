"""The pulse of the pod: pings the agent, watches for a stall, tells the gateway that the pod lives, notices a gateway that does not."""

from __future__ import annotations

import asyncio

from perdure.sidecar.pod import Pod

IDLE_SECONDS = 1.0
SHORTEST_SECONDS = 0.02
SILENT_BEATS = 2.5
SILENT_LEASE_SHARE = 0.5
"""A gateway answers each beat's ping. After so many beats and so much of a lease without a byte the connection counts as dead: time enough
for one that is busy, and enough of the lease left to reach another."""


def pulse_seconds(heartbeat: float, stall_timeout: float | None) -> float:
    """Time between two pulses: at least four in a stall timeout, at least one a heartbeat."""
    return max(SHORTEST_SECONDS, min(heartbeat, heartbeat if stall_timeout is None else stall_timeout / 4))


class Heartbeat:
    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._next_beat = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._pod.change(timeout=self._interval())
            self.pulse(loop.time())

    def _interval(self) -> float:
        pod = self._pod
        run = pod.held if pod.held is not None and not pod.held.over else None
        return pulse_seconds(pod.welcome.heartbeat_seconds if pod.welcome else IDLE_SECONDS, run.stall_timeout_seconds if run else None)

    def pulse(self, now: float) -> None:
        pod = self._pod
        pod.presence.ping()
        pod.supervisor.check_stalled(now)
        if pod.link is None or pod.welcome is None or now < self._next_beat:
            return
        every = pod.welcome.heartbeat_seconds
        if now - pod.link.last_heard > max(SILENT_BEATS * every, SILENT_LEASE_SHARE * pod.welcome.lease_seconds):
            pod.link.abort(f"nothing heard from the gateway for {now - pod.link.last_heard:.1f} s")
            return
        self._next_beat = now + every * 0.95
        pod.beat(now)
        pod.link.ping()

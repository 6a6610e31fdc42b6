"""Everything of Perdure on one machine: Postgres, two gateways and a fleet of worker processes, from one command.

The same store, gateway, sidecar and SDK as on a cluster; only where processes come from is local. What is running is owned by this
object from ``start`` to ``stop``; the data stays in the state folder, so that the next start goes on where this one ended, in order or not.

    manifests ──(public API)──▶ gateways ──▶ Postgres ◀── fleet ──▶ sidecar + agent processes ──▶ gateways
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from perdure_operator.domain.errors import PerdureError
from perdure_operator.local.embedded_postgres import EmbeddedPostgres, PostgresFailed
from perdure_operator.local.fleet import Fleet
from perdure_operator.local.gateways import GatewayConfig, LocalGateway
from perdure_operator.local.leftovers import end_leftovers
from perdure_operator.local.pods import LocalPods, PodTokens, free_port
from perdure_operator.local.processes import Leash
from perdure_operator.local.state import Gateway, PodRecord, Session, StateDir
from perdure_operator.store.migrate import migrate
from perdure_operator.store.store import Store

GATEWAYS = 2
POSTGRES_LOOK_SECONDS = 0.25
POSTGRES_TRIES = 5
STOP_SECONDS = 3.0
"""What an agent gets to end by itself at Ctrl-C; its run goes on at the next start anyway."""
RUNTIME_PREFIX = "perdure-"

Say = Callable[[str], None]


class Tokens(PodTokens, Protocol):
    """Issues local tokens."""

    def issue_person(self, name: str, *, verbs: list[str], namespaces: list[str]) -> str: ...


@dataclass(frozen=True)
class Limits:
    """``max_pods``: worker pods at a time on this machine; ``parallel``: of them, how many may be starting."""

    max_pods: int
    parallel: int

    @classmethod
    def of_machine(cls, max_pods: int | None) -> Limits:
        cores = os.cpu_count() or 1
        return cls(max_pods or max(8, 4 * cores), max(2, 2 * cores))


class DevBroken(PerdureError):
    """A part of `perdure dev` ended that cannot be started again."""

    code, status = "dev-broken", 500
    action = "Start `perdure dev` again; it goes on where it was."


class Dev:
    """One session on one state folder. ``say`` tells a person what goes on; ``folders`` are of the pools in the manifests."""

    def __init__(
        self, state: StateDir, tokens: Tokens, *, folders: Mapping[str, Path], limits: Limits, environ: Mapping[str, str], say: Say
    ) -> None:
        self.state = state
        self._tokens, self._limits, self._environ, self._say = tokens, limits, environ, say
        self._folders = folders
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._gateways: list[LocalGateway] = []
        self._postgres: EmbeddedPostgres | None = None
        self._session: Session | None = None

    async def start(self) -> Session:
        """Raises PerdureError; whatever was started by then has ended again. The state folder must be held (``StateDir.acquire``)."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Session:
        previous = self.state.session()
        self.state.compact()
        if left := await asyncio.to_thread(end_leftovers, self.state.secret, _runtime_of(previous)):
            self._say(f"ended {left} processes that an earlier `perdure dev` had left behind")
        self.state.add_folders(self._folders)
        leash = await Leash.start()
        self._stack.push_async_callback(leash.release)
        self._watch(self._guard(leash))

        self._postgres = postgres = EmbeddedPostgres(self.state.postgres)
        if not self.state.postgres.exists():
            self._say("making the database (only the first time)")
        dsn = await postgres.start()
        self._stack.push_async_callback(postgres.stop)
        if postgres.pid is not None:
            leash.add(postgres.pid, signal.SIGINT)
        self._watch(self._keep_postgres(postgres, leash))
        await migrate(dsn)
        store = await Store.connect(dsn)
        self._stack.push_async_callback(store.close)
        await self._bury(store)

        await self._start_gateways(dsn, previous, leash)
        runtime = self._runtime_dir(previous)
        urls = [gateway.config.url for gateway in self._gateways]
        token = self._tokens.issue_person("dev", verbs=["*"], namespaces=["*"])
        self._session = Session(os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), urls, token, dsn, str(runtime))
        self._write_session()
        self._stack.callback(self.state.end_session)

        starter = LocalPods(
            self.state, leash=leash, tokens=self._tokens, gateways=urls, runtime_dir=runtime,
            environ=self._environ, say=self._say,
        )  # fmt: skip
        fleet = Fleet(store, starter, limit=self._limits.max_pods, parallel=self._limits.parallel, say=self._say)
        self._stack.push_async_callback(fleet.close, STOP_SECONDS)
        self._watch(fleet.run())
        return self._session

    async def stop(self) -> None:
        """Pods first, then gateways, then Postgres. Can be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def broken(self) -> None:
        """Waits, and raises when a part has ended that cannot be started again."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise DevBroken("a background task ended")

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _guard(self, leash: Leash) -> None:
        await leash.lost()
        raise DevBroken("the guardian process was killed; without it processes could be left behind")

    async def _keep_postgres(self, postgres: EmbeddedPostgres, leash: Leash) -> None:
        """A database that died is started again; its clients wait for it."""
        pid = postgres.pid
        while True:
            await asyncio.sleep(POSTGRES_LOOK_SECONDS)
            if pid is not None and postgres.pid == pid:
                continue
            self._say("Postgres has ended; starting it again")
            if pid is not None:
                leash.remove(pid)
            for tries in range(1, POSTGRES_TRIES + 1):
                try:
                    await postgres.start()
                    break
                except PostgresFailed:  # killed again while it came up, perhaps
                    if tries == POSTGRES_TRIES:
                        raise
                    self._say("Postgres has ended while it started; starting it again")
                    await asyncio.sleep(tries)
            if (pid := postgres.pid) is not None:
                leash.add(pid, signal.SIGINT)
            self._write_session()
            self._say("Postgres is ready again")

    async def _start_gateways(self, dsn: str, previous: Session | None, leash: Leash) -> None:
        known = {gateway.name: int(gateway.url.rpartition(":")[2]) for gateway in previous.gateways} if previous else {}
        for name in (f"gateway-{n}" for n in range(1, GATEWAYS + 1)):
            config = GatewayConfig(name, free_port(known.get(name, 0)), dsn, self.state.secret, self.state.logs / f"{name}.log")
            gateway = LocalGateway(config, environ=self._environ, leash=leash, say=self._say, changed=self._write_session)
            self._gateways.append(gateway)
        self._stack.push_async_callback(self._stop_gateways)
        for failure in await asyncio.gather(*(gateway.start() for gateway in self._gateways), return_exceptions=True):
            if failure is not None:
                raise failure
        for gateway in self._gateways:
            self._watch(gateway.supervise())

    async def _stop_gateways(self) -> None:
        await asyncio.gather(*(gateway.stop() for gateway in self._gateways))

    async def _bury(self, store: Store) -> None:
        """Pods of a session that did not end in order: their processes have ended by now, so their runs wait for no lease to expire."""
        for pod in [pod for pod in self.state.pods().values() if not pod.ended]:
            await store.pod_gone(pod.pod, "DevStopped")
            self.state.record(PodRecord(pod.pod, ended=datetime.now(UTC).timestamp(), reason="ended with `perdure dev`"))

    def _runtime_dir(self, previous: Session | None) -> Path:
        """Sockets and tokens, below the temporary folder: short, and of this session only."""
        if (left := _runtime_of(previous)) is not None:
            shutil.rmtree(left, ignore_errors=True)
        runtime = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX))
        self._stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        return runtime

    def _write_session(self) -> None:
        if self._session is not None:
            gateways = [Gateway(g.config.name, g.config.url, g.pid) for g in self._gateways]
            self._session = msgspec.structs.replace(
                self._session, gateways=gateways, postgres_pid=(self._postgres and self._postgres.pid) or 0
            )
            self.state.write_session(self._session)


def _runtime_of(session: Session | None) -> Path | None:
    """Only one that is as we make them: what is below it is deleted, and whoever works there is ended."""
    found = Path(session.runtime_dir) if session is not None else None
    return found if found is not None and found.parent == Path(tempfile.gettempdir()) and found.name.startswith(RUNTIME_PREFIX) else None

"""What a command works on: a gateway, and what is around it. Either the `perdure dev` of a folder (:mod:`local`), or a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

from perdure_operator.cli.client import Client
from perdure_operator.cli.story import PodName
from perdure_operator.cli.views import RunView

if TYPE_CHECKING:  # the models of all resources, which only `submit` needs
    from perdure_operator.local.manifests import Loaded


@dataclass(frozen=True)
class Applied:
    """``created`` is False when the run was there already; ``ignored``: then, what the manifest says otherwise. ``resource``: the AgentRun,
    where there is one."""

    run: RunView
    created: bool
    resource: dict[str, Any] | None = None
    ignored: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        """What its author should know, or nothing."""
        if not self.ignored:
            return ""
        what = " and ".join(self.ignored)
        return f"{self.run.full_name} keeps the {what} that it began with; the file has another, which is not taken"


@dataclass(frozen=True)
class Lease:
    """A time in which a pod had the run. ``over`` is set when it has ended. ``attempt`` counts failures, ``epoch`` leases."""

    pod_id: str
    pool: str
    epoch: int
    attempt: int
    at: str
    over: Event


class LogGone(Exception):
    """There is no log any more; says why."""


class Connection(ABC):
    """``default_namespace``: of runs that name none. ``poll_seconds``: how often one may look again."""

    default_namespace: str
    poll_seconds: float

    @property
    @abstractmethod
    def client(self) -> Client: ...

    @abstractmethod
    def pod_names(self, pool: str) -> PodName:
        """How the pods of a pool (namespace/name) are called."""
        ...

    @abstractmethod
    def apply(self, loaded: list[Loaded], *, store_only: bool, say: Callable[[str], None]) -> Iterator[Applied]:
        """Makes pools and runs; yields each run as it is made, or was found. ``say`` is told what else there is to know."""
        ...

    @abstractmethod
    def submit(self, namespace: str, name: str, spec: dict[str, Any], *, store_only: bool) -> Applied: ...

    @abstractmethod
    def refresh(self, run: RunView) -> RunView:
        """The run as it is now. One without an id is a resource that has not become a run yet."""
        ...

    @abstractmethod
    def log(self, lease: Lease, namespace: str, *, sidecar: bool, follow: bool) -> Iterable[str]:
        """The lines of a pod's log; with ``follow`` until the lease is over and no more comes. Raises LogGone."""
        ...

    def trigger_names(self, namespace: str) -> list[str]:
        """None where triggers are not resources. Raises PerdureError."""
        return []

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """The command has ended."""

    def split(self, run: str, namespace: str | None) -> tuple[str, str]:
        """Namespace and name of ``NAME`` or ``NAMESPACE/NAME``."""
        before, slash, after = run.partition("/")
        return (before, after) if slash else (namespace or self.default_namespace, run)

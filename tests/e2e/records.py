"""What the store says of the runs of one namespace: what no resource tells, such as failures, leases and rows without a resource."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.e2e.installation import Installation

Json = dict[str, Any]


class Records:
    def __init__(self, perdure: Installation, namespace: str) -> None:
        self._perdure, self._namespace = perdure, namespace

    def column(self, name: str, column: str) -> str:
        """Of the run that has this name now; empty if there is none."""
        return self._perdure.sql(
            f"select {column} from perdure.runs where namespace = '{self._namespace}' and name = '{name}' and not superseded"
        )

    def states(self, prefix: str = "") -> Counter[str]:
        """How many runs whose name begins so are in which state, all that ever were."""
        rows = self._perdure.sql(f"select state from perdure.runs where namespace = '{self._namespace}' and name like '{prefix}%'")
        return Counter(rows.split())

    def unfinished(self, prefix: str = "") -> int:
        states = self.states(prefix)
        return states["Pending"] + states["Running"] + states["Suspended"]

    def holders(self, name: str) -> list[str]:
        """The pods, by our own id, that had this run, one a lease."""
        return self._events(name, "run.leased", "data ->> 'pod'").split()

    def count(self, name: str, kind: str) -> int:
        return int(self._events(name, kind, "count(*)"))

    def idle(self, pool: str) -> int:
        return int(self._perdure.sql(f"select count(*) from perdure.pods where pool = '{self._namespace}/{pool}' and state = 'idle'"))

    def until_warm(self, pool: str, pods: int = 1) -> None:
        self._perdure.until(f"{pods} pods of {pool} are warm", lambda: self.idle(pool) >= pods)

    def until_at_work(self, name: str, steps: int = 1) -> str:
        """The pod of a run that has journaled so many steps and is busy with the next."""
        running = f"{self._namespace}/{name} is at work"
        self._perdure.until(running, lambda: self.is_running(name) and int(self.column(name, "steps")) >= steps)
        pod = self._perdure.until(
            f"{name} says its pod", lambda: (self._perdure.run(name, self._namespace).get("status") or {}).get("podName")
        )
        return str(pod)

    def is_running(self, name: str) -> bool:
        return self.column(name, "state") == "Running"

    def _events(self, name: str, kind: str, what: str) -> str:
        order = "" if what == "count(*)" else "order by e.seq"
        return self._perdure.sql(
            f"select {what} from perdure.events e join perdure.runs r using (run_id) "
            f"where r.namespace = '{self._namespace}' and r.name = '{name}' and not r.superseded and e.kind = '{kind}' {order}"
        )

"""Lives of runs and of bare pods on a cluster, one at a time, each with what it took.

All clocks are those of one machine: the audit log says when an object was asked for and when a pod was gone, the store when a signal
was accepted and a wait was reached, the agent when its process and its code began.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from tests.cluster.audit import AuditLog
from tests.cluster.errors import ClusterError
from tests.e2e.installation import PODS, Installation, agent_run, pool

NAMESPACE = "bench"
OURS = "system:serviceaccount:perdure-system:"
STEPS = 100
BARE = "same manifest, both containers print the time and wait to be ended"

_AGENT = """
import time
born = time.time()
from perdure import Run, agent, step

@step
async def now() -> list[float]:
    return [born, time.time()]

@agent
async def main(run: Run, input: dict) -> list:
    first = await now()
    for _ in range(input["steps"]):
        await now()
    for _ in range(input["waits"]):
        await run.wait_signal("go")
    return [first, await now()]

main.serve()
"""
_BARE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(time.time(), flush=True)
time.sleep(600)
"""


class Lives:
    def __init__(self, perdure: Installation, audit: AuditLog) -> None:
        self._perdure, self._audit = perdure, audit
        self._count = 0

    def prepare(self) -> None:
        self._perdure.cluster.kubectl("create", "namespace", NAMESPACE)
        self._perdure.prepare(NAMESPACE)
        command = ["python", "-c", _AGENT]
        self._perdure.apply(
            NAMESPACE, pool("cold", command), pool("warm", command, idle=1), pool("fork", command, idle=1, reuse=True)
        )  # fmt: skip
        self._until_warm("warm")
        self._shape = self._bare_shape()

    # ------------------------------------------------------------------------------------------------------- timed, in seconds

    def bare(self) -> dict[str, float]:
        name = self._name("bare")
        self._perdure.apply(NAMESPACE, {**self._shape, "metadata": {"name": name}})
        began = float(self._perdure.until(f"{name} speaks", lambda: self._words(name)))
        created = self._asked("create", PODS, name)
        self._perdure.delete("pod", name, NAMESPACE, "--wait=true")
        return {"bare start": began - created, "bare stop": self._gone(name) - self._asked("delete", PODS, name)}

    def cold(self) -> dict[str, float]:
        """Nothing is warm: each part of the life gets a pod of its own."""
        name = self._run("cold", waits=1)
        pod = self._no_pod("cold")
        self._perdure.signal(name, NAMESPACE, "go")
        (_, first), (born, second) = self._result(name)
        self._no_pod("cold")
        return {
            "cold start": first - self._asked("create", "agentruns", name),
            "cold wake, process": born - self._event(name, "signal.received"),
            "cold wake": second - self._event(name, "signal.received"),
            "wait reached → pod gone": self._gone(pod) - self._event(name, "run.suspended"),
        }

    def warm(self, pool_name: str) -> dict[str, float]:
        self._until_warm(pool_name)
        name = self._run(pool_name, waits=1)
        self._until_warm(pool_name)
        self._perdure.signal(name, NAMESPACE, "go")
        _, (_, second) = self._result(name)
        return {f"warm wake, {'ForkPerRun' if pool_name == 'fork' else 'single-use'}": second - self._event(name, "signal.received")}

    # ---------------------------------------------------------------------------------------------------------------- counted

    def writes(self) -> dict[str, Counter[str]]:
        """API writes of our own identities for one life each."""
        return {
            "no step, no wait": self._writes_of("plain", {"steps": 0, "waits": 0}),
            f"{STEPS} steps": self._writes_of("steps", {"steps": STEPS, "waits": 0}),
            "one wait": self._writes_of("waits", {"steps": 0, "waits": 1}),
            "one wait, ForkPerRun": self._writes_of("forked", {"steps": 0, "waits": 1}, reuse=True),
        }

    def _writes_of(self, pool_name: str, plan: dict[str, int], *, reuse: bool = False) -> Counter[str]:
        """In a pool of its own, so that its pods are its own."""
        command = ["python", "-c", _AGENT]
        self._perdure.apply(NAMESPACE, pool(pool_name, command, idle=int(reuse), reuse=reuse))
        if reuse:
            self._until_warm(pool_name)
        name = self._run(pool_name, **plan)
        if plan["waits"]:
            if not reuse:
                self._no_pod(pool_name)
            self._perdure.signal(name, NAMESPACE, "go")
        self._result(name)
        self._perdure.until("its finalizer is gone", lambda: not self._perdure.run(name, NAMESPACE)["metadata"].get("finalizers"))
        if not reuse:
            self._no_pod(pool_name)
        pods = (f"{pool_name}-",) if not reuse else ()
        return self._audit.writes(NAMESPACE, by=OURS, names=(name, *pods))

    # ------------------------------------------------------------------------------------------------------------------- parts

    def _words(self, pod: str) -> str:
        """The first that its agent says; nothing before it has begun."""
        try:
            return self._perdure.cluster.kubectl("logs", pod, "-n", NAMESPACE, "-c", "agent").partition("\n")[0]
        except ClusterError:
            return ""

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-run-{self._count}"

    def _run(self, pool_name: str, *, steps: int = 0, waits: int = 0) -> str:
        name = self._name(f"of-{pool_name}")
        self._perdure.apply(NAMESPACE, agent_run(name, pool_name, {"steps": steps, "waits": waits}))
        state = "Suspended" if waits else "Succeeded"
        self._perdure.until(f"{name} is {state}", lambda: self._sql(name, "select state from perdure.runs where") == state)
        return name

    def _result(self, name: str) -> list[Any]:
        return list(self._perdure.until_phase(name, NAMESPACE, "Succeeded")["status"]["result"])

    def _event(self, name: str, kind: str) -> float:
        query = f"select extract(epoch from e.at) from perdure.events e join perdure.runs r using (run_id) where e.kind = '{kind}' and"
        return float(self._sql(name, query).split()[0])

    def _sql(self, name: str, query: str) -> str:
        table = "r." if " r " in query else ""
        return self._perdure.sql(f"{query} {table}name = '{name}' and {table}namespace = '{NAMESPACE}' limit 1")

    def _asked(self, verb: str, what: str, name: str) -> float:
        return next(r.received for r in self._audit.requests(NAMESPACE) if (r.verb, r.what, r.name) == (verb, what, name))

    def _gone(self, pod: str) -> float:
        """When the last deletion of its object was answered: that with which it went."""
        ends = [r.answered for r in self._audit.requests(NAMESPACE) if (r.verb, r.what, r.name, r.code) == ("delete", PODS, pod, 200)]
        return ends[-1]

    def _no_pod(self, pool_name: str) -> str:
        """Waits until the pool has none; gives the last one that it had."""
        self._perdure.until("the pod is gone", lambda: not [p for p in self._perdure.workers(NAMESPACE) if p.startswith(f"{pool_name}-")])
        made = [
            r.name for r in self._audit.requests(NAMESPACE) if (r.verb, r.what) == ("create", PODS) and r.name.startswith(f"{pool_name}-")
        ]
        return made[-1]

    def _until_warm(self, pool_name: str) -> None:
        query = f"select count(*) from perdure.pods where pool = '{NAMESPACE}/{pool_name}' and state = 'idle'"
        self._perdure.until(f"pool {pool_name} is warm", lambda: self._perdure.sql(query) == "1")
        time.sleep(1.0)  # what made it warm is over: its own start is not to slow down what is measured

    def _bare_shape(self) -> dict[str, Any]:
        """A worker pod as the operator makes it, with nothing of Perdure inside."""
        worker = next(p for p in self._perdure.all(PODS, NAMESPACE) if p["metadata"]["name"].startswith("warm-"))
        spec = json.loads(json.dumps(worker["spec"]))
        for field in ("nodeName", "serviceAccount", "tolerations"):
            spec.pop(field, None)
        for container in [*spec["containers"], *spec["initContainers"]]:
            container["command"], container["args"] = ["python", "-c", _BARE], []
        return {"apiVersion": "v1", "kind": "Pod", "spec": spec}

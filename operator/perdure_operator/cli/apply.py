"""Manifests to the gateway: pools first, then runs. Sent twice, a run is the same run.

A run that is there under its name is left alone, so `perdure dev` can be started again and again on the same files and goes on with the
runs that it has. The Idempotency-Key is ``spec.idempotencyKey``, else the name. A ``generateName`` makes a new run each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from perdure_operator.cli.client import Client, NotFound
from perdure_operator.cli.connection import Applied
from perdure_operator.kube.api.v1alpha1 import AgentRef, AgentRun, PoolRef, implicit_pool
from perdure_operator.local.manifests import Loaded, pools, runs


def apply(client: Client, loaded: list[Loaded], say: Callable[[str], None]) -> Iterator[Applied]:
    """Stores every pool, and says which of them were another before; then yields each run as it is stored. Raises ApiError."""
    before = client.pools()
    for item, pool in pools(loaded):
        stored = client.put_pool(item.namespace, item.name, pool.spec.to_json())
        if before.get(item.full_name, stored) != stored:
            say(f"AgentPool {item.full_name} is changed: all its runs get workers of the new kind from now on")
    for item, run in runs(loaded):
        if run.spec.agent.template is not None:
            name, spec = implicit_pool(run.spec.agent.template)
            client.put_pool(item.namespace, name, spec.to_json())
        yield submit(client, item.namespace, *_request(item, run))


def pool_folders(loaded: Iterable[Loaded]) -> dict[str, Path]:
    """The folder of the manifest that each pool comes from, implicit ones too, by namespace/name."""
    found = {item.full_name: item for item, _ in pools(loaded)}
    for item, run in runs(loaded):
        if run.spec.agent.template is not None:
            found[f"{item.namespace}/{implicit_pool(run.spec.agent.template)[0]}"] = item
    return {pool: item.file.absolute().parent for pool, item in found.items()}


def submit(client: Client, namespace: str, name: str, body: dict[str, Any], key: str) -> Applied:
    """The run of this name, made if it is not there. Raises ApiError."""
    try:
        there = client.run(namespace, name)
        given = {"objective": "", "input": None, **body["spec"]}
        return Applied(there, created=False, ignored=tuple(what for what in ("objective", "input") if getattr(there, what) != given[what]))
    except NotFound:
        pass
    run = client.submit(namespace, {**body, "name": name}, key)
    # Another name: the key has made a run before.
    return Applied(run, created=run.name == name)


def submit_manifest(client: Client, item: Loaded) -> Applied:
    """A run whose pool is there. Raises ApiError."""
    [(_, run)] = runs([item])
    return submit(client, item.namespace, *_request(item, run))


def _request(item: Loaded, run: AgentRun) -> tuple[str, dict[str, Any], str]:
    """Name, body and Idempotency-Key of the submission. A template of the run's own is sent as a reference to its implicit pool."""
    name = item.name or f"{run.metadata.generate_name}{secrets.token_hex(3)}"
    spec = run.spec
    if spec.agent.template is not None:
        spec = spec.model_copy(update={"agent": AgentRef(pool_ref=PoolRef(name=implicit_pool(spec.agent.template)[0]))})
    body: dict[str, Any] = {"spec": spec.to_json()}
    if run.metadata.labels:
        body["labels"] = dict(run.metadata.labels)
    return name, body, spec.idempotency_key or f"manifest:{name}"

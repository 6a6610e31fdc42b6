"""`kubectl agentrun` on a real gateway behind TLS: what it does with a run, by a port-forward of an apiserver that the test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.harness.authority import Authority
from tests.harness.cluster import POOL, Cluster
from tests.harness.gateways import Gateway, Zygote, free_port
from tests.unit.cli.fake_apiserver import FakeApiServer
from typer.testing import CliRunner, Result

from perdure_operator.cli.main import kubectl_app

SERVER_NAME = "perdure-gateway.perdure.svc"
Call = Callable[..., Coroutine[Any, Any, Result]]


class ForwardedGateway(Gateway):
    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture
async def secure(cluster: Cluster, zygote: Zygote, tmp_path: Path) -> AsyncIterator[tuple[ForwardedGateway, Authority]]:
    await cluster.store.upsert_pool("default", "p", POOL, 10_000)
    authority = Authority.make(tmp_path / "authority")
    files, port = authority.issue("gateway", SERVER_NAME), free_port()
    env = {
        "PERDURE_DSN": cluster.dsn,
        "PERDURE_LISTEN": f"127.0.0.1:{port}",
        "PERDURE_TLS_CERT_FILE": str(files.certificate),
        "PERDURE_TLS_KEY_FILE": str(files.key),
        "PERDURE_AUTH": "local",
        "PERDURE_TOKEN_SECRET_FILE": str(cluster.secret),
    }
    trusting = authority.client()
    # The harness asks it by its address; only the command line is to find the name in the certificate.
    trusting.check_hostname = False
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting, force_close=True)) as http:
        gateway = ForwardedGateway("tls", port, env, tmp_path / "tls.log", zygote, http)
        cluster.gateways.append(gateway)
        await gateway.start()
        yield gateway, authority


@pytest.fixture
async def call(cluster: Cluster, secure: tuple[ForwardedGateway, Authority], tmp_path: Path) -> AsyncIterator[Call]:
    """Runs it as somebody who may do ``verbs``, in a thread: the pods of the test live in this one."""
    gateway, authority = secure

    with FakeApiServer() as server:
        server.target = gateway.port
        data = {"url": "", "namespace": "perdure", "service": "perdure-gateway", "port": "443", "ca.crt": authority.pem}
        server.add("configmaps", "perdure", "perdure-cli", metadata={"labels": {"app.kubernetes.io/name": "perdure"}}, data=data)
        ports = [{"port": 443, "targetPort": 8443}]
        server.add("services", "perdure", "perdure-gateway", spec={"selector": {"app": "gateway"}, "ports": ports})
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        server.add("pods", "perdure", "gateway-a", metadata={"labels": {"app": "gateway"}}, spec={"containers": []}, status=ready)

        async def run(*words: str, verbs: tuple[str, ...] = ("*",)) -> Result:
            token = cluster.tokens.issue_person("ada", verbs=verbs, namespaces=["*"])
            server.tokens.add(token)
            config = {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
            file = tmp_path / "kubeconfig"
            file.write_text(yaml.safe_dump(config))
            return await asyncio.to_thread(CliRunner().invoke, kubectl_app, [*words, "--kubeconfig", str(file)])

        yield run


async def test_a_run_is_submitted_watched_and_reported(call: Call, cluster: Cluster, secure: tuple[ForwardedGateway, Authority]) -> None:
    watching = asyncio.create_task(call("submit", "--store-only", "--pool", "p", "--name", "one", "--input", "[1]", "--watch"))
    pod = await cluster.holder(secure[0])
    await pod.finish()
    watched = await watching
    assert watched.exit_code == 0, watched.output
    assert "default/one leased by p-" in watched.stderr
    assert "default/one succeeded" in watched.stderr

    assert json.loads((await call("get", "one", "-o", "json")).stdout)["state"] == "Succeeded"
    page = " ".join((await call("report", "one")).stdout.split())
    assert page.startswith("default/one Succeeded")
    assert "input [1]" in page
    assert "1 lease, 1 attempt" in page


async def test_signal_why_and_exit_codes(call: Call, cluster: Cluster, secure: tuple[ForwardedGateway, Authority]) -> None:
    assert (await call("submit", "--store-only", "--pool", "p", "--name", "two")).exit_code == 0
    assert "waits for an idle pod" in (await call("why", "two")).stdout
    assert (await call("signal", "two", "go", '{"a": 1}', "--id", "s")).stdout.startswith("signal go sent")
    assert (await call("signal", "two", "go", '{"a": 1}', "--id", "s")).stdout.startswith("signal go was there already")
    denied = await call("cancel", "two", verbs=("get", "list"))
    assert denied.exit_code == 4
    assert "ada may not cancel" in denied.stderr
    assert (await call("why", "three")).exit_code == 3
    assert (await call("cancel", "two")).exit_code == 0
    assert (await call("get", "two")).stdout.splitlines()[1].split()[:2] == ["two", "Cancelled"]

"""A gateway behind TLS, and sidecars that trust exactly one authority: real processes on both sides."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from tests.harness.authority import Authority
from tests.harness.cluster import POOL, Cluster
from tests.harness.gateways import PATIENCE, Gateway, Zygote, free_port
from tests.integration.sidecar_harness import Sidecar


class TlsGateway(Gateway):
    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "authority")


@pytest.fixture
async def secure(cluster: Cluster, zygote: Zygote, authority: Authority, tmp_path: Path) -> AsyncIterator[TlsGateway]:
    """A gateway with a certificate for localhost, and a plain listener for probes on ``PERDURE_METRICS_LISTEN``."""
    await cluster.store.upsert_pool("default", "p", POOL, 10_000)
    files, port = authority.issue("gateway", "localhost"), free_port()
    env = {
        "PERDURE_DSN": cluster.dsn,
        "PERDURE_LISTEN": f"127.0.0.1:{port}",
        "PERDURE_METRICS_LISTEN": f"127.0.0.1:{free_port()}",
        "PERDURE_TLS_CERT_FILE": str(files.certificate),
        "PERDURE_TLS_KEY_FILE": str(files.key),
        "PERDURE_AUTH": "local",
        "PERDURE_TOKEN_SECRET_FILE": str(cluster.secret),
    }
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=authority.client(), force_close=True)) as http:
        gateway = TlsGateway("tls", port, env, tmp_path / "tls.log", zygote, http)
        cluster.gateways.append(gateway)
        await gateway.start()
        yield gateway


def sidecar(cluster: Cluster, folder: Path, url: str, **env: str) -> Sidecar:
    folder.mkdir()
    token = folder / "token"
    token.write_text(cluster.tokens.issue_pod(uuid4(), "default/p"))
    return Sidecar(folder, [], PERDURE_GATEWAY_URLS=url, PERDURE_TOKEN_FILE=str(token), **env)


async def test_a_sidecar_that_trusts_the_authority_gets_a_run(
    cluster: Cluster, secure: TlsGateway, authority: Authority, tmp_path: Path
) -> None:
    run = await cluster.api(secure).create()
    worker = sidecar(cluster, tmp_path / "worker", secure.url, PERDURE_GATEWAY_CA=authority.pem)
    await worker.start()
    try:
        status, context = await worker.get("/v1/run")
        assert (status, context["runId"]) == (200, run)
    finally:
        await worker.close()


@pytest.mark.parametrize(
    ("trusted", "words"),
    [
        ("other", "unable to get local issuer certificate"),
        ("system", "unable to get local issuer certificate"),
        ("name", "IP address mismatch"),
    ],
)
async def test_a_gateway_that_proves_nothing_is_told_nothing(
    cluster: Cluster, secure: TlsGateway, authority: Authority, tmp_path: Path, trusted: str, words: str
) -> None:
    """Another authority; no authority of ours, so the system's; the right one, but the certificate is for another name."""
    pem = {"other": Authority.make(tmp_path / "other").pem, "system": "", "name": authority.pem}[trusted]
    url = secure.url.replace("localhost", "127.0.0.1") if trusted == "name" else secure.url
    worker = sidecar(cluster, tmp_path / "worker", url, PERDURE_GATEWAY_CA=pem)
    await worker.start()
    try:
        await worker.logged("no connection to a gateway", times=2)
        line = next(line for line in worker.log if line["event"] == "no connection to a gateway")
        host = url.partition("://")[2].partition(":")[0]
        assert line["error"].startswith(f"the certificate of {host} is not to be trusted: {words}")
        assert line["error"].endswith("(see PERDURE_GATEWAY_CA)")
        assert line["gateway"] == url
        assert await secure.metric("perdure_connected_pods", state="idle") == 0
    finally:
        await worker.close()


async def test_a_gateway_with_a_ca_refuses_plain_http(secure: TlsGateway) -> None:
    with pytest.raises(aiohttp.ClientError):
        await plain(secure.port, "/readyz")


async def test_probes_and_metrics_have_a_plain_listener_of_their_own(secure: TlsGateway) -> None:
    port = int(secure.env["PERDURE_METRICS_LISTEN"].rpartition(":")[2])
    assert await plain(port, "/healthz") == (200, '{"status":"ok"}')
    assert await plain(port, "/readyz") == (200, '{"status":"ready"}')
    status, text = await plain(port, "/metrics")
    assert status == 200
    assert "perdure_commit_seconds_count" in text
    assert (await plain(port, "/v1/namespaces/default/runs"))[0] == 404, "no API without TLS"


async def test_a_new_certificate_is_taken_while_the_gateway_runs(secure: TlsGateway, authority: Authority) -> None:
    before = await shown(secure.port)
    authority.issue("gateway", "localhost")
    deadline = time.monotonic() + PATIENCE
    while await shown(secure.port) == before:
        assert time.monotonic() < deadline, "the old certificate is still shown"
        await asyncio.sleep(0.1)
    assert await secure.answers("/readyz")


async def plain(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def shown(port: int) -> bytes:
    """The certificate that the gateway shows to a new connection."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anyone)
    connection: Any = writer.get_extra_info("ssl_object")
    writer.close()
    return bytes(connection.getpeercert(binary_form=True))

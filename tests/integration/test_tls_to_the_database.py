"""To a Postgres with an authority of its own, in the environment and with the files that the chart gives to our containers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import binaries
from tests.cluster.unavailable import unavailable
from tests.harness.authority import Authority
from tests.harness.chart import environment, render
from tests.harness.tls_postgres import speaking_tls

from perdure_operator.local.embedded_postgres import EmbeddedPostgres
from perdure_operator.store.migrate import require_schema

VALUES: dict[str, Any] = {
    # As CloudNativePG makes them for a cluster `db`.
    "postgres": {"dsnSecret": {"name": "db-app", "key": "uri"}, "caSecret": {"name": "db-ca"}, "clientSecret": {"name": "perdure-client"}}
}
SECONDS = 30
"""Much less than a migration waits for a database that may come up yet."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "authority")


@pytest.fixture
def plain(postgres_server: EmbeddedPostgres, empty_database: str) -> str:
    """The DSN of an empty database, by TCP and with a password."""
    name = empty_database.partition("@/")[2].partition("?")[0]
    return postgres_server.tcp_dsn.replace("/postgres?", f"/{name}?")


def secrets(dsn: str, trusted: Authority, shows: Authority) -> dict[str, dict[str, str]]:
    client = shows.issue("client", "perdure")
    return {
        "db-app": {"uri": dsn},
        "db-ca": {"ca.crt": trusted.pem, "ca.key": "not for us"},
        "perdure-client": {"tls.crt": client.certificate.read_text(), "tls.key": client.key.read_text()},
    }


async def run(folder: Path, role: str, given: dict[str, dict[str, str]]) -> tuple[int, str]:
    """A container of the chart's, its volumes below ``folder``. Gives its exit code and its last words."""
    if not binaries.are_built([binaries.HELM]):
        unavailable("no helm has been built yet: run `make cluster-build`")
    [(pod, container)] = [
        (pod["spec"], container)
        for _, pod in render(VALUES).pods()
        for container in pod["spec"]["containers"]
        if container.get("args") == [role]
    ]
    for mount in container["volumeMounts"]:
        [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == mount["name"]]
        there = folder / mount["mountPath"].lstrip("/")
        there.mkdir(parents=True)
        for item in volume["items"]:
            (there / item["path"]).write_text(given[volume["secretName"]][item["key"]])
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for name, entry in environment(container).items():
        if source := entry.get("valueFrom"):  # type: ignore[attr-defined]
            env[name] = given[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        else:
            env[name] = str(entry["value"]).replace("/etc/perdure", f"{folder}/etc/perdure")  # type: ignore[index]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "perdure_operator.main", role, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        raise
    return process.returncode or 0, said.decode().strip().splitlines()[-1]


async def test_a_server_that_the_authority_vouches_for_is_migrated(tmp_path: Path, plain: str, authority: Authority) -> None:
    async with speaking_tls(plain, authority, asks=True) as dsn:
        code, words = await run(tmp_path, "migrate", secrets(dsn, authority, authority))
    assert (code, words.startswith("applied: 0001_schema")) == (0, True), words
    await require_schema(plain)


async def test_one_that_another_authority_vouches_for_is_refused_at_once_and_said(tmp_path: Path, plain: str, authority: Authority) -> None:
    stranger = Authority.make(tmp_path / "stranger")
    async with speaking_tls(plain, stranger) as dsn:
        code, words = await run(tmp_path, "migrate", secrets(dsn, authority, authority))
    assert code == 1
    assert words.startswith("perdure-operator migrate: no connection to the database can be made safe: ")
    assert "CERTIFICATE_VERIFY_FAILED" in words
    assert "postgres.caSecret" in words


async def test_one_of_another_name_is_refused_at_once_and_said(tmp_path: Path, plain: str, authority: Authority) -> None:
    async with speaking_tls(plain, authority, host="elsewhere.example") as dsn:
        code, words = await run(tmp_path, "migrate", secrets(dsn, authority, authority))
    assert code == 1
    assert "certificate is not valid for 'localhost'" in words

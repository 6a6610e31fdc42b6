"""Kubeconfigs as people have them: which entry counts, where paths begin, what a credential plugin is told and may answer."""

from __future__ import annotations

import base64
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure_operator.kube.connection import NoCluster
from perdure_operator.kube.kubeconfig import Kubeconfig, NoCredential, read_context


def write(
    path: Path, *, current: str | None = None, server: str = "https://one", user: Any = None, cluster: Any = None, **context: Any
) -> str:
    content = {
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u", **context}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content | ({"current-context": current} if current else {})))
    return str(path)


def test_the_first_file_that_has_an_entry_wins(tmp_path: Path) -> None:
    one = write(tmp_path / "one", server="https://one")
    two = write(tmp_path / "two", server="https://two", current="a", namespace="team")
    found = read_context(os.pathsep.join([str(tmp_path / "missing"), one, two]))
    assert (found.name, found.namespace, found.cluster["server"]) == ("a", "default", "https://one")
    assert read_context(two).namespace == "team"


@pytest.mark.parametrize(("name", "words"), [(None, "there is no current context"), ("b", "there is no context b")])
def test_without_a_context_it_says_so(tmp_path: Path, name: str | None, words: str) -> None:
    with pytest.raises(NoCluster, match=words):
        read_context(write(tmp_path / "config"), name)


def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("- [")
    with pytest.raises(NoCluster, match="config cannot be read"):
        read_context(str(tmp_path / "config"))


async def test_paths_begin_at_the_file_and_a_token_file_is_read_anew(tmp_path: Path) -> None:
    file = write(tmp_path / "sub" / "config", current="a", user={"tokenFile": "token"}, cluster={"certificate-authority": "ca.pem"})
    (tmp_path / "sub" / "token").write_text("first\n")
    found = Kubeconfig(file)
    assert await found.authorization() == "Bearer first"
    assert found.endpoint.ca_file == str(tmp_path / "sub" / "ca.pem")
    (tmp_path / "sub" / "token").write_text("second")
    assert await found.authorization() == "Bearer first"
    assert await found.authorization(fresh=True) == "Bearer second"


async def test_inline_certificates_are_files_that_nobody_else_reads(tmp_path: Path) -> None:
    data = base64.b64encode(b"PEM").decode()
    user = {"client-certificate-data": data, "client-key-data": data}
    found = Kubeconfig(write(tmp_path / "config", current="a", user=user))
    assert await found.authorization() is None
    check_key(Path(found.endpoint.key_file or ""))


def check_key(key: Path) -> None:
    assert key.read_text() == "PEM"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700


def plugin(folder: Path, body: str, **more: Any) -> dict[str, Any]:
    (folder / "plugin").write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    (folder / "plugin").chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["x"], **more}}


async def test_a_credential_plugin_is_told_the_cluster_and_gives_a_token(tmp_path: Path) -> None:
    body = """
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert not info["spec"]["interactive"]
token = "-".join([sys.argv[1], os.environ["EXTRA"], info["spec"]["cluster"]["server"]])
print(json.dumps({"kind": "ExecCredential", "apiVersion": info["apiVersion"], "status": {"token": token}}))"""
    user = plugin(tmp_path, body, env=[{"name": "EXTRA", "value": "y"}], provideClusterInfo=True, interactiveMode="Never")
    assert await Kubeconfig(write(tmp_path / "config", current="a", user=user)).authorization() == "Bearer x-y-https://one"


@pytest.mark.parametrize(("body", "words"), [("sys.exit(3)", "ended with code 3"), ("print('hello')", "did not print an ExecCredential")])
async def test_a_plugin_that_fails_is_an_error(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(NoCredential, match=words):
        await Kubeconfig(write(tmp_path / "config", current="a", user=plugin(tmp_path, body))).authorization()


async def test_a_plugin_that_is_not_there_gives_its_hint(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": "v1", "command": "no-such-plugin-here", "installHint": "Get it."}}
    with pytest.raises(NoCredential) as error:
        await Kubeconfig(write(tmp_path / "config", current="a", user=user)).authorization()
    assert error.value.advice == "Get it."

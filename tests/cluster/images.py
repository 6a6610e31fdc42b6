"""Builds images from real Dockerfiles, with BuildKit and without a Docker daemon.

BuildKit runs for the time of a build, on the machine's own network because builds install packages, and keeps its layers in the cache:
what has not changed since the last run is not built again.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import base_image, binaries
from tests.cluster.errors import ClusterError
from tests.cluster.oci import digest_of
from tests.cluster.paths import KEY, ROOT, cache, locked
from tests.cluster.processes import Processes
from tests.cluster.progress import doing

BUILDKITD = "buildkitd"
READY_SECONDS = 30.0
# Targets of the project's Dockerfile, which are the ends of its images' names too.
TARGETS = ("operator", "sidecar", "agent", "postgres")
PASSED_ON = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class Builder:
    """``launch(name, argv)`` starts a program in the cluster's mounts and on the machine's network."""

    def __init__(self, folder: Path, processes: Processes, launch: Callable[[str, list[str]], object], cgroup: str) -> None:
        self._folder = folder
        self._processes = processes
        self._launch = launch
        self._cgroup = cgroup
        self._socket = folder / "buildkit.sock"

    def build(self, tag: str, *, target: str, context: Path, dockerfile: Path) -> Path:
        """The image as a file for ``ctr images import``."""
        base = base_image.build()
        archive = self._folder / "image.tar"
        name = tag if "/" in tag else f"docker.io/library/{tag}"
        options = [f"filename={dockerfile.name}", f"cgroup-parent=/{self._cgroup}/builds", *([f"target={target}"] if target else [])]
        options.append(f"context:{base_image.STANDS_IN_FOR}=oci-layout://base@{digest_of(base)}")
        options += [f"build-arg:{variable}={os.environ[variable]}" for variable in PASSED_ON if variable in os.environ]
        with doing(f"building image {tag}"), self._buildkit():
            self._buildctl(
                *("build", "--frontend", "dockerfile.v0", "--progress", "plain"),
                *("--local", f"context={context}", "--local", f"dockerfile={dockerfile.parent}", "--oci-layout", f"base={base}"),
                *(part for option in options for part in ("--opt", option)),
                *("--output", f"type=docker,name={name},dest={archive}"),
            )
        return archive

    @contextmanager
    def _buildkit(self) -> Iterator[None]:
        # One daemon at a time has the layers; each checkout has its own, or one would wait for the other's builds.
        layers = cache() / f"buildkit-{KEY}"
        with locked(layers.with_suffix(".lock")):
            worker = ["--oci-worker-net", "host", "--containerd-worker=false"]
            self._launch(BUILDKITD, [str(binaries.BUILDKIT.folder / "buildkitd"), "--root", str(layers), "--addr", self._address, *worker])
            try:
                self._processes.wait_for(BUILDKITD, self._answers, READY_SECONDS)
                yield
            finally:
                self._processes.stop(BUILDKITD)

    @property
    def _address(self) -> str:
        return f"unix://{self._socket}"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self._socket)) == 0

    def _buildctl(self, *args: str) -> None:
        argv: Sequence[str] = [str(binaries.BUILDKIT.folder / "buildctl"), "--addr", self._address, *args]
        done = subprocess.run(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"the image could not be built:\n{done.stderr.strip()[-4000:]}")


def project_dockerfile() -> Path:
    return ROOT / "Dockerfile"

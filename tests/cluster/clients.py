"""What tests do with a cluster, whoever runs it: commands with its KUBECONFIG, and references to images that it can run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import CommandError

COMMAND_SECONDS = 60.0


class Clients:
    """``kubeconfig``: of an administrator. ``image_prefix``: goes before the name of every image of the project."""

    def __init__(self, kubeconfig: Path, image_prefix: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.image_prefix = image_prefix

    def argv(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs ``command`` where the cluster is within reach."""
        return [str(part) for part in command]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def image(self, name: str) -> str:
        return f"{self.image_prefix}{name}"

    def exec(
        self,
        command: Sequence[str | Path],
        *,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float = COMMAND_SECONDS,
    ) -> str:
        """Its standard output. :class:`CommandError` when it fails or takes too long."""
        argv = self.argv(command)
        environment = {**self.environment(), **(env or {})}
        try:
            done = subprocess.run(argv, input=input, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as error:
            raise CommandError(argv, f"no end after {seconds:.0f} s", _text(error.stdout), _text(error.stderr)) from None
        if done.returncode:
            raise CommandError(argv, f"code {done.returncode}", done.stdout, done.stderr)
        return done.stdout

    def kubectl(self, *args: str, input: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
        return self.exec(["kubectl", *args], input=input, seconds=seconds)

    def helm(self, *args: str, seconds: float = 180.0) -> str:
        return self.exec(["helm", *args], seconds=seconds)


class ExistingCluster(Clients):
    """A cluster that somebody else runs: ``PERDURE_TEST_KUBECONFIG`` names its file, ``PERDURE_TEST_IMAGE_PREFIX`` where its images are.

    kubectl and helm come from the PATH.
    """

    @classmethod
    def from_environment(cls) -> ExistingCluster | None:
        if not (kubeconfig := os.environ.get("PERDURE_TEST_KUBECONFIG")):
            return None
        return cls(Path(kubeconfig).expanduser().resolve(), os.environ.get("PERDURE_TEST_IMAGE_PREFIX", ""))


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""

"""A stand-in for the public Python image that Dockerfiles begin with, for machines that reach Debian's packages and no registry of images.

debootstrap makes it once; it is cached as an OCI layout. It knows what this machine knows of package registries: the authorities it trusts
and the index that pip asks, so that a Dockerfile's `pip install` works where the machine's own does.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

from tests.cluster.errors import ClusterError, last_lines
from tests.cluster.oci import write_layout
from tests.cluster.paths import cache, fingerprint, locked, making
from tests.cluster.progress import doing

# Dockerfiles say this; BuildKit gives them ours instead.
STANDS_IN_FOR = "python:3.11-slim"
# The release of Debian whose Python is 3.11.
RELEASE = "bookworm"
PACKAGES = ("python3", "python3-venv", "python3-pip", "python-is-python3", "ca-certificates")
TRUSTED = "/etc/ssl/certs/ca-certificates.crt"
CONFIG = {
    "Env": [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG=C.UTF-8",
        f"SSL_CERT_FILE={TRUSTED}",
        f"PIP_CERT={TRUSTED}",
    ],
    "Cmd": ["python3"],
}
LEFT_OUT = (
    "./proc/*",
    "./sys/*",
    "./dev/*",
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./var/log/*",
    "./usr/share/doc/*",
    "./usr/share/man/*",
)


def layout() -> Path:
    """Where it is, built or not."""
    return cache() / f"base-{fingerprint(RELEASE, *PACKAGES, repr(CONFIG), _trusted(), _pip_configuration())}"


def build() -> Path:
    folder = layout()
    if not folder.exists():
        with locked(cache() / "base.lock"):
            if not folder.exists():
                _build(folder)
    return folder


def _build(folder: Path) -> None:
    with doing("building the base image with debootstrap (about 1 minute)"), making(folder) as new:
        root, log = new / "root", cache() / "debootstrap.log"
        _debootstrap(root, log)
        (root / TRUSTED.strip("/")).write_bytes(_trusted())
        (root / "etc/pip.conf").write_text(_pip_configuration())
        layer = new / "layer.tar"
        left_out = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        subprocess.run(["tar", "--numeric-owner", *left_out, "-C", root, "-cf", layer, "."], check=True)
        shutil.rmtree(root)
        write_layout(new, layer, CONFIG, "base")


def _debootstrap(root: Path, log: Path) -> None:
    # In mounts of its own, because one that is killed leaves its /proc behind.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(root), *_mirror()]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise ClusterError(f"debootstrap failed; {last_lines(log)}")


def _mirror() -> list[str]:
    """The one that this machine's apt uses; debootstrap's own choice elsewhere."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [uri for codename, _, uri in (line.partition(" ") for line in targets.stdout.splitlines()) if codename == RELEASE][:1]


def _trusted() -> bytes:
    found = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or TRUSTED
    return Path(found).read_bytes()


def _pip_configuration() -> str:
    """pip's index, where the machine has chosen another one than pip would."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    index = os.environ.get("PIP_INDEX_URL") or asked.stdout.strip()
    return f"[global]\nindex-url = {index}\n" if index else ""

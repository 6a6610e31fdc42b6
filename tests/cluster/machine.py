"""Whether this machine can run a cluster, and what has to be installed first.

Every obstacle is one line that says what to do, because it becomes the reason of a skipped test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.progress import doing

# Program that is looked for → Debian package that brings it.
PROGRAMS = {
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
CNI_PACKAGE = "containernetworking-plugins"
# Debian installs some of them where not every user's PATH leads.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def cni_folder() -> Path | None:
    return next((folder for folder in CNI_FOLDERS if (folder / "bridge").exists()), None)


def missing_packages() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None]
    return missing if cni_folder() else [*missing, CNI_PACKAGE]


def install_packages() -> None:
    """Installs what a node needs, where that is this user's to do; otherwise :func:`obstacle` names what is missing."""
    missing = missing_packages()
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    with doing(f"installing {' '.join(missing)}"):
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", *missing)


def obstacle_to_programs() -> str | None:
    """Why the programs cannot be built here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "a test cluster runs on Linux only: set PERDURE_TEST_KUBECONFIG to use another cluster"
    if shutil.which("go") is None:
        return "no Go found, which builds the programs of a test cluster: install Go 1.26, or set PERDURE_TEST_KUBECONFIG"
    return None


def obstacle_to_node() -> str | None:
    """Why no node can run here, the programs apart; None if one can."""
    if not sys.platform.startswith("linux"):
        return obstacle_to_programs()
    if os.geteuid() != 0:
        return "a test cluster's node runs as root only: use sudo, or set PERDURE_TEST_KUBECONFIG to use another cluster"
    if missing := missing_packages():
        return f"a test cluster's node needs {', '.join(missing)}: install them, or set PERDURE_TEST_KUBECONFIG to use another cluster"
    return None


def _apt(*args: str) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", "-qq", *args], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"apt-get {args[0]} failed:\n{done.stderr.strip()[-2000:]}")

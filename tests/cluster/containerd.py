"""The container runtime of the node, and ``ctr`` to talk to it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.namespace import BRIDGE, POD_RANGE
from tests.cluster.oci import PAUSE_IMAGE

CONTAINERD = "containerd"
READY_SECONDS = 30.0

# A TOML string is written like a JSON one.
CONFIG = """\
version = 3
root = {root}
state = {state}
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
address = {socket}

[plugins."io.containerd.internal.v1.opt"]
path = {opt}

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = {pause}

[plugins."io.containerd.cri.v1.runtime"]
netns_mounts_under_state_dir = true
# Root of a container or a small virtual machine may not protect processes from the OOM killer; then nobody is, instead of no pod running.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = [{cni_programs}]
conf_dir = {cni_config}

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


class Containerd:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "containerd"
        self._cni = folder / "cni"
        self.socket = folder / "containerd.sock"

    def configure(self, cni_programs: Path) -> list[str]:
        """Writes its configuration, returns its command line."""
        self._folder.mkdir(parents=True)
        self._cni.mkdir()
        (self._cni / "10-test.conflist").write_text(json.dumps(self._network()))
        values = {
            "root": self._folder / "root",
            "state": self._folder / "state",
            "opt": self._folder / "opt",
            "socket": self.socket,
            "pause": PAUSE_IMAGE,
            "cni_programs": cni_programs,
            "cni_config": self._cni,
        }
        config = self._folder / "config.toml"
        config.write_text(CONFIG.format(**{name: json.dumps(str(value)) for name, value in values.items()}))
        return [str(binaries.CONTAINERD.folder / "containerd"), "--config", str(config)]

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self.socket)) == 0

    def environment(self) -> dict[str, str]:
        """For ``ctr``: the kubelet's containers and images are in this namespace of containerd's."""
        return {"CONTAINERD_ADDRESS": str(self.socket), "CONTAINERD_NAMESPACE": "k8s.io"}

    def _network(self) -> dict[str, object]:
        ranges = {"type": "host-local", "dataDir": str(self._folder / "addresses"), "ranges": [[{"subnet": POD_RANGE}]]}
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True}
        return {
            "cniVersion": "1.0.0",
            "name": "perdure-test",
            "plugins": [
                {**bridge, "ipam": {**ranges, "routes": [{"dst": "0.0.0.0/0"}]}},
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

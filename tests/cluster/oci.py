"""Image layouts written by hand: what debootstrap and the Go compiler make becomes an image without any image tool.

The format: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

PAUSE_IMAGE = "perdure.test/pause:1"


def write_layout(folder: Path, layer: Path, config: dict[str, Any], name: str) -> str:
    """Makes ``folder`` a layout with one image of one layer, an uncompressed tar that is moved into it. Returns the manifest's digest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    size = layer.stat().st_size
    with layer.open("rb") as content:
        layer_digest = hashlib.file_digest(content, "sha256").hexdigest()
    layer.rename(blobs / layer_digest)
    image = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _blob(blobs, CONFIG_TYPE, image),
        "layers": [{"mediaType": LAYER_TYPE, "digest": f"sha256:{layer_digest}", "size": size}],
    }
    entry = {**_blob(blobs, MANIFEST_TYPE, manifest), "annotations": {"io.containerd.image.name": name}}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return str(entry["digest"])


def digest_of(layout: Path) -> str:
    return str(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])


def pause_archive(program: Path, folder: Path) -> Path:
    """The sandbox's image, with this static program alone, as one file for ``ctr images import``."""
    layer = folder / "pause.layer"
    with tarfile.open(layer, "w") as tar:
        info = tarfile.TarInfo("pause")
        info.mode, data = 0o755, program.read_bytes()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    layout = folder / "pause"
    write_layout(layout, layer, {"Entrypoint": ["/pause"]}, PAUSE_IMAGE)
    archive = folder / "pause.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(layout, arcname=".")
    return archive


def _blob(blobs: Path, media_type: str, content: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

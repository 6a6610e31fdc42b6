"""The cluster's certificates and kubeconfigs: one authority, made anew for every cluster, trusted by nothing else.

Elliptic keys, because all of them together take a tenth of a second.
"""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.errors import CommandError

DAYS = "30"
KEY_KIND = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
# Instead of the machine's own configuration, whose extensions make an authority of every certificate.
CONFIGURATION = "[req]\ndistinguished_name = dn\n[dn]\n"


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and of its key."""

    cert: Path
    key: Path


class Authority:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._configuration = folder / "openssl.cnf"
        self.ca = Pair(folder / "ca.crt", folder / "ca.key")

    def create(self) -> None:
        self._folder.mkdir(parents=True, mode=0o700)
        self._configuration.write_text(CONFIGURATION)
        self._certify(self.ca, "/CN=perdure-test", ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,digitalSignature"])

    def issue(self, name: str, subject: str, *, addresses: str = "") -> Pair:
        """``subject`` as openssl writes it, ``addresses`` as a subjectAltName."""
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        extensions = ["extendedKeyUsage=clientAuth,serverAuth", *([f"subjectAltName={addresses}"] if addresses else [])]
        self._certify(pair, subject, extensions, "-CA", self.ca.cert, "-CAkey", self.ca.key)
        return pair

    def signing_key(self, name: str) -> Path:
        key = self._folder / f"{name}.key"
        # Not genpkey: the API server finds no public key in what that writes.
        _openssl("ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", key)
        return key

    def kubeconfig(self, name: str, subject: str, server: str) -> Path:
        """Of a new identity, with everything inside: the file can be copied anywhere."""
        pair = self.issue(name, subject)
        config: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": _encoded(self.ca.cert)}}],
            "users": [{"name": name, "user": {"client-certificate-data": _encoded(pair.cert), "client-key-data": _encoded(pair.key)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        file = self._folder / f"{name}.kubeconfig"
        file.touch(mode=0o600)
        file.write_text(json.dumps(config, indent=1))
        return file

    def _certify(self, pair: Pair, subject: str, extensions: list[str], *signer: str | Path) -> None:
        added: list[str | Path] = [part for extension in extensions for part in ("-addext", extension)]
        out: list[str | Path] = ["-keyout", pair.key, "-out", pair.cert]
        _openssl("req", "-x509", "-config", self._configuration, *KEY_KIND, "-days", DAYS, "-subj", subject, *added, *signer, *out)


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _openssl(*args: str | Path) -> None:
    argv = ["openssl", *(str(arg) for arg in args)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(argv, f"code {done.returncode}", done.stdout, done.stderr)

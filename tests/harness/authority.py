"""A certificate authority for one test, made with the openssl program."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from perdure_operator.config import TlsFiles

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Authority:
    """``pem`` is what those who trust it are given."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        _openssl(folder, "req", "-x509", *_KEY, "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem")
        return cls(folder)

    @property
    def pem(self) -> str:
        return (self.folder / "ca.pem").read_text()

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.pem)

    def issue(self, name: str, host: str) -> TlsFiles:
        """A certificate for a DNS name, in files called ``name``; issued again it is another one."""
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        _openssl(
            self.folder, "req", "-x509", *_KEY, "-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=test",
            "-addext", f"subjectAltName=DNS:{host}", "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", files.key.name, "-out", files.certificate.name,
        )  # fmt: skip
        return files


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""What a process is told by its environment.

Every variable starts with ``PERDURE_``; a wrong value ends the process with a message that names it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

ALL_NAMESPACES: Literal["all"] = "all"


RUN_BYTES = 1024**3
RUN_STORED_BYTES = 256 * 1024**2


class ConfigError(Exception):
    """An environment variable is missing or wrong."""


@dataclass(frozen=True)
class Address:
    """Where to listen. Port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, name: str, text: str) -> Address:
        """``host:port``; IPv6 in brackets."""
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ConfigError(f"{name}: {text!r} is not host:port")
        return cls(host.strip("[]"), int(_number(name, port, 0, 65535)))


@dataclass(frozen=True)
class TlsFiles:
    """A certificate with its chain, and its key, both PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class GatewayConfig:
    """``metrics_listen``: plain HTTP for those who probe and scrape, None for none. ``token_secret_file`` belongs to ``auth`` local,
    ``token_audience`` to kubernetes. ``lease_seconds``: silence after which a worker is given up. ``run_bytes``, ``run_stored_bytes``: how
    much one run may write, as JSON and as it is stored; None: as much as it likes."""

    dsn: str
    listen: Address
    tls: TlsFiles | None
    metrics_listen: Address | None
    name: str
    auth: Literal["kubernetes", "local"]
    token_secret_file: Path | None
    token_audience: str
    lease_seconds: float
    connections: int
    prepared_statements: bool
    run_bytes: int | None = RUN_BYTES
    run_stored_bytes: int | None = RUN_STORED_BYTES

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> GatewayConfig:
        tls = _tls(env)
        secret = Path(env["PERDURE_TOKEN_SECRET_FILE"]) if env.get("PERDURE_TOKEN_SECRET_FILE") else None
        auth = _one_of(env, "PERDURE_AUTH", ("kubernetes", "local"), "local" if secret else None)
        if auth == "local" and secret is None:
            raise ConfigError("PERDURE_AUTH is local: set PERDURE_TOKEN_SECRET_FILE")
        return cls(
            dsn=required(env, "PERDURE_DSN"),
            listen=Address.parse("PERDURE_LISTEN", env.get("PERDURE_LISTEN") or ("0.0.0.0:8443" if tls else "0.0.0.0:8080")),
            tls=tls,
            metrics_listen=_address(env, "PERDURE_METRICS_LISTEN"),
            name=env.get("PERDURE_GATEWAY_NAME") or _own_name(),
            auth=cast(Literal["kubernetes", "local"], auth),
            token_secret_file=secret,
            token_audience=env.get("PERDURE_TOKEN_AUDIENCE") or "perdure-gateway",
            lease_seconds=_number("PERDURE_LEASE_SECONDS", env.get("PERDURE_LEASE_SECONDS", "15"), 0.5, 3600),
            connections=int(_number("PERDURE_CONNECTIONS", env.get("PERDURE_CONNECTIONS", "10"), 6, 200)),
            prepared_statements=env.get("PERDURE_PREPARED_STATEMENTS", "on") != "off",
            run_bytes=_bytes(env, "PERDURE_RUN_BYTES", RUN_BYTES),
            run_stored_bytes=_bytes(env, "PERDURE_RUN_STORED_BYTES", RUN_STORED_BYTES),
        )


@dataclass(frozen=True)
class OperatorConfig:
    """``watch_namespaces`` empty: all of them. ``gateway_ca``: PEM, what sidecars are to trust; None for the authorities of their image.
    ``inline_templates``: namespaces in which a run may bring its own pod template. ``installation``: its name, which no
    other of the cluster has. ``sidecar_resources``: as a container's; None for those that are built in."""

    dsn: str
    name: str
    installation: str
    watch_namespaces: tuple[str, ...]
    sidecar_image: str
    sidecar_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    gateway_url: str
    gateway_ca: str | None
    inline_templates: Literal["all"] | frozenset[str]
    token_audience: str
    metrics_listen: Address | None
    resync_seconds: float
    sidecar_resources: Mapping[str, Mapping[str, str]] | None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> OperatorConfig:
        """Raises ConfigError, and OSError when the CA's file cannot be read."""
        policy = _one_of(env, "PERDURE_SIDECAR_PULL_POLICY", ("Always", "IfNotPresent", "Never"), "IfNotPresent")
        authorities = Path(env["PERDURE_GATEWAY_CA_FILE"]).read_text(encoding="ascii") if env.get("PERDURE_GATEWAY_CA_FILE") else None
        return cls(
            dsn=required(env, "PERDURE_DSN"),
            name=env.get("PERDURE_OPERATOR_NAME") or _own_name(),
            installation=required(env, "PERDURE_INSTALLATION"),
            watch_namespaces=watch_namespaces(env),
            sidecar_image=required(env, "PERDURE_SIDECAR_IMAGE"),
            sidecar_pull_policy=cast(Literal["Always", "IfNotPresent", "Never"], policy),
            gateway_url=required(env, "PERDURE_GATEWAY_URL"),
            gateway_ca=authorities,
            inline_templates=_inline_templates(env.get("PERDURE_INLINE_TEMPLATES", "none")),
            token_audience=env.get("PERDURE_TOKEN_AUDIENCE") or "perdure-gateway",
            metrics_listen=_address(env, "PERDURE_METRICS_LISTEN"),
            resync_seconds=_number("PERDURE_RESYNC_SECONDS", env.get("PERDURE_RESYNC_SECONDS", "300"), 1, 86_400),
            sidecar_resources=_resources(env, "PERDURE_SIDECAR_RESOURCES"),
        )


def watch_namespaces(env: Mapping[str, str]) -> tuple[str, ...]:
    """Empty: all of them."""
    return _list(env.get("PERDURE_WATCH_NAMESPACES", ""))


def required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if not value:
        raise ConfigError(f"set {name}")
    return value


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _address(env: Mapping[str, str], name: str) -> Address | None:
    return Address.parse(name, env[name]) if env.get(name) else None


def _tls(env: Mapping[str, str]) -> TlsFiles | None:
    certificate, key = env.get("PERDURE_TLS_CERT_FILE"), env.get("PERDURE_TLS_KEY_FILE")
    if bool(certificate) != bool(key):
        raise ConfigError("set both PERDURE_TLS_CERT_FILE and PERDURE_TLS_KEY_FILE, or neither")
    return TlsFiles(Path(certificate), Path(key)) if certificate and key else None


def _inline_templates(text: str) -> Literal["all"] | frozenset[str]:
    if text == "all":
        return ALL_NAMESPACES
    return frozenset() if text in ("", "none") else frozenset(_list(text))


def _resources(env: Mapping[str, str], name: str) -> Mapping[str, Mapping[str, str]] | None:
    """Amounts are judged by the apiserver."""
    if not env.get(name):
        return None
    try:
        found = {kind: {what: str(amount) for what, amount in amounts.items()} for kind, amounts in json.loads(env[name]).items()}
    except (ValueError, AttributeError):
        found = {"?": {}}
    if not found.keys() <= {"requests", "limits"}:
        raise ConfigError(f"{name}: {env[name]!r} is not the JSON of a container's resources, requests and limits")
    return found


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _one_of(env: Mapping[str, str], name: str, choices: tuple[str, ...], default: str | None) -> str:
    value = env.get(name) or default
    if value not in choices:
        given = "is not set" if value is None else f"is {value!r}"
        raise ConfigError(f"{name} {given}; it may be {' or '.join(choices)}")
    return value


def _bytes(env: Mapping[str, str], name: str, usual: int) -> int | None:
    """None for 0, which means that there is no limit."""
    return int(_number(name, env.get(name) or str(usual), 0, 2**62)) or None


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a number") from None
    if not low <= value <= high:
        raise ConfigError(f"{name}: {text} is not between {low:g} and {high:g}")
    return value

"""What a process is told by its environment.

Every variable starts with ``PERDURE_``; a wrong value ends the process with a message that names it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class ConfigError(Exception):
    """An environment variable is missing or wrong."""


@dataclass(frozen=True)
class GatewayConfig:
    """``listen``: host and port, port 0 for any free one. ``lease_seconds``: silence after which a worker is given up."""

    dsn: str
    host: str
    port: int
    name: str
    token_secret_file: Path
    lease_seconds: float
    connections: int
    prepared_statements: bool

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> GatewayConfig:
        host, _, port = env.get("PERDURE_LISTEN", "0.0.0.0:8080").rpartition(":")
        return cls(
            dsn=required(env, "PERDURE_DSN"),
            host=host,
            port=int(_number("PERDURE_LISTEN", port, 0, 65535)),
            name=env.get("PERDURE_GATEWAY_NAME") or f"{socket.gethostname()}-{os.getpid()}",
            token_secret_file=Path(required(env, "PERDURE_TOKEN_SECRET_FILE")),
            lease_seconds=_number("PERDURE_LEASE_SECONDS", env.get("PERDURE_LEASE_SECONDS", "15"), 0.5, 3600),
            connections=int(_number("PERDURE_CONNECTIONS", env.get("PERDURE_CONNECTIONS", "10"), 6, 200)),
            prepared_statements=env.get("PERDURE_PREPARED_STATEMENTS", "on") != "off",
        )


def required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if not value:
        raise ConfigError(f"set {name}")
    return value


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a number") from None
    if not low <= value <= high:
        raise ConfigError(f"{name}: {text} is not between {low:g} and {high:g}")
    return value

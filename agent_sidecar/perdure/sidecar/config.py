"""What the environment says about this pod, read once at the start and never again (the token file excepted)."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

DEFAULT_SOCKET = "/run/perdure/agent.sock"
DEFAULT_PORT = 4555

LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(Exception):
    """The environment does not describe a pod that could work; the message names the variable and what it may be."""

    code = "config-invalid"
    retryable = False


class GatewayAddress(Struct, frozen=True):
    """Where one gateway listens. ``tls`` for ``https``."""

    url: str
    host: str
    port: int
    tls: bool


class Settings(Struct, frozen=True, kw_only=True):
    """``tls``: whom the gateways have to convince; None when none of them is ``https``. ``port`` None: no TCP listener; 0: any free one.
    ``socket`` None: no unix socket. ``socket_required``: it was asked for by name, so that it cannot be bound is an error.
    ``only_spool``: there is no agent any more, only what the pod's last sidecar left in the spool.
    ``await_sigterm``: a kubelet ends this process, and would start it again if it ended by itself before its agent's container has."""

    gateways: tuple[GatewayAddress, ...]
    tls: ssl.SSLContext | None = None
    token_file: Path | None = None
    socket: Path | None = Path(DEFAULT_SOCKET)
    socket_required: bool = False
    port: int | None = DEFAULT_PORT
    reuse: bool = False
    parent_secret: str | None = None
    spool_dir: Path | None = None
    only_spool: bool = False
    await_sigterm: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def token(self) -> str | None:
        """The bearer token as it is now: projected tokens are replaced on disk while the pod lives. Raises OSError."""
        return self.token_file.read_text(encoding="ascii").strip() if self.token_file else None


def from_environment(env: Mapping[str, str]) -> Settings:
    """Raises ConfigError."""
    urls = [part.strip() for part in env.get("PERDURE_GATEWAY_URLS", "").split(",") if part.strip()]
    if not urls:
        raise ConfigError("PERDURE_GATEWAY_URLS is empty; give one or more http://host:port, separated by commas")
    mode = env.get("PERDURE_POD_REUSE") or "Never"
    if mode not in ("Never", "ForkPerRun"):
        raise ConfigError(f"PERDURE_POD_REUSE is {mode!r}; it may be Never or ForkPerRun")
    level = (env.get("PERDURE_LOG_LEVEL") or "info").lower()
    if level not in LOG_LEVELS:
        raise ConfigError(f"PERDURE_LOG_LEVEL is {level!r}; it may be one of {', '.join(LOG_LEVELS)}")
    socket = env.get("PERDURE_SOCKET") or DEFAULT_SOCKET
    gateways = tuple(_address(url) for url in urls)
    settings = Settings(
        gateways=gateways,
        tls=_trust(env.get("PERDURE_GATEWAY_CA", "")) if any(gateway.tls for gateway in gateways) else None,
        token_file=_path(env, "PERDURE_TOKEN_FILE"),
        socket=None if socket == "off" else Path(socket),
        socket_required="PERDURE_SOCKET" in env,
        port=_port(env.get("PERDURE_PORT") or str(DEFAULT_PORT)),
        reuse=mode == "ForkPerRun",
        parent_secret=env.get("PERDURE_PARENT") or None,
        spool_dir=_path(env, "PERDURE_SPOOL_DIR"),
        only_spool=env.get("PERDURE_ONLY_SPOOL") == "true",
        await_sigterm=env.get("PERDURE_AWAIT_SIGTERM") == "true",
        log_level=level,  # type: ignore[arg-type]  # checked above
    )
    if settings.reuse and settings.socket is None:
        raise ConfigError("PERDURE_POD_REUSE is ForkPerRun, which needs the unix socket, and PERDURE_SOCKET is off")
    if settings.socket is None and settings.port is None:
        raise ConfigError("PERDURE_SOCKET and PERDURE_PORT are both off; the agent could not reach its sidecar")
    return settings


def _trust(authorities: str) -> ssl.SSLContext:
    """Exactly these authorities when there are any, else the system's: a cluster's own gateway is not to be vouched for by strangers.
    Made once, because reading the system's takes longer than a handshake."""
    if not authorities.strip():
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"PERDURE_GATEWAY_CA holds no certificates in PEM format: {error}") from None


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None


def _port(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"PERDURE_PORT is {text!r}; it may be 0 to 65535, or off")
    return int(text)


def _address(url: str) -> GatewayAddress:
    scheme, separator, rest = url.partition("://")
    authority = rest.rstrip("/")
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host, port = authority, "443" if scheme == "https" else "80"
    if not separator or scheme not in ("http", "https") or not host or "/" in authority or not port.isdecimal():
        raise ConfigError(f"PERDURE_GATEWAY_URLS has {url!r}; each must be http://host:port or https://host:port")
    return GatewayAddress(url=f"{scheme}://{authority}", host=host.strip("[]"), port=int(port), tls=scheme == "https")

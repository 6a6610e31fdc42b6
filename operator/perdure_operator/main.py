"""``perdure-operator ROLE``: gateway, migrate, wait-for-schema. One image, one program, a role each.

Roles import what they need: every new pod waits for ``wait-for-schema``, which needs no client of Kubernetes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import stamina
import uvloop

from perdure_operator.config import ConfigError, GatewayConfig, OperatorConfig, required, watch_namespaces
from perdure_operator.domain.errors import PerdureError, Unavailable
from perdure_operator.observability.logging import configure
from perdure_operator.store.errors import Untrusted
from perdure_operator.store.migrate import SchemaBehind, migrate, require_schema

USAGE = """usage: perdure-operator ROLE

roles:
  gateway          serves pods and people (PERDURE_DSN, PERDURE_LISTEN, PERDURE_METRICS_LISTEN, PERDURE_LEASE_SECONDS,
                   PERDURE_AUTH=kubernetes|local, PERDURE_TOKEN_AUDIENCE, PERDURE_TOKEN_SECRET_FILE,
                   PERDURE_TLS_CERT_FILE, PERDURE_TLS_KEY_FILE)
  operator         follows the resources of the cluster (PERDURE_DSN, PERDURE_SIDECAR_IMAGE, PERDURE_GATEWAY_URL, PERDURE_GATEWAY_CA_FILE,
                   PERDURE_INSTALLATION, PERDURE_WATCH_NAMESPACES, PERDURE_INLINE_TEMPLATES, PERDURE_METRICS_LISTEN, PERDURE_RESYNC_SECONDS,
                   PERDURE_SIDECAR_RESOURCES)
  release-finalizers
                   lets go of all AgentRuns and ends worker pods, when the operator is gone for good
                   (PERDURE_INSTALLATION, PERDURE_WATCH_NAMESPACES)
  migrate          brings the database to this version, as soon as it answers (PERDURE_DSN)
  wait-for-schema  ends when the database is at this version (PERDURE_DSN)
"""
DATABASE_PATIENCE_SECONDS = 300.0
"""A database that is installed together with Perdure needs its time."""


def _comes_up(error: Exception) -> bool:
    """Whether a database that does not answer may in a moment. A certificate that is wrong stays wrong, and somebody waits to be told."""
    return isinstance(error, Unavailable) and not isinstance(error, Untrusted)


async def _migrate() -> None:
    dsn = required(os.environ, "PERDURE_DSN")
    async for attempt in stamina.retry_context(_comes_up, attempts=None, timeout=DATABASE_PATIENCE_SECONDS, wait_max=2.0):
        with attempt:
            applied = await migrate(dsn)
            sys.stdout.write(f"applied: {', '.join(applied) or 'nothing, the schema is current'}\n")


async def _wait_for_schema() -> None:
    dsn = required(os.environ, "PERDURE_DSN")
    async for attempt in stamina.retry_context((Unavailable, SchemaBehind), attempts=None, timeout=None, wait_max=2.0):
        with attempt:
            await require_schema(dsn)
    sys.stdout.write("the schema is current\n")


def main() -> None:
    configure()
    # Until a role has its own way to end: the first process of a container is not ended by a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    role = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        if role == "gateway":
            from perdure_operator.wiring import run_gateway

            uvloop.run(run_gateway(GatewayConfig.from_env()))
        elif role == "migrate":
            asyncio.run(_migrate())
        elif role == "wait-for-schema":
            asyncio.run(_wait_for_schema())
        elif role == "operator":
            from perdure_operator.wiring import run_operator

            # Not uvloop: its watch runs in a thread with a loop of its own.
            asyncio.run(run_operator(OperatorConfig.from_env()))
        elif role == "release-finalizers":
            from perdure_operator.wiring import run_release

            asyncio.run(run_release(watch_namespaces(os.environ), required(os.environ, "PERDURE_INSTALLATION")))
        else:
            sys.exit(USAGE)
    except (ConfigError, PerdureError, OSError) as error:
        sys.exit(f"perdure-operator {role}: {error}")


if __name__ == "__main__":
    main()

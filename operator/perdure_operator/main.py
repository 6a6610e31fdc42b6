"""``perdure-operator ROLE``: gateway, migrate. One image, one program, a role each."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from perdure_operator.config import ConfigError, GatewayConfig, required
from perdure_operator.domain.errors import PerdureError
from perdure_operator.observability.logging import configure
from perdure_operator.store.migrate import migrate
from perdure_operator.wiring import run_gateway

USAGE = """usage: perdure-operator ROLE

roles:
  gateway   serves pods and people (PERDURE_DSN, PERDURE_LISTEN, PERDURE_TOKEN_SECRET_FILE, PERDURE_LEASE_SECONDS)
  migrate   brings the database to this version (PERDURE_DSN)
"""


async def _migrate() -> None:
    applied = await migrate(required(os.environ, "PERDURE_DSN"))
    sys.stdout.write(f"applied: {', '.join(applied) or 'nothing, the schema is current'}\n")


def main() -> None:
    configure()
    role = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        if role == "gateway":
            uvloop.run(run_gateway(GatewayConfig.from_env()))
        elif role == "migrate":
            asyncio.run(_migrate())
        else:
            sys.exit(USAGE)
    except (ConfigError, PerdureError, OSError) as error:
        sys.exit(f"perdure-operator {role}: {error}")


if __name__ == "__main__":
    main()

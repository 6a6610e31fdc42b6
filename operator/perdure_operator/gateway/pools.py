"""The pools as this gateway knows them: read from the store, at most a second old."""

from __future__ import annotations

from typing import NoReturn

import structlog
from pydantic import ValidationError

from perdure_operator.domain.idempotency import EffectClass, ToolPolicy, UnknownPolicy
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.services.polling import Poll
from perdure_operator.store.store import Store

log = structlog.get_logger(__name__)
REFRESH_SECONDS = 1.0


class Pools:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.specs: dict[str, AgentPoolSpec] = {}
        self._tools: dict[str, dict[str, ToolPolicy]] = {}

    async def refresh(self) -> None:
        specs: dict[str, AgentPoolSpec] = {}
        for name, spec in (await self._store.pools()).items():
            try:
                specs[name] = AgentPoolSpec.model_validate(spec, by_alias=True, by_name=False)
            except ValidationError as error:  # stored by a newer version; the pool keeps what we knew
                log.warning("a pool's spec is not understood", pool=name, error=str(error))
                if name in self.specs:
                    specs[name] = self.specs[name]
        self.specs = specs
        self._tools = {
            name: {
                tool.name: ToolPolicy(
                    EffectClass(tool.effect) if tool.effect else None,
                    tuple(tool.scope) if tool.scope is not None else None,
                    UnknownPolicy(tool.on_unknown) if tool.on_unknown else None,
                )
                for tool in spec.tools or []
            }
            for name, spec in specs.items()
        }

    def tool(self, pool: str, tool: str) -> ToolPolicy | None:
        return self._tools.get(pool, {}).get(tool)

    async def run(self) -> NoReturn:
        await Poll("pools could not be read", seconds=REFRESH_SECONDS, outage=REFRESH_SECONDS).run(self.refresh)

"""Agent pools: on a cluster the operator writes them from their resources; locally the same manifests come in here."""

from __future__ import annotations

import re

from aiohttp import web
from pydantic import ValidationError

from perdure_operator.domain.errors import InvalidInput
from perdure_operator.gateway.http import authorize, body, reply
from perdure_operator.gateway.pools import Pools
from perdure_operator.kube.api.problems import in_words
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec
from perdure_operator.store.store import Store

SHOWN = ("pool", "spec", "runnable", "idle", "starting", "leased", "trouble")
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")


class PoolRoutes:
    def __init__(self, store: Store, pools: Pools) -> None:
        self._store = store
        self._pools = pools

    def routes(self) -> list[web.RouteDef]:
        return [web.put("/v1/namespaces/{ns}/pools/{name}", self.put), web.get("/v1/namespaces/{ns}/pools", self.list)]

    async def put(self, request: web.Request) -> web.Response:
        await authorize(request, "pools")
        namespace, name = request.match_info["ns"], request.match_info["name"]
        if not _NAME.match(name) or not _NAME.match(namespace):
            raise InvalidInput("names have lower-case letters, digits, '-' and '.', with a letter or digit at both ends")
        _, content = await body(request, "the pool")
        if not isinstance(content, dict) or content.keys() != {"spec"}:
            raise InvalidInput('the body must be {"spec": …}')
        try:
            spec = AgentPoolSpec.model_validate(content["spec"], by_alias=True, by_name=False)
        except ValidationError as error:
            raise InvalidInput(in_words(error, AgentPoolSpec, under=("spec",))) from None
        stored = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        await self._store.upsert_pool(namespace, name, stored, spec.capacity.max_pods if spec.capacity else None)
        await self._pools.refresh()
        return reply({"namespace": namespace, "name": name, "spec": stored})

    async def list(self, request: web.Request) -> web.Response:
        await authorize(request, "list")
        namespace = request.match_info["ns"]
        demand = [d for d in await self._store.pool_demand() if namespace in ("-", d.pool.partition("/")[0])]
        return reply({"items": [{name: getattr(pool, name) for name in SHOWN} for pool in demand]})

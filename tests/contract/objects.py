"""Requests to an API server as our programs make them, and what it says when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kubernetes import client, config

GROUP, VERSION, NAMESPACE = "perdure.dev", "v1alpha1", "default"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"

Json = dict[str, Any]


class Refused(Exception):
    """The API server's message, whole."""


class Objects:
    """Perdure's resources in one namespace; ``resource`` is the plural. Every write asks for strict validation, as kubectl does."""

    def __init__(self, kubeconfig: Path) -> None:
        self._client = config.new_client_from_config(str(kubeconfig))

    def create(self, resource: str, body: Json, *, dry_run: bool = False, strict: bool = True) -> Json:
        query = {"fieldValidation": "Strict" if strict else "Ignore"} | ({"dryRun": "All"} if dry_run else {})
        return self._call("POST", resource, query=query, body=body)

    def merge(self, resource: str, name: str, patch: Json, *, subresource: str = "") -> Json:
        return self._call("PATCH", f"{resource}/{name}{subresource and '/' + subresource}", body=patch, content=MERGE)

    def apply_status(self, resource: str, name: str, status: Json, *, manager: str) -> Json:
        kind = self.get(resource, name)["kind"]
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "status": status}
        return self._call("PATCH", f"{resource}/{name}/status", query={"fieldManager": manager}, body=body, content=APPLY)

    def get(self, resource: str, name: str) -> Json:
        return self._call("GET", f"{resource}/{name}")

    def names(self, resource: str, *, fields: str) -> list[str]:
        found = self._call("GET", resource, query={"fieldSelector": fields})
        return sorted(item["metadata"]["name"] for item in found["items"])

    def table(self, resource: str) -> Json:
        return self._call("GET", resource, accept=TABLE)

    def delete(self, resource: str, name: str) -> None:
        self._call("DELETE", f"{resource}/{name}")

    def _call(
        self,
        verb: str,
        path: str,
        *,
        query: Json | None = None,
        body: Json | None = None,
        content: str = "application/json",
        accept: str = "",
    ) -> Json:
        headers = {"Content-Type": content, "Accept": accept or "application/json"}
        url = f"{self._client.configuration.host}/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{path}"
        try:
            found = self._client.request(verb, url, query_params=list((query or {}).items()), headers=headers, body=body)
        except client.ApiException as error:
            raise Refused(json.loads(error.body)["message"]) from None
        answer: Json = json.loads(found.data)
        return answer

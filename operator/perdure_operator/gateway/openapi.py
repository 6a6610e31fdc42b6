"""The OpenAPI description of the public API, from the models that the routes use."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from perdure import protocol as wire
from perdure_operator.gateway.views import RunView
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec, AgentRunSpec

_RUN = "/v1/namespaces/{namespace}/runs/{run}"
_TRIGGER = "/v1/namespaces/{namespace}/triggers/{trigger}"
# path, verb, summary, status of success, schema of the answer, schema of the body, query parameters
_ROUTES: list[tuple[str, str, str, str, str, str | None, tuple[str, ...]]] = [
    ("/v1/namespaces/{namespace}/runs", "post", "Create a run, or a batch of them", "201", "RunView", "Submission", ()),
    ("/v1/namespaces/{namespace}/runs", "get", "List runs", "200", "RunList", None, ("state", "pool", "parent", "limit", "after")),
    (_RUN, "get", "Read a run by name or id", "200", "RunView", None, ()),
    (_RUN + "/why", "get", "What the run waits for, or why it does not run", "200", "Why", None, ()),
    (_RUN + "/tree", "get", "The run and its descendants", "200", "Tree", None, ()),
    (_RUN + "/events", "get", "The event log", "200", "Page", None, ("from", "limit")),
    (_RUN + "/journal", "get", "Durable operations and their outcomes", "200", "Page", None, ("from", "limit")),
    (_RUN + "/ledger", "get", "Effects", "200", "Page", None, ("from", "limit")),
    (_RUN + "/tail", "get", "The event log, live, as server-sent events", "200", "EventStream", None, ("from",)),
    (_RUN + "/signals/{signal}", "post", "Send a signal; Idempotency-Key is its id", "202", "Signalled", "Any", ()),
    (_RUN + "/cancel", "post", "Cancel the run and its descendants", "202", "RunView", "Reason", ()),
    (_RUN + "/pause", "post", "Pause", "202", "RunView", "Reason", ()),
    (_RUN + "/resume", "post", "Resume", "202", "RunView", "Reason", ()),
    ("/v1/namespaces/{namespace}/pools/{name}", "put", "Create or change an agent pool", "200", "Any", "Pool", ()),
    ("/v1/namespaces/{namespace}/pools", "get", "List agent pools and what they hold", "200", "Page", None, ()),
    (_TRIGGER + "/emit", "post", "Fire a trigger; the body becomes the run's input", "202", "Emitted", "Any", ()),
    (_TRIGGER + "/deliveries", "get", "A trigger's firings and what became of them", "200", "Page", None, ("state", "before", "limit")),
    (_TRIGGER + "/deliveries/{id}/redrive", "post", "Try a dead delivery anew", "202", "Emitted", None, ()),
    ("/v1/hooks/{namespace}/{trigger}", "post", "A webhook, as its Trigger says: signed, or with its token", "202", "Emitted", "Any", ()),
]


def _headers(path: str, verb: str) -> list[tuple[str, str]]:
    if path.endswith("/tail"):
        return [("Last-Event-ID", "The last sequence that was seen: what came after it is sent")]
    if verb == "post" and path.endswith(("/runs", "/signals/{signal}", "/emit", "/v1/hooks/{namespace}/{trigger}")):
        return [("Idempotency-Key", "1 to 253 characters; again under the same key it changes nothing and gets the first answer")]
    return []


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


@cache
def openapi() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    _, models = msgspec.json.schema_components([RunView, wire.Problem], ref_template="#/components/schemas/{name}")
    schemas: dict[str, Any] = dict(models)
    for model in (AgentRunSpec, AgentPoolSpec):
        schema = model.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    one = {
        "type": "object",
        "required": ["spec"],
        "properties": {"name": {"type": "string"}, "labels": {"type": "object"}, "spec": _ref("AgentRunSpec")},
    }
    schemas |= {
        "Submission": {"oneOf": [one, {"type": "object", "required": ["runs"], "properties": {"runs": {"type": "array", "items": one}}}]},
        "RunList": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": _ref("RunView")}, "next": {"type": ["string", "null"]}},
        },
        "Tree": {"type": "object", "properties": {"run": _ref("RunView"), "descendants": {"type": "array", "items": _ref("RunView")}}},
        "Why": {"type": "object"},
        "Page": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"type": "object"}}, "next": {"type": ["integer", "null"]}},
        },
        "EventStream": {"description": "`id` is the sequence, `event` the kind, `data` the event as JSON; the last one is `end`."},
        "Signalled": {
            "type": "object",
            "properties": {"seq": {"type": "integer"}, "duplicate": {"type": "boolean"}, "id": {"type": "string"}},
        },
        "Emitted": {
            "type": "object",
            "properties": {"delivery": {"type": "string", "format": "uuid"}, "duplicate": {"type": "boolean"}},
        },
        "Reason": {"type": ["object", "null"], "properties": {"reason": {"type": "string"}}},
        "Pool": {"type": "object", "required": ["spec"], "properties": {"spec": _ref("AgentPoolSpec")}},
        "Any": {},
    }
    paths: dict[str, Any] = {}
    for path, verb, summary, status, answer, body, query in _ROUTES:
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        operation: dict[str, Any] = {
            "summary": summary,
            "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
            + [{"name": n, "in": "query", "schema": {"type": "string"}} for n in query]
            + [{"name": n, "in": "header", "description": what, "schema": {"type": "string"}} for n, what in _headers(path, verb)],
            "responses": {
                status: {
                    "description": summary,
                    "content": {"text/event-stream" if answer == "EventStream" else "application/json": {"schema": _ref(answer)}},
                },
                "default": {"description": "A problem", "content": {"application/problem+json": {"schema": _ref("Problem")}}},
            },
        }
        if body:
            operation["requestBody"] = {"content": {"application/json": {"schema": _ref(body)}}}
        paths.setdefault(path, {})[verb] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Perdure gateway", "version": "1", "description": "Runs of AI agents: create, read, signal, cancel."},
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
        "paths": paths,
    }

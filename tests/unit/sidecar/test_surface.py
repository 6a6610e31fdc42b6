"""What is told to the outside: problems, figures, the document, log lines; and how lightly the process starts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib import metadata
from typing import Any, get_args

import msgspec
import pytest

from perdure import protocol
from perdure.protocol import Answer, Operation, Problem, Refusal
from perdure.sidecar import VERSION
from perdure.sidecar.app import make_metrics, splice_tag
from perdure.sidecar.gateway_client import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, delay_seconds
from perdure.sidecar.heartbeat import pulse_seconds
from perdure.sidecar.log import JsonFormatter
from perdure.sidecar.openapi import ANSWERS, document
from perdure.sidecar.outbox import Pending
from perdure.sidecar.problems import KINDS, ProblemError, problem

HEAVY = {"aiohttp", "pydantic", "prometheus_client", "structlog", "yarl", "attr", "rfc8785"}


def test_the_start_imports_nothing_heavy() -> None:
    code = "import sys, perdure.sidecar.__main__; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & HEAVY
    assert "perdure" in loaded


@pytest.mark.parametrize(
    ("body", "spliced"),
    [
        (b"{}", b'{"op":"event"}'),
        (b"", b'{"op":"event"}'),
        (b' {\n "kind": "a" } \n', b'{"op":"event","kind": "a" }'),
        (b'{"kind":"a"}', b'{"op":"event","kind":"a"}'),
    ],
)
def test_the_tag_is_put_in_front_of_the_fields(body: bytes, spliced: bytes) -> None:
    assert splice_tag("event", body) == spliced
    assert json.loads(spliced)["op"] == "event"


@pytest.mark.parametrize("body", [b"[]", b"null", b"x", b"{", b'"{}"'])
def test_only_an_object_takes_a_tag(body: bytes) -> None:
    with pytest.raises(ProblemError, match="JSON object"):
        splice_tag("event", body)


def test_every_problem_has_a_stable_type_and_says_what_to_do() -> None:
    for code, kind in KINDS.items():
        made = problem(code, "why")
        assert made.type == f"urn:perdure:{code}"
        assert (made.status, made.detail) == (kind.status, "why")
        assert made.action.endswith(".")
        assert made.title


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


def test_the_document_is_whole() -> None:
    made = json.loads(msgspec.json.encode(document()))
    for reference in references(made):
        node = made
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    assert set(made["components"]["responses"]) == set(KINDS)
    assert ANSWERS.keys() == {cls.__struct_config__.tag for cls in get_args(Operation)} == protocol.OPERATION_PATHS.keys()
    for op, path in protocol.OPERATION_PATHS.items():
        operation = made["paths"][f"/v1/{path}"]["post"]
        assert operation["summary"]
        assert {"400", "401", "409", "410", "413", "503", "default"} <= operation["responses"].keys(), op


def test_the_documents_models_are_those_of_the_wire() -> None:
    schemas = document()["components"]["schemas"]
    step = schemas["StepEnd"]
    assert step["required"] == ["key", "name"]
    assert list(step["properties"]) == [field.encode_name for field in msgspec.structs.fields(protocol.StepEnd)]
    assert step["properties"]["key"] == {"type": "string", "minLength": 1, "maxLength": 1024}
    assert step["properties"]["output"] == {"default": None}
    assert step["additionalProperties"] is False
    assert schemas["WaitBegin"]["properties"]["on"]["items"] == {"$ref": "#/components/schemas/Condition"}
    assert ":class:" not in json.dumps(msgspec.to_builtins(schemas))


def pending(op: str, sent_at: float | None) -> Pending:
    made = Pending(1, "r", 1, "q", op, b"", lambda outcome: None)
    made.sent_at = sent_at
    return made


def test_the_figures_add_up() -> None:
    metrics = make_metrics()
    refusal = Refusal(id=1, problem=Problem(type="t", title="t", status=409, detail="", retryable=False, action=""))
    metrics.answered(pending("event", 1.0), Answer(id=1, body=b""), 1.003)
    metrics.answered(pending("event", 1.0), Answer(id=1, body=b""), 61.0)
    metrics.answered(pending("invented", None), refusal, 2.0)
    lines = metrics.exposition({"sessions": ("Open.", 2), "spool_damage_total": ("Bad.", 1)}).decode().splitlines()
    assert 'perdure_sidecar_operations_total{op="event",result="answered"} 2' in lines
    assert 'perdure_sidecar_operations_total{op="other",result="refused"} 1' in lines
    assert 'perdure_sidecar_operation_seconds_bucket{le="0.0025"} 0' in lines
    assert 'perdure_sidecar_operation_seconds_bucket{le="0.005"} 1' in lines
    assert 'perdure_sidecar_operation_seconds_bucket{le="+Inf"} 2' in lines
    assert "perdure_sidecar_operation_seconds_count 2" in lines
    assert "# TYPE perdure_sidecar_spool_damage_total counter" in lines
    assert "# TYPE perdure_sidecar_sessions gauge" in lines


def test_the_figures_are_read_by_the_client_library() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = make_metrics().exposition({"sessions": ("Open.", 2)}).decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["perdure_sidecar_operation_seconds"].type == "histogram"
    assert families["perdure_sidecar_sessions"].samples[0].value == 2


def test_the_wait_before_a_reconnect_doubles_up_to_its_longest() -> None:
    assert [delay_seconds(n, 1.0) for n in range(4)] == [FIRST_DELAY_SECONDS * 2**n for n in range(4)]
    assert delay_seconds(0, 0.0) == FIRST_DELAY_SECONDS / 2
    assert delay_seconds(10_000, 1.0) == LONGEST_DELAY_SECONDS


@pytest.mark.parametrize(("heartbeat", "stall", "seconds"), [(5, None, 5), (5, 60, 5), (5, 4, 1), (5, 0.001, 0.02)])
def test_the_pulse_is_fast_enough_to_see_a_stall(heartbeat: float, stall: float | None, seconds: float) -> None:
    assert pulse_seconds(heartbeat, stall) == seconds


def test_the_version_is_the_distributions() -> None:
    assert metadata.version("perdure") == VERSION


def test_a_log_line_is_an_object_with_what_it_was_given() -> None:
    record = logging.getLogger("perdure.x").makeRecord("perdure.x", logging.INFO, "f", 1, "it is %s", ("so",), None, extra={"run": "r"})
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["level"], line["logger"], line["run"]) == ("it is so", "info", "perdure.x", "r")
    assert line["at"].endswith("Z")

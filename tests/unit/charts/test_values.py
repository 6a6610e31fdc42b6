"""Values: a name that is not there is refused, in every place; a wrong one is refused with words; each has its comment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.harness.chart import CHART, OWN_POSTGRES, QUICKSTART, Refused, render

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Maps whose keys are the user's.
FREE = {"strings", "quantities", "kubernetes", "global", "valueFrom"}


def sections(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every object of the defaults that has names of ours."""
    yield path
    for key, inner in value.items():
        if isinstance(inner, dict) and inner and key not in ("requests", "limits"):
            yield from sections(inner, (*path, key))


def nested(path: tuple[str, ...], leaf: Any) -> Any:
    for key in reversed(path):
        leaf = {key: leaf}
    return leaf


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(base[key], over[key])
        for key in base.keys() & over.keys()
        if isinstance(base[key], dict) and isinstance(over[key], dict)
    }
    return {**base, **over, **both}


@pytest.mark.parametrize("path", list(sections(DEFAULTS)), ids=lambda path: ".".join(path) or "top")
def test_typos_are_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="'typo' not allowed"):
        render(merged(QUICKSTART, nested((*path, "typo"), True)))


def test_no_object_of_the_schema_is_open() -> None:
    def check(schema: Any, name: str) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object" and name not in FREE:
                assert schema.get("additionalProperties") is False, name
            for key, inner in schema.items():
                check(inner, key)

    check(SCHEMA, "")


def test_schema_and_defaults_have_the_same_names() -> None:
    def names(schema: dict[str, Any]) -> Any:
        while "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        properties = schema.get("properties", {})
        return {key: names(inner) for key, inner in properties.items()} if properties else None

    def given(value: Any, known: Any) -> Any:
        return {key: given(inner, (known or {}).get(key)) for key, inner in value.items()} if isinstance(value, dict) and known else None

    known = {key: inner for key, inner in names(SCHEMA).items() if key != "global"}
    assert given(DEFAULTS, known) == known


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    named = [at for at, line in enumerate(lines) if re.match(r" *[a-zA-Z]+:", line) and line.split()[0] not in ("requests:", "limits:")]
    assert [lines[at] for at in named if not lines[at - 1].lstrip().startswith("#")] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "Perdure needs Postgres"),
        ({**QUICKSTART, **OWN_POSTGRES}, "exclude each other"),
        ({**QUICKSTART, "postgres": {"caSecret": {"name": "ca"}}}, "speaks plain text"),
        ({**OWN_POSTGRES, "postgres": {"dsnSecret": {"name": "d"}, "sslMode": "verify"}}, "at '/postgres/sslMode'"),
        ({**QUICKSTART, "tls": {"mode": "Secret"}}, "set tls.secret.name"),
        ({**QUICKSTART, "tls": {"mode": "CertManager"}}, "issuerRef.name"),
        ({**QUICKSTART, "tls": {"caKey": ""}}, "set tls.caKey"),
        ({**QUICKSTART, "inlineTemplates": {"mode": "Listed"}}, "inlineTemplates.namespaces"),
        ({**QUICKSTART, "networkPolicy": {"workers": {"enabled": True}}}, "networkPolicy.workers.namespaces"),
        ({**QUICKSTART, "tls": {"mode": "selfsigned"}}, "at '/tls/mode'"),
        ({**QUICKSTART, "image": {"pullPolicy": "Sometimes"}}, "at '/image/pullPolicy'"),
        ({**QUICKSTART, "gateway": {"leaseSeconds": 0}}, "at '/gateway/leaseSeconds'"),
        ({**QUICKSTART, "gateway": {"url": "http://plain"}}, "at '/gateway/url'"),
        ({**QUICKSTART, "watchNamespaces": "team-a"}, "at '/watchNamespaces'"),
        ({**QUICKSTART, "watchNamespaces": ["Team A"]}, "at '/watchNamespaces/0'"),
        ({**QUICKSTART, "gateway": {"webhookSecrets": [{"namespace": "a", "names": []}]}}, "at '/gateway/webhookSecrets/0/names'"),
    ],
)
def test_what_cannot_work_is_refused_with_words(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        render(values)


def test_the_chart_can_be_part_of_another() -> None:
    """Helm adds ``global`` to the values of a chart's parts."""
    render({**QUICKSTART, "global": {"anything": 1}})

"""Triggers: what may be their source, and which cron expressions and time zones are understood."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import given
from hypothesis import strategies as st

from perdure_operator.kube.api.cron import CRON, MACROS, five_fields
from perdure_operator.kube.api.problems import InvalidManifest
from perdure_operator.kube.api.v1alpha1 import Trigger, parse_manifest

SECRET = {"name": "s", "key": "k"}
TEMPLATE = {"spec": {"agent": {"poolRef": {"name": "worker"}}}}


def trigger(**spec: Any) -> dict[str, Any]:
    full = {"source": {"manual": {}}, "runTemplate": TEMPLATE, **spec}
    return {"apiVersion": "perdure.dev/v1alpha1", "kind": "Trigger", "metadata": {"name": "a"}, "spec": full}


def problems(**spec: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(trigger(**spec))
    return [str(problem) for problem in caught.value.problems]


def cron(text: str, **more: Any) -> dict[str, Any]:
    return {"schedule": {"cron": text, **more}}


def test_a_full_trigger_survives_the_round_trip() -> None:
    spec = {
        "source": {"schedule": {"cron": "0 7 * * 1-5", "timeZone": "Europe/Berlin"}},
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 600,
        "catchUp": {"policy": "Latest", "limit": 5},
        "route": {"newRun": {}},
        "retry": {"maxAttempts": 5, "backoffSeconds": 2},
        "suspend": False,
        "successfulRunsHistoryLimit": 3,
        "failedRunsHistoryLimit": 5,
        "recording": "Resource",
        "runTemplate": {"metadata": {"labels": {"team": "a"}}, **TEMPLATE},
    }
    found = parse_manifest(trigger(**spec))
    assert isinstance(found, Trigger)
    assert found.spec.to_json() == spec


@pytest.mark.parametrize(
    "source",
    [
        {"interval": {"seconds": 900}},
        {"at": "2026-12-24T18:00:00Z"},
        {"at": "2026-12-24T18:00:00.5+01:00"},
        {"manual": {}},
        {"webhook": {"auth": {"hmac": {"secretRef": SECRET, "header": "X-Signature"}}, "idHeader": "X-Delivery"}},
        {"webhook": {"auth": {"bearer": {"secretRef": SECRET}}}},
    ],
)
def test_each_source_is_read_as_it_is_written(source: dict[str, Any]) -> None:
    found = parse_manifest(trigger(source=source))
    assert isinstance(found, Trigger)
    assert found.spec.source.to_json() == source


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": {}}, "spec.source: set exactly one of schedule, interval, at, webhook, manual"),
        ({"source": {"manual": {}, "at": "2026-12-24T18:00:00Z"}}, "spec.source: set exactly one of"),
        ({"source": {"event": {}}}, "spec.source.event: unknown field"),
        ({"source": {"webhook": {"auth": {}}}}, "spec.source.webhook.auth: set exactly one of hmac, bearer"),
        ({"source": {"webhook": {}}}, "spec.source.webhook.auth: is required"),
        ({"source": {"at": "2026-12-24T18:00:00"}}, "spec.source.at: "),
        ({"source": {"at": "2026-02-30T18:00:00Z"}}, "is no point in time"),
        ({"source": {"interval": {"seconds": 0}}}, "must be at least 1"),
        ({"source": cron("* * * * * *")}, "is not five fields (minute, hour, day of month, month, day of week)"),
        ({"source": cron("60 * * * *")}, "is not five fields"),
        ({"source": cron("@reboot")}, "nor one of @yearly"),
        ({"source": cron("0 0 30 2 *")}, "never comes"),
        ({"source": cron("0 0 * * 5-1")}, "never comes"),
        (
            {"source": cron("0 0 * * *", timeZone="Europe/Nowhere")},
            "spec.source.schedule.timeZone: is not a time zone of the IANA database",
        ),
        ({"source": cron("0 0 * * *", timeZone="Local")}, "is not a time zone"),
        ({"source": cron("0 0 * * *", timeZone="../etc/localtime")}, "spec.source.schedule.timeZone"),
        ({"concurrencyPolicy": "Replace"}, "must be 'Allow' or 'Forbid', got \"Replace\""),
        ({"route": {"address": "x"}}, "spec.route.address: unknown field"),
        ({"filter": {"cel": "true"}}, "spec.filter: unknown field"),
        ({"runTemplate": {"spec": {**TEMPLATE["spec"], "idempotencyKey": "x"}}}, "runs of a trigger get their idempotencyKey"),
        ({"runTemplate": {"metadata": {"labels": {"perdure.dev/run-id": "x"}}, **TEMPLATE}}, "reserved"),
        ({"runTemplate": {"metadata": {"name": "x"}, **TEMPLATE}}, "spec.runTemplate.metadata.name: unknown field"),
    ],
)
def test_mistakes_in_a_trigger_are_explained(spec: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems(**spec)), problems(**spec)


@pytest.mark.parametrize("macro", MACROS)
def test_macros_stand_for_five_fields(macro: str) -> None:
    assert five_fields(macro.upper()) == MACROS[macro]


@pytest.mark.parametrize(
    "expression",
    ["* * * * *", "*/5 0-6,22 * * mon-fri", "0 7 L * *", "0 7 LW * *", "0 7 * * 5L", "0 7 * JAN,Jul 1#2", "5/15 * * * 7", "00 07 01 01 *"],
)
def test_what_cron_knows_is_understood(expression: str) -> None:
    assert five_fields(expression) == expression


def test_at_the_end_of_summer_time_an_hour_is_not_run_twice() -> None:
    """Debian's cron: a job at a fixed hour runs once on the day whose hour comes twice."""
    start = datetime(2026, 10, 24, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    ticks = CronSim(five_fields("30 2 * * *"), start)
    first, second = next(ticks), next(ticks)
    assert second.astimezone(UTC) - first.astimezone(UTC) == timedelta(hours=25)


_ITEMS = st.from_regex(r"(\*|[0-9]{1,2}(-[0-9]{1,2})?|L|LW|MON|JUN|[0-7]L|[0-7]#[0-9])(/[0-9]{1,2})?", fullmatch=True)
_FIELDS = st.lists(_ITEMS, min_size=1, max_size=3).map(",".join)


@given(st.lists(_FIELDS, min_size=4, max_size=6).map(" ".join))
def test_the_pattern_lets_through_all_that_cron_takes_and_no_other_form(expression: str) -> None:
    """The API server has only the pattern; the models ask cronsim too. It would take a step on L, which means nothing."""
    try:
        CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC))
        taken = len(expression.split()) == 5 and "L/" not in expression and "LW/" not in expression
    except (CronSimError, AssertionError):
        taken = False
    matches = CRON.holds(expression)
    assert matches or not taken
    assert not matches or len(expression.split()) == 5

"""Alerts ask for metrics that exist."""

from __future__ import annotations

import re

from prometheus_client import REGISTRY
from tests.harness.chart import MATRIX, RELEASE, render

import perdure_operator.kube.metrics as of_the_client
import perdure_operator.observability.metrics as ours


def exported() -> set[str]:
    assert ours.COMMIT_SECONDS
    assert of_the_client.WATCH_AGE
    return {sample.name for metric in REGISTRY.collect() for sample in metric.samples} | {
        f"{metric.name}{suffix}" for metric in REGISTRY.collect() for suffix in ("_total", "_bucket") if metric.name.startswith("perdure_")
    }


def test_every_metric_in_an_alert_exists() -> None:
    [rule] = render(MATRIX["everything"]).of("PrometheusRule")
    alerts = rule["spec"]["groups"][0]["rules"]
    used = {name for alert in alerts for name in re.findall(r"\bperdure_\w+", alert["expr"] + alert["annotations"]["description"])}
    assert used
    assert {name for name in used if name not in exported() and f"{name}_bucket" not in exported()} == set()


def test_alerts_have_what_a_person_needs_at_night() -> None:
    [rule] = render(MATRIX["everything"]).of("PrometheusRule")
    for alert in rule["spec"]["groups"][0]["rules"]:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["annotations"]["description"].endswith(".")
        assert "perdure-system" in alert["expr"], "alerts of one release are not another's"


def test_the_monitor_selects_both_components() -> None:
    rendered = render(MATRIX["everything"])
    [monitor] = rendered.of("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = [each for each in rendered.of("Service") if wanted <= each["metadata"]["labels"].items()]
    assert {each["metadata"]["name"] for each in found} == {f"{RELEASE}-operator-metrics", f"{RELEASE}-gateway-metrics"}
    assert all(port["name"] == monitor["spec"]["endpoints"][0]["port"] for each in found for port in each["spec"]["ports"])

"""The status of a run stays under 8 KB whatever the run does."""

from __future__ import annotations

import pytest
from tests.unit.kube.statuses import longest_status, size

from perdure_operator.kube.api.status import MAX_RESULT_BYTES, MAX_STATUS_BYTES, AgentRunStatus, fitted


@pytest.mark.parametrize("text", ["x", "ß", "漢", "🚀", "\x01", '"'])
def test_the_longest_status_fits_and_still_is_one(text: str) -> None:
    cut = fitted(longest_status(text))
    assert size(cut) <= MAX_STATUS_BYTES
    assert AgentRunStatus.model_validate(cut, by_alias=True, by_name=False).to_json() == cut


def test_what_programs_compare_is_not_cut() -> None:
    full = longest_status("x")
    cut = fitted(full)
    for name in ("runID", "revision", "podName", "parentRef", "result", "usage", "lastSequence"):
        assert cut[name] == full[name]
    assert [c["type"] for c in cut["conditions"]] == ["Succeeded", "Suspended", "PodScheduled", "Finished"]
    assert [q["id"] for q in cut["questions"]] == [q["id"] for q in full["questions"][: len(cut["questions"])]]


def test_a_status_that_fits_is_left_alone() -> None:
    small = {"phase": "Running", "podName": None, "progress": {"done": 3, "current": "render"}}
    assert fitted(small) is small


def test_a_little_too_long_costs_a_little() -> None:
    long = {"waitReason": "x" * 253, "questions": [{"id": str(n), "text": "x" * 1024} for n in range(8)]}
    assert fitted(long)["questions"] == [{"id": str(n), "text": entry["text"]} for n, entry in enumerate(fitted(long)["questions"])]
    assert len(fitted(long)["questions"]) == 8
    assert fitted(long)["waitReason"] == "x" * 253


def test_a_larger_result_is_refused() -> None:
    with pytest.raises(ValueError, match="use resultRef"):
        AgentRunStatus.model_validate({"result": "r" * MAX_RESULT_BYTES})

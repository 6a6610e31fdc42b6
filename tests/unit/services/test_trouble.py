"""What is made of the API server's words when a quota lets no pod in."""

from __future__ import annotations

import pytest

from perdure_operator.services.trouble import quota_in_words

WANTED = "limits.cpu for: agent,helper; limits.memory for: agent"
OF_OURS = "and those of perdure-sidecar in spec.sidecar.resources"
REQUEST = "create /api/v1/namespaces/team-a/pods: 403 Forbidden: "


@pytest.mark.parametrize(
    ("said", "reason", "message"),
    [
        (
            f'pods "p-1" is forbidden: failed quota: compute: must specify {WANTED}',
            "QuotaNeedsResources",
            f"quota compute wants every container to say {WANTED}: set resources in the pool's template, {OF_OURS}",
        ),
        (
            'pods "p-1" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=2, limited: pods=2',
            "QuotaExceeded",
            "exceeded quota: pods, requested: pods=1, used: pods=2, limited: pods=2",
        ),
        ("status unknown for quota: pods", "QuotaExceeded", REQUEST + "status unknown for quota: pods"),
    ],
)
def test_a_quota_is_told_with_what_to_do(said: str, reason: str, message: str) -> None:
    assert quota_in_words(REQUEST + said) == (reason, message)

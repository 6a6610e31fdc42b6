"""Metrics of everything that talks to the apiserver. Labels are bounded: no namespaces, no names."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("perdure_kube_requests_total", "Requests to the apiserver", ["verb", "resource", "code"])
QUEUE_DEPTH = Gauge("perdure_workqueue_depth", "Keys waiting to be worked on", ["queue"])
QUEUE_WAIT = Histogram(
    "perdure_workqueue_wait_seconds", "From the first addition of a key until work on it begins", ["queue"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)  # fmt: skip
QUEUE_WORK = Histogram(
    "perdure_workqueue_work_seconds", "One round of work on a key", ["queue"], buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60)
)
QUEUE_ERRORS = Counter("perdure_workqueue_errors_total", "Rounds that failed; the key comes again", ["queue", "code"])
WATCH_AGE = Gauge("perdure_watch_age_seconds", "Since the last event of any watch; grows while watches are silent")

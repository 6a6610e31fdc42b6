"""All metrics of the gateway, in one place. Labels are bounded: no run, pod or tenant names."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

COMMIT_SECONDS = Histogram("perdure_commit_seconds", "One batch: call, commit, answer", buckets=_FAST)
BATCH_SIZE = Histogram("perdure_batch_operations", "Operations in one commit", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256))
BATCH_REPLAYS = Counter("perdure_batch_replays_total", "Batches that were aborted and run one by one")
SLOW_LANE = Counter("perdure_slow_lane_total", "Operations that had to wait for a run's lock")
LEASES = Counter("perdure_leases_total", "Leases granted", ["path"])  # direct | dispatch | redelivered
LEASE_LOSSES = Counter("perdure_lease_losses_total", "Leases that ended without a word from the worker", ["reason"])
WAKE_LATENESS = Histogram("perdure_timer_lateness_seconds", "Timer due until the commit that wakes", buckets=_FAST)
MISSED_WAKES = Counter("perdure_missed_wakes_total", "Runs that only the sweep woke; each is a bug")
REAPER_HOLDS = Counter("perdure_reaper_holds_total", "Times that the reaper expired nothing although leases were silent", ["why"])
PODS = Gauge("perdure_connected_pods", "Pods connected to this gateway", ["state"])
OPERATIONS = Counter("perdure_operations_total", "Operations answered", ["kind", "code"])
UNKNOWN_EFFECTS = Counter("perdure_unknown_effects_total", "Effects that became UNKNOWN")
DELIVERIES = Counter("perdure_deliveries_total", "Deliveries of triggers that were decided", ["source", "outcome"])
FIRING_LATENESS = Histogram("perdure_firing_lateness_seconds", "Firing due until its run was made", ["source"], buckets=_FAST)
REVIEWS = Counter("perdure_reviews_total", "Questions of who and what (token, access): yes, no, failed, kept", ["kind", "result"])

# The operator's.
LEADING = Gauge("perdure_operator_leading", "1 in the replica that leads")
PODS_CREATED = Counter("perdure_pods_created_total", "Worker pods created", ["namespace"])
POD_ENDINGS = Counter("perdure_pod_endings_total", "Worker pods that ended, by what the kubelet said", ["reason"])
RESYNC_HOLDS = Counter("perdure_resync_holds_total", "Times that unusually many resources were missing and no run was cancelled")

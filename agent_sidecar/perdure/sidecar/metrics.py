"""The few figures of one pod, in the Prometheus text format; written by hand, for the client library costs this process 4 MiB."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from perdure.protocol import Answer
from perdure.sidecar.outbox import Outcome, Pending

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_OTHER_OP: Final = "other"


class Metrics:
    """``known_ops`` bounds the label: a tag that an agent made up counts as ``other``."""

    def __init__(self, known_ops: Iterable[str]) -> None:
        self._counts = {(op, result): 0 for op in (*known_ops, _OTHER_OP) for result in ("answered", "refused")}
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._started = time.time()
        self.resent = 0

    def answered(self, pending: Pending, outcome: Outcome, now: float) -> None:
        result = "answered" if isinstance(outcome, Answer) else "refused"
        key = (pending.op, result)
        self._counts[key if key in self._counts else (_OTHER_OP, result)] += 1
        if pending.sent_at is not None:
            seconds = now - pending.sent_at
            self._seconds += seconds
            self._buckets[bisect_left(BUCKETS, seconds)] += 1

    def exposition(self, gauges: dict[str, tuple[str, float]]) -> bytes:
        """``gauges``: what the pod is now, name (without prefix) -> (help, value); a name that ends in ``_total`` is a counter."""
        lines = _family("operations_total", "counter", "Operations that the gateway has answered.")
        lines += [
            f'perdure_sidecar_operations_total{{op="{op}",result="{result}"}} {count}'
            for (op, result), count in self._counts.items()
            if count
        ]
        lines += _family("operation_seconds", "histogram", "From the first sending of an operation to its answer.")
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'perdure_sidecar_operation_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"perdure_sidecar_operation_seconds_sum {self._seconds!r}", f"perdure_sidecar_operation_seconds_count {total}"]
        own = {"resent_total": ("Operations sent again after a reconnect.", float(self.resent))}
        for name, (text, value) in {**own, **gauges}.items():
            lines += [*_family(name, "counter" if name.endswith("_total") else "gauge", text), f"perdure_sidecar_{name} {value!r}"]
        lines += [
            "# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {resident_bytes()}",
            "# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self._started!r}",
        ]  # fmt: skip
        return ("\n".join(lines) + "\n").encode()


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP perdure_sidecar_{name} {text}", f"# TYPE perdure_sidecar_{name} {kind}"]


def resident_bytes() -> int:
    """0 where /proc is not."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0

"""``python -m bench.cluster``: what a run costs on a real cluster, against a bare pod of the same shape in the same run.

Starts the cluster of the end-to-end tests and installs Perdure, unless one of this checkout runs. ``--times``: of everything (10).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tests.cluster import base_image, binaries
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.e2e.installation import Installation

from bench.cluster.lives import BARE, Lives
from bench.samples import percentile

RESULTS = Path(__file__).parents[1] / "results"
AIMS = {"cold wake": ("bare start", 1.25), "wait reached → pod gone": ("bare stop", 1.3)}
"""Not more than so many times the bare pod's."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    times = parser.parse_args(arguments).times
    cluster = Cluster()
    if mine := not cluster.is_running():
        binaries.build()
        base_image.build()
        cluster.start()
    try:
        perdure = Installation(cluster)
        perdure.build_images()
        perdure.install()
        found, writes = measure(perdure, times)
    finally:
        if mine:
            cluster.stop()
    console = Console()
    show(console, found, writes)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"cluster-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    file.write_text(json.dumps({"milliseconds": found, "writes": writes}, indent=1) + "\n")
    console.print(f"figures: {file}")


def measure(perdure: Installation, times: int) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Milliseconds of each kind, and API writes by who and what of each kind of life."""
    lives = Lives(perdure, AuditLog(Path(perdure.cluster.audit_log)))
    lives.prepare()
    found: dict[str, list[float]] = {}
    for _ in range(times):
        # In turns: whatever else the machine does meanwhile, all have their share of it.
        for sample in (lives.bare(), lives.cold(), lives.warm("warm"), lives.warm("fork")):
            for name, seconds in sample.items():
                found.setdefault(name, []).append(seconds * 1000)
    return found, {name: dict(counts) for name, counts in lives.writes().items()}


def show(console: Console, found: dict[str, list[float]], writes: dict[str, dict[str, int]]) -> None:
    table = Table("milliseconds", "p50", "p95", "most", "× bare pod", "aim", title=f"A run on a cluster; bare pod: {BARE}")
    for name, values in found.items():
        against = "bare stop" if "gone" in name else "bare start"
        aim = AIMS.get(name)
        row = (median(values), percentile(values, 0.95), max(values))
        factor = median(values) / median(found[against])
        verdict = "" if aim is None else f"≤ {aim[1]}: {'reached' if factor <= aim[1] else 'NOT reached'}"
        table.add_row(name, *(f"{value:,.0f}" for value in row), f"{factor:.2f}" if "bare" not in name else "", verdict)
    console.print(table)
    table = Table("API writes of Perdure", *writes, title="From the audit log")
    total: dict[str, Counter[str]] = {name: Counter(counts) for name, counts in writes.items()}
    for what in sorted({what for counts in total.values() for what in counts}):
        table.add_row(what, *(str(counts[what] or "") for counts in total.values()))
    table.add_row("all", *(str(sum(counts.values())) for counts in total.values()))
    console.print(table)


if __name__ == "__main__":
    main()

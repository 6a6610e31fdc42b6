"""The results as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.aims import Verdict
from bench.meter import DRIVER
from bench.samples import Series, ratio

DRIVER_BOUND = 0.85
"""Cores of one from which on the driver, a single thread, may be what limits."""
DISTURBED = 0.15
"""Share of the machine that went to strangers from which on only ratios mean something."""

LEGEND = f"""Rates and ratios are medians over the rounds, latencies are over all rounds.
CPU µs: of one operation, in each part but the driver.
driver: cores that the benchmark itself used, one at most; marked from {DRIVER_BOUND}: then it may be what limits.
others: share of the machine that strangers had in the worst round; marked from {DISTURBED}: then trust the ratios only."""


def _against(series: Series, found: Mapping[str, Series], name: str) -> str:
    other = found.get(name)
    return f"{ratio(series, other, 'rate'):.2f}×" if other is not None and other.samples and other is not series else ""


def _baselines(name: str) -> tuple[str, str]:
    """Bare commits and DBOS at the same concurrency: 1, or 64 for everything else."""
    clients = "1" if name.endswith("-1") else "64"
    return f"commit-{clients}", f"dbos-{clients}"


def _is_steps(name: str) -> bool:
    return name.startswith(("commit-", "store-", "dbos-", "pod-", "sdk-"))


def show(console: Console, found: Mapping[str, Series], verdicts: Sequence[Verdict]) -> None:
    steps = Table("", "a second", "p50 ms", "p99 ms", "× commit", "× DBOS", "CPU µs", "driver", "others", title="Steps")
    wakes = Table("", "count", "p50 ms", "p99 ms", "driver", "others", title="Wakes")
    for table in (steps, wakes):
        for column in table.columns[1:]:
            column.justify = "right"
    for name, series in found.items():
        if not series.samples:
            continue
        p50, p99 = (f"{series.latency(share) * 1e3:,.2f}" for share in (0.5, 0.99))
        driver, others = _share(series.share(DRIVER), DRIVER_BOUND), _share(series.others, DISTURBED)
        if _is_steps(name):
            commit, dbos = _baselines(name)
            steps.add_row(
                name, f"{series.median('rate'):,.0f}", p50, p99, _against(series, found, commit), _against(series, found, dbos),
                _cpu(series), driver, others,
            )  # fmt: skip
        else:
            wakes.add_row(name, str(sum(sample.count for sample in series.samples)), p50, p99, driver, others)
    for table in (steps, wakes):
        if table.row_count:
            console.print(table)
    if verdicts:
        aims = Table("", "measured", "aim", "", title="Aims")
        for verdict in verdicts:
            aim = verdict.aim
            mark = "[green]reached[/]" if verdict.reached else "[red]not reached[/]"
            aims.add_row(aim.what, aim.shape.format(verdict.value), f"{aim.direction} {aim.shape.format(aim.bound)}", mark)
        console.print(aims)
    console.print(LEGEND, style="dim")


def _share(value: float, limit: float) -> str:
    return f"[yellow]{value:.2f}![/]" if value >= limit else f"{value:.2f}"


def _cpu(series: Series) -> str:
    parts = [part for part in series.samples[0].usage.parts if part != DRIVER]
    return " + ".join(f"{series.micros(part):,.0f}" for part in sorted(parts))


def write(
    folder: Path, machine: Mapping[str, Any], options: Mapping[str, Any], found: Mapping[str, Series], verdicts: Sequence[Verdict]
) -> Path:
    """One file a run of the benchmark, named by its time."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{now:%Y%m%dT%H%M%SZ}.json"
    content = {
        "at": now.isoformat(timespec="seconds"),
        "machine": machine,
        "options": options,
        "variants": {
            name: {
                "median": {
                    "rate": round(series.median("rate"), 1),
                    "p50Ms": round(series.latency(0.5) * 1e3, 3),
                    "p99Ms": round(series.latency(0.99) * 1e3, 3),
                },
                "rounds": [sample.as_json() for sample in series.samples],
            }
            for name, series in found.items()
            if series.samples
        },
        "aims": [verdict.as_json() for verdict in verdicts],
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file

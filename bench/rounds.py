"""The turns: in every round each variant is sampled once, in the same order; first those that need only Postgres, then those at the
gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.samples import Series
from bench.stage import Stage
from bench.variants.variant import AtGateway, AtPostgres, Variant

Told = Callable[[str], None]


async def run(stage: Stage, variants: Sequence[Variant], *, rounds: int, seconds: float, tell: Told) -> dict[str, Series]:
    """``seconds`` is the length of each window. A variant that cannot be prepared or sampled ends the benchmark with its error."""
    series = {variant.name: Series(variant.name) for variant in variants}
    alone = [variant for variant in variants if isinstance(variant, AtPostgres)]
    served = [variant for variant in variants if isinstance(variant, AtGateway)]
    try:
        for variant in variants:
            await variant.prepare(stage)
        if served:
            await stage.database("perdure")
        for number in range(1, rounds + 1):
            for first in alone:
                series[first.name].samples.append(await first.sample(stage, seconds))
                tell(_line(number, series[first.name], first.what))
            if served:
                async with stage.gateway("perdure") as gateway:
                    for second in served:
                        series[second.name].samples.append(await second.sample(stage, gateway, seconds))
                        tell(_line(number, series[second.name], second.what))
    finally:
        for variant in variants:
            await variant.close()
    return series


def _line(number: int, series: Series, what: str) -> str:
    sample = series.samples[-1]
    p50, p99 = sample.p50 * 1e3, sample.p99 * 1e3
    return f"round {number}: {series.name:<12} {sample.rate:9,.0f}/s  p50 {p50:8.2f} ms  p99 {p99:8.2f} ms  {what}"

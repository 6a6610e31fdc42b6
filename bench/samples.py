"""What one measurement gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie (nearest rank); nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


@dataclass(frozen=True)
class Usage:
    """CPU seconds that each part used during a measurement of ``seconds``, on ``cores`` cores.

    ``others``: share of the machine (0 to 1) that went to processes which are no part of it, and to other guests of its host (steal).
    """

    seconds: float
    cores: int
    parts: dict[str, float]
    others: float

    def share(self, part: str) -> float:
        """Cores that a part used on average."""
        return self.parts.get(part, 0.0) / self.seconds


@dataclass(frozen=True)
class Sample:
    """``count`` operations in ``usage.seconds``; ``latencies`` in seconds."""

    count: int
    latencies: Sequence[float]
    usage: Usage
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.count / self.usage.seconds

    @property
    def p50(self) -> float:
        return percentile(self.latencies, 0.5)

    @property
    def p99(self) -> float:
        return percentile(self.latencies, 0.99)

    def micros(self, part: str) -> float:
        """CPU of a part, in microseconds an operation: much steadier than the rate on a machine that is shared."""
        return self.usage.parts.get(part, 0.0) / max(1, self.count) * 1e6

    def as_json(self) -> dict[str, object]:
        return {
            "count": self.count,
            "seconds": round(self.usage.seconds, 3),
            "rate": round(self.rate, 1),
            "p50Ms": round(self.p50 * 1e3, 3),
            "p99Ms": round(self.p99 * 1e3, 3),
            "cpuSeconds": {part: round(value, 3) for part, value in self.usage.parts.items()},
            "cpuMicrosPerOperation": {part: round(self.micros(part), 1) for part in self.usage.parts},
            "othersShare": round(self.usage.others, 3),
            **self.extra,
        }


@dataclass
class Series:
    """All samples of one variant, one a round."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def of(self, what: str) -> list[float]:
        return [float(getattr(sample, what)) for sample in self.samples]

    def median(self, what: str) -> float:
        return median(self.of(what))

    def latency(self, share: float) -> float:
        """Seconds; over the operations of all rounds together."""
        return percentile([latency for sample in self.samples for latency in sample.latencies], share)

    def micros(self, part: str) -> float:
        """Median over the rounds of a part's CPU, microseconds an operation."""
        return median(sample.micros(part) for sample in self.samples)

    def share(self, part: str) -> float:
        """Median of the cores that a part used."""
        return median(sample.usage.share(part) for sample in self.samples)

    @property
    def others(self) -> float:
        return max(sample.usage.others for sample in self.samples)


def ratio(over: Series, under: Series, what: str) -> float:
    """Median of the ratios round by round: both sides of each were measured in the same minute."""
    return median(a / b for a, b in zip(over.of(what), under.of(what), strict=False))

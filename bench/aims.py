"""What the figures should be, and whether they are. An aim that compares two variants is judged by the ratio of the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bench.samples import Series, ratio

Found = Mapping[str, Series]


@dataclass(frozen=True)
class Aim:
    """``value`` of the series named in ``needs``, in that order; ``shape`` is how it is printed."""

    what: str
    needs: tuple[str, ...]
    value: Callable[..., float]
    bound: float
    direction: Literal["at least", "at most"] = "at least"
    shape: str = "{:.1f}×"


@dataclass(frozen=True)
class Verdict:
    aim: Aim
    value: float

    @property
    def reached(self) -> bool:
        return self.value >= self.aim.bound if self.aim.direction == "at least" else self.value <= self.aim.bound

    def as_json(self) -> dict[str, object]:
        return {"what": self.aim.what, "value": round(self.value, 4), self.aim.direction: self.aim.bound, "reached": self.reached}


def _rates(over: Series, under: Series) -> float:
    return ratio(over, under, "rate")


def _times(over: Series, under: Series) -> float:
    return ratio(over, under, "p50")


def _late(series: Series) -> float:
    return series.latency(0.99) * 1e3


def _usual(series: Series) -> float:
    return series.latency(0.5) * 1e3


def _later(full: Series, empty: Series) -> float:
    return full.latency(0.99) / empty.latency(0.99)


def _extra(name: str) -> Callable[[Series], float]:
    return lambda series: max(sample.extra[name] for sample in series.samples)


def aims(sleeping: int) -> tuple[Aim, ...]:
    """``sleeping``: size of the full store of the timer variants."""
    ms = "{:.1f} ms"
    return (
        Aim("a step alone at the pod API against a DBOS step alone", ("pod-1", "dbos-1"), _rates, 1.0),
        Aim("time of a step through SDK and sidecar against the pod API, alone", ("sdk-1", "pod-1"), _times, 1.5, "at most", "{:.2f}×"),
        Aim("steps a second at the pod API, 64 runs", ("pod-64",), lambda pod: pod.median("rate"), 10_000, shape="{:,.0f}/s"),
        Aim("steps a second at the pod API against DBOS, 64 at once", ("pod-64", "dbos-64"), _rates, 25.0),
        Aim("steps a second through SDK and sidecar against DBOS, 64 at once", ("sdk-64", "dbos-64"), _rates, 5.0),
        Aim("memory of the gateway with 1,000 pods", ("connect-1000",), _extra("gatewayMiB"), 300, "at most", "{:.0f} MiB"),
        Aim("memory of a sidecar", ("sdk-64",), _extra("sidecarMiB"), 40, "at most", "{:.0f} MiB"),
        Aim("signal sent → lease at a warm pod, p50", ("wake-1",), _usual, 10.0, "at most", ms),
        Aim("signal sent → lease at a warm pod, p99", ("wake-1",), _late, 60.0, "at most", ms),
        Aim("64 signals at once → leases at warm pods, p99", ("wake-64",), _late, 60.0, "at most", ms),
        Aim("signal sent → agent code, warm pod, p50", ("agent-wake-1",), _usual, 10.0, "at most", ms),
        Aim("signal sent → agent code, warm pod, p99", ("agent-wake-1",), _late, 60.0, "at most", ms),
        Aim("signal sent → agent code, fork per run, p50", ("fork-wake-1",), _usual, 10.0, "at most", ms),
        Aim("signal sent → agent code, fork per run, p99", ("fork-wake-1",), _late, 60.0, "at most", ms),
        Aim(f"timer due → lease, {sleeping:,} runs sleeping, p99", (f"timer-{sleeping}",), _late, 150.0, "at most", ms),
        Aim(
            f"timer lateness p99, {sleeping:,} runs sleeping against none",
            (f"timer-{sleeping}", "timer-0"),
            _later,
            1.5,
            "at most",
            "{:.2f}×",
        ),
    )


def judged(found: Found, sleeping: int) -> Iterator[Verdict]:
    """The aims whose variants were all measured."""
    for aim in aims(sleeping):
        if all(name in found and found[name].samples for name in aim.needs):
            yield Verdict(aim, aim.value(*(found[name] for name in aim.needs)))

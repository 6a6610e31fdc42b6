"""Run agents in memory, with a clock that moves by itself or by hand, kill them at every commit point, and see what they did.

``Simulation`` keeps the record that a gateway would keep, and speaks the protocol with the real SDK: everything but the network is as in
production. Tests that use it are plain functions, not coroutines, because a simulation runs event loops of its own.

    def test_report() -> None:
        sim = Simulation(weekly_report, {"urls": [...]}, agents={"fact-checker": check_facts})
        sim.signal("approve", {"by": "ann"}, after=days(2))
        assert sim.run().result == {...}

    def test_report_survives() -> None:
        kill_everywhere(lambda: Simulation(weekly_report, {...}, ...).signal("approve", after=60))
"""

from __future__ import annotations

from perdure.testing.clock import Clock
from perdure.testing.kills import Report, kill_everywhere
from perdure.testing.provider import Provider
from perdure.testing.simulation import Commit, Simulation, Stuck

__all__ = ["Clock", "Commit", "Provider", "Report", "Simulation", "Stuck", "kill_everywhere"]

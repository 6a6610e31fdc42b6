"""What one run of the soak is told to do: its input. Its agent does it, and the checker reads it to know what must come of it."""

from __future__ import annotations

import msgspec

POLICIES = ("query", "retry-same-key", "ask", "assume-not-done", "fail")


class Action(msgspec.Struct, omit_defaults=True):
    """One thing that a run does. ``part`` names it within its run: keys of operations and business identities of effects are made of it.

    ``do``: step, effect, signal, sleep, race (a signal or a timer), all (several signals), timeout (a signal that nobody sends), abandon
    (a wait that is given up and begun again), children, checkpoint, fail, hang (until it is cancelled). ``freeze``: the moment of the
    effect that is announced to the soak: before, in or after.
    """

    do: str
    part: str
    amount: int = 0
    policy: str = ""
    sync: bool = False
    freeze: str = ""
    names: list[str] = []
    seconds: float = 0.0
    join: str = ""
    bond: str = ""
    plans: list[Journey] = []


class Journey(msgspec.Struct, omit_defaults=True):
    """``path``: the run's name, or a child's place below its parent's path; empty for a run of the clock, which goes by its own name."""

    path: str
    actions: list[Action] = []

    def identity(self, action: Action) -> str:
        """The business identity of an effect or a step: the same however often it is executed, another for everything else."""
        return f"{self.path}/{action.part}"


def every(journey: Journey) -> list[Journey]:
    """The journey and all that it starts."""
    return [journey, *(one for action in journey.actions for child in action.plans for one in every(child))]


def ends(journey: Journey) -> set[str]:
    """States in which a run of this journey may end when nobody cancels it. One that hangs does not end by itself.

    A child that fails its parent does so at some time: before the end of the parent only if that waits for all."""
    sooner: set[str] = set()
    for action in journey.actions:
        if action.do == "fail":
            return sooner | {"Failed"}
        if action.do == "hang":
            return sooner | {"Cancelled"}
        if action.bond == "fail_parent" and any(ends(child) != {"Succeeded"} for child in action.plans):
            sooner = {"Failed"}
            if action.join == "all":
                return sooner
    return sooner | {"Succeeded"}

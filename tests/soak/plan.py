"""The plan of a soak, made of its seed alone: which runs begin when and what they do, what people do to them, and what breaks when.

The same seed and length give the same plan. What then meets what is the machine's timing, and differs from one time to the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.journey import Action, Journey, every

RUNS, SIGNALS, IN_SECONDS = 2000, 10_000, 1800
"""A soak of half an hour has so many; a shorter one has its share."""
POOLS = {"forked": 0.8, "single": 0.1, "shell": 0.1}
LATE_SECONDS = 12.0
"""After so long most runs have ended: what is sent then is late."""


@dataclass(frozen=True)
class Options:
    """``seconds`` of load, faults and ends together. The same ``seed`` draws the same plan."""

    seconds: float
    seed: int

    @property
    def load_seconds(self) -> float:
        """Runs begin and things break for so long; the rest is for what has begun to end."""
        return self.seconds - min(60.0, self.seconds / 3)

    @property
    def share(self) -> float:
        """Of the load of half an hour."""
        return self.load_seconds / Options(IN_SECONDS, 0).load_seconds


@dataclass(frozen=True)
class Deed:
    """What a person does to a run, ``at`` seconds after its creation: signal, cancel, pause or resume. An ``id`` may come several times."""

    at: float
    what: str
    name: str = ""
    id: str = ""
    amount: int = 0


@dataclass(frozen=True)
class Start:
    at: float
    pool: str
    journey: Journey
    deeds: list[Deed]
    twice: bool
    """Its creation is sent a second time, under the same key."""


@dataclass(frozen=True)
class Freeze:
    """``who`` of a worker stands still: agent, sidecar or both. ``seconds`` None: nobody lets it go on, which leaves it to the fleet.
    ``kills``: it dies instead."""

    who: str
    seconds: float | None
    kills: bool = False


@dataclass(frozen=True)
class Fault:
    """``kind``: postgres, gateway, sidecar, agent, freeze. ``choice`` picks among the victims of then; ``pause``: so long it is down."""

    at: float
    kind: str
    choice: float
    pause: float = 0.0
    freeze: Freeze | None = None


@dataclass
class Plan:
    options: Options
    starts: list[Start] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    freezes: dict[str, Freeze] = field(default_factory=dict)
    """By the business identity of the effect that they meet."""
    wishes: list[tuple[float, Journey]] = field(default_factory=list)
    """When a person fires the trigger ``wish``, and what its run does."""


def plan(options: Options) -> Plan:
    chance = random.Random(f"soak {options.seed}")
    made = Plan(options)
    share = options.share
    made.faults = sorted(_faults(chance, options.load_seconds), key=lambda fault: fault.at)
    wishes = max(2, round(RUNS * share * 0.03))
    made.wishes = sorted((chance.uniform(0, options.load_seconds), _wish(n)) for n in range(wishes))
    runs, signals = wishes, 0
    writer = _Writer(chance, made)
    while runs < RUNS * share:
        start = writer.start(len(made.starts), SIGNALS * share - signals, RUNS * share - runs)
        made.starts.append(start)
        runs += len(every(start.journey))
        signals += sum(deed.what == "signal" for deed in start.deeds)
    made.starts.sort(key=lambda start: start.at)
    return made


def _wish(n: int) -> Journey:
    path = f"wish-{n}"
    return Journey(path, [Action("step", "a0", amount=n % 7 + 1), Action("effect", "a1", policy="query")])


def _faults(chance: random.Random, until: float) -> list[Fault]:
    found = []
    for kind, least, most in (("postgres", 5, 40), ("gateway", 6, 25), ("sidecar", 10, 30), ("agent", 4, 14), ("freeze", 12, 40)):
        at = chance.uniform(3, most)
        while at < until:
            pause = chance.uniform(0, 2.5) if kind in ("postgres", "gateway") else 0.0
            found.append(Fault(at, kind, chance.random(), pause, _freeze(chance) if kind == "freeze" else None))
            at += chance.uniform(least, most)
    return found


def _freeze(chance: random.Random, *, kills: float = 0.0) -> Freeze:
    seconds = None if chance.random() < 0.2 else chance.uniform(6.0, 9.0)
    return Freeze(chance.choice(("both", "agent", "sidecar")), seconds, chance.random() < kills)


class _Writer:
    """Writes the journeys of one plan."""

    def __init__(self, chance: random.Random, made: Plan) -> None:
        self._chance, self._made = chance, made
        self._wanted: list[str] = []

    def start(self, n: int, signals_left: float, runs_left: float) -> Start:
        chance = self._chance
        [pool] = chance.choices(list(POOLS), list(POOLS.values()))
        path = f"{pool}-{n}"
        self._wanted = []
        at = chance.uniform(0, self._made.options.load_seconds)
        if pool == "shell":
            journey = Journey(
                path, [Action("step", "a0", amount=chance.randint(1, 9)), self._signal("a1"), self._effect(path, "a2", "query")]
            )
        else:
            journey = Journey(path, self._actions(path, chance.randint(3, 7), depth=0))
        deeds = self._deeds(path, signals_left / max(1.0, runs_left) * len(every(journey)))
        if any(action.do == "hang" for action in journey.actions):
            cancel = chance.uniform(4, 12)
            deeds += [Deed(cancel, "cancel"), Deed(cancel + chance.uniform(0, 2), "cancel")]
        elif chance.random() < 0.04:
            deeds.append(Deed(chance.uniform(0, 8), "cancel"))
        if chance.random() < 0.1:
            pause = chance.uniform(0, 6)
            deeds += [Deed(pause, "pause"), Deed(pause + chance.uniform(0.5, 4), "resume"), Deed(pause + 5, "resume")]
        return Start(at, pool, journey, sorted(deeds, key=lambda deed: deed.at), chance.random() < 0.15)

    def _actions(self, path: str, count: int, *, depth: int) -> list[Action]:
        chance = self._chance
        kinds = {"step": 30, "effect": 34, "sleep": 5, "timeout": 3, "checkpoint": 6}
        if not depth:
            kinds |= {"signal": 12, "race": 5, "all": 4, "abandon": 4, "children": 9}
        actions = [self._action(path, f"a{n}", chance.choices(list(kinds), list(kinds.values()))[0]) for n in range(count)]
        if chance.random() < (0.04 if not depth else 0.1):
            actions.append(Action(chance.choice(("fail", "hang")) if not depth else "fail", f"a{count}"))
        return actions

    def _action(self, path: str, part: str, do: str) -> Action:
        chance = self._chance
        make: dict[str, Callable[[], Action]] = {
            "step": lambda: Action("step", part, amount=chance.randint(1, 9)),
            "effect": lambda: self._effect(
                path, part, chance.choices(("query", "retry-same-key", "ask", "assume-not-done", "fail"), (5, 3, 2, 2, 1))[0]
            ),
            "signal": lambda: self._signal(part),
            "sleep": lambda: Action("sleep", part, seconds=chance.choice((0.3, 2.0, 4.0))),
            "race": lambda: Action("race", part, names=[self._name()], seconds=chance.uniform(1, 4)),
            "all": lambda: Action("all", part, names=[self._name(), self._name()]),
            "timeout": lambda: Action("timeout", part, names=["never"], seconds=chance.choice((0.2, 1.5))),
            "abandon": lambda: Action("abandon", part, names=[self._name()], seconds=chance.uniform(0.2, 1.0)),
            "children": lambda: self._children(path, part),
            "checkpoint": lambda: Action("checkpoint", part),
        }
        return make[do]()

    def _name(self) -> str:
        self._wanted.append(self._chance.choice(("red", "green")))
        return self._wanted[-1]

    def _signal(self, part: str) -> Action:
        return Action("signal", part, names=[self._name()])

    def _effect(self, path: str, part: str, policy: str) -> Action:
        chance = self._chance
        action = Action("effect", part, policy=policy, sync=path.startswith("shell") or chance.random() < 0.3)
        if chance.random() < 0.2:
            moment = chance.choice(("before", "in", "after"))
            action.freeze = moment
            self._made.freezes[f"{path}/{part}"] = _freeze(chance, kills=0.35)
        return action

    def _children(self, path: str, part: str) -> Action:
        chance = self._chance
        bond = chance.choices(("cancel", "detach", "fail_parent"), (5, 2, 1))[0]
        plans = []
        for n in range(chance.randint(1, 3)):
            below = f"{path}-{part}c{n}"
            plans.append(Journey(below, self._actions(below, chance.randint(1, 2), depth=1)))
        return Action("children", part, join=chance.choice(("all", "all", "any", "none")), bond=bond, plans=plans)

    def _deeds(self, path: str, target: float) -> list[Deed]:
        """Enough signals for every wait, in order, some before it; the same again; some that nobody waits for, or that come too late."""
        chance = self._chance
        signals, at = [], chance.uniform(0, 1.0)
        for n, name in enumerate(self._wanted):
            signals.append(Deed(at, "signal", name, f"{path}-{name}-{n}", chance.randint(1, 99)))
            at += chance.uniform(0, 2.5)
        while len(signals) < target * 0.6:
            name = chance.choice(("red", "chatter"))
            signals.append(
                Deed(
                    chance.uniform(0, at + 1.0) if name == "chatter" else at,
                    "signal",
                    name,
                    f"{path}-{name}-x{len(signals)}",
                    chance.randint(1, 99),
                )
            )
        again = []
        while len(signals) + len(again) < target:
            if signals and chance.random() < 0.9:
                deed = chance.choice(signals)
                again.append(Deed(deed.at + chance.choice((0.0, 0.2, 1.0, LATE_SECONDS)), "signal", deed.name, deed.id, deed.amount))
            else:
                again.append(Deed(LATE_SECONDS + chance.uniform(0, 3), "signal", "green", f"{path}-late-{len(again)}", 1))
        return signals + again

"""Decides whether a soak went as it should, by the evidence alone: nothing lost, nothing twice, results right.

It knows nothing of the store. What a run was told to do is its journey; what happened outside is the world's log; what was promised is
what the load was told; the rest is the public API. Each rule gives the violations that it finds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.soak.evidence import Evidence, Json, Shown
from tests.soak.journey import Journey, ends, every

TERMINAL = {"Succeeded", "Failed", "Cancelled"}
ONCE = {"query", "retry-same-key", "ask", "fail"}
"""Policies under which an effect happens at most once, unless a person has decided otherwise."""


@dataclass(frozen=True)
class Violation:
    """``kind``: lost, twice or wrong. ``run``: name of the run concerned."""

    kind: str
    rule: str
    run: str
    detail: str


class Case:
    """The evidence, put in order."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.by_id = {run.id: run for run in evidence.runs}
        self.by_name = {run.name: run for run in evidence.runs}
        self.journeys: dict[str, Journey] = {}
        """By run id: children and the runs of triggers are found by what they were given."""
        for run in evidence.runs:
            given = run.view.get("input") or {}
            path = given.get("path") or run.name
            known = evidence.journeys.get(given.get("path", run.name))
            if known is not None:
                self.journeys[run.id] = Journey(path, known.actions)
        self.cancelled = {ack["run"] for ack in evidence.acked("cancel")}
        self.effects: dict[str, list[Json]] = defaultdict(list)
        for line in evidence.happened("effect"):
            self.effects[line["identity"]].append(line)

    def told(self) -> Iterator[tuple[Shown, Journey]]:
        for run in self.evidence.runs:
            if run.id in self.journeys:
                yield run, self.journeys[run.id]

    def succeeded(self) -> Iterator[tuple[Shown, Journey, Json]]:
        for run, journey in self.told():
            if run.view["state"] == "Succeeded" and isinstance(run.view.get("result"), dict):
                yield run, journey, run.view["result"]

    def disturbed(self, run: Shown) -> bool:
        """Whether it may have been cancelled: by a person, or as the child of another, whose end is told in its log."""
        return run.id in self.cancelled or bool(run.view.get("parent") and run.of("run.cancel_requested"))


def created(case: Case) -> Iterator[Violation]:
    """A run that was promised exists, once, and under the id that was told, however often it was asked for."""
    for ack in case.evidence.acked("created"):
        if ack["run"] not in case.by_id:
            yield Violation("lost", "created", ack["name"], f"run {ack['run']} was acknowledged and does not exist")
    for name, count in Counter(run.name for run in case.evidence.runs).items():
        if count > 1:
            yield Violation("twice", "created", name, f"{count} runs have this name")
    promised = {ack["run"] for ack in case.evidence.acked("created")}
    for run in case.evidence.runs:
        if run.id not in promised and run.view.get("parent") is None and run.name in case.evidence.journeys:
            yield Violation("twice", "created", run.name, f"run {run.id} exists, though another one was acknowledged")


def ended(case: Case) -> Iterator[Violation]:
    """Every run has ended, and in a state that its journey allows."""
    for run in case.evidence.runs:
        state = run.view["state"]
        if state not in TERMINAL:
            yield Violation("lost", "ended", run.name, f"is {state}: {run.view.get('reason')}, {run.view.get('message')}")
            continue
        journey = case.journeys.get(run.id)
        if journey is None:
            yield Violation("wrong", "ended", run.name, "nobody has begun it")
            continue
        allowed = ends(journey) | {"Cancelled"} if case.disturbed(run) else ends(journey) - {"Cancelled"}
        if run.id in case.cancelled:
            allowed = {"Cancelled"}
        if state not in allowed:
            why = f"{run.view.get('reason')}: {(run.view.get('error') or {}).get('message')}"
            yield Violation("lost", "ended", run.name, f"is {state} ({why}), not {' or '.join(sorted(allowed))}")
        if state == "Succeeded" and not isinstance(run.view.get("result"), dict):
            yield Violation("lost", "ended", run.name, "has succeeded without a result")


def signals(case: Case) -> Iterator[Violation]:
    """Every signal that was accepted is in the log once, where it was told to be; one that was refused is not. The same id again is the
    same signal."""
    accepted: dict[str, dict[tuple[str, str], set[int]]] = defaultdict(lambda: defaultdict(set))
    for ack in case.evidence.acked("signal"):
        accepted[ack["run"]][ack["signal"], ack["id"]].add(ack["seq"])
    logged: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for run in case.evidence.runs:
        at = {}
        for event in run.of("signal.received"):
            which = (event["data"]["name"], event["data"]["id"])
            logged[run.id][which] += 1
            at[which] = event["seq"]
            if logged[run.id][which] > 1:
                yield Violation("twice", "signals", run.name, f"signal {which} was received twice")
        for which, told in accepted.get(run.id, {}).items():
            if told != {at.get(which)}:
                yield Violation("lost", "signals", run.name, f"signal {which} was accepted at {sorted(told)} and is at {at.get(which)}")
        for which in at:
            if which not in accepted.get(run.id, {}) and not which[0].startswith("effect:"):
                yield Violation("wrong", "signals", run.name, f"signal {which} is in the log, and nobody was told")
        taken = Counter(_taken(run))
        for which, count in taken.items():
            if count > 1:
                yield Violation("twice", "signals", run.name, f"signal {which} was taken by {count} waits")
            if which not in at:
                yield Violation("wrong", "signals", run.name, f"signal {which} was taken, and nobody has sent it")
    for ack in case.evidence.acked("refused"):
        if ack["deed"] == "signal" and logged[ack["run"]][ack["signal"], ack["id"]]:
            yield Violation("wrong", "signals", ack["name"], f"signal {ack['id']} was refused and is there all the same")


def _taken(run: Shown) -> Iterator[tuple[str, str]]:
    for entry in run.journal:
        for fired in (entry.get("data") or {}).get("fired", ()) if entry["kind"] == "wait" else ():
            if fired["kind"] == "signal":
                yield fired["name"], fired["id"]


def received(case: Case) -> Iterator[Violation]:
    """What an agent says that it received is what the journal says, with what was sent; of one name as it was accepted, without a gap.

    So every signal was either received exactly once, or is told as unclaimed: in the log, behind the last one that was received."""
    sent = {(ack["run"], ack["id"]): ack["amount"] for ack in case.evidence.acked("signal")}
    for run, _, result in case.succeeded():
        got = [one for item in result["items"] for one in item.get("got", ())]
        taken = Counter(which for which in _taken(run) if not which[0].startswith("effect:"))
        if Counter((one["name"], one["id"]) for one in got) != taken:
            yield Violation("lost", "received", run.name, f"it received {[one['id'] for one in got]}, the journal has {sorted(taken)}")
        for one in got:
            if sent.get((run.id, one["id"])) != one["amount"]:
                yield Violation("wrong", "received", run.name, f"signal {one['id']} came as {one['amount']}, not as it was sent")
        for name in {one["name"] for one in got}:
            order = [event["data"]["id"] for event in run.of("signal.received") if event["data"]["name"] == name]
            mine = [one["id"] for one in got if one["name"] == name]
            if order[: len(mine)] != mine:
                yield Violation("wrong", "received", run.name, f"signals {name} were accepted as {order} and received as {mine}")


def effects(case: Case) -> Iterator[Violation]:
    """An effect happened at most once, unless its policy allows more or a person said that it had not; and never without an intent."""
    owner = {journey.identity(action): run for run, journey in case.told() for action in journey.actions if action.do == "effect"}
    for identity, requests in case.effects.items():
        run = owner.get(identity)
        if run is None:
            yield Violation("wrong", "effects", identity, "it happened, and no run was told to do it")
            continue
        keys, policy = {line["key"] for line in requests}, requests[0]["policy"]
        if len(keys) > 1:
            yield Violation("twice", "effects", run.name, f"{identity} was done under {len(keys)} keys")
        executed = sum(not line["repeated"] for line in requests)
        if policy in ONCE and executed > 1 + _decided(run, keys):
            yield Violation("twice", "effects", run.name, f"{identity} ({policy}) happened {executed} times: {_times(requests)}")
        granted = sum(event["data"]["key"] in keys for event in run.of("activity.started"))
        if len(requests) > granted:
            yield Violation("twice", "effects", run.name, f"{identity} was done {len(requests)} times, and granted {granted} times")


def _decided(run: Shown, keys: set[str]) -> int:
    """How often a person has said of this effect that it did not happen."""
    resolved = (event["data"] for event in run.of("activity.resolved"))
    return sum(said["key"] in keys and said["by"] == "person" and said["state"] == "FAILED" for said in resolved)


def _times(requests: list[Json]) -> str:
    return ", ".join(f"attempt {line['attempt']} at {line['at']:.2f}" for line in requests)


def results(case: Case) -> Iterator[Violation]:
    """The result of each run is what the checker computes from what came to the run: of every action, and in sum."""
    executed: dict[str, set[str]] = defaultdict(set)
    for line in case.evidence.happened("step"):
        if line["nonce"] in executed[line["identity"]]:
            yield Violation("twice", "results", line["identity"], f"one execution was written down twice: {line['nonce']}")
        executed[line["identity"]].add(line["nonce"])
    for run, journey, result in case.succeeded():
        items, trail, value = result["items"], [], 0
        if len(items) != len(journey.actions):
            yield Violation("lost", "results", run.name, f"it did {len(items)} of {len(journey.actions)} actions")
            continue
        outputs = {entry["key"].rpartition("=")[2]: entry.get("output") for entry in run.journal if entry["kind"] == "step"}
        for action, item in zip(journey.actions, items, strict=True):
            identity = journey.identity(action)
            if action.do == "step":
                trail.append(item.get("nonce"))
                value += action.amount
                if item.get("nonce") not in executed[identity] or outputs.get(action.part) != item.get("nonce"):
                    yield Violation(
                        "wrong", "results", run.name, f"step {action.part} gave {item}; the journal has {outputs.get(action.part)}"
                    )
            elif action.do == "effect":
                refs = {line["ref"] for line in case.effects.get(identity, ())}
                if "unknown" in item and action.policy != "fail":
                    yield Violation("lost", "results", run.name, f"nobody knows what became of {identity}, whose policy is {action.policy}")
                if "unknown" not in item and item.get("ref") not in refs:
                    yield Violation("lost", "results", run.name, f"{identity} gave {item.get('ref')}; the outside world has {sorted(refs)}")
            yield from _waited(run, action.do, len(action.names), item)
            value += sum(got["amount"] for got in item.get("got", ()))
            value += sum(one["result"]["value"] for one in item.get("ended", ()) if one["result"])
        if result["trail"] != trail:
            yield Violation("lost", "results", run.name, f"the session has the steps {result['trail']}, the results {trail}")
        if result["value"] != value:
            yield Violation("wrong", "results", run.name, f"its value is {result['value']}, not {value}")


def _waited(run: Shown, do: str, wanted: int, item: Json) -> Iterator[Violation]:
    least, most = {"signal": (1, 1), "abandon": (1, 1), "all": (wanted, wanted), "race": (0, 1), "timeout": (0, 0)}.get(do, (0, 0))
    if not least <= len(item.get("got", ())) <= most:
        yield Violation("lost", "results", run.name, f"a wait ({do}) for {wanted} signals gave {item}")


def children(case: Case) -> Iterator[Violation]:
    """Each child that was to be started was, once; and what its parent was told of its end is how it ended."""
    of: dict[str, list[Shown]] = defaultdict(list)
    for run in case.evidence.runs:
        if run.view.get("parent"):
            of[run.view["parent"]].append(run)
    for run, journey in case.told():
        paths = Counter(case.journeys[child.id].path for child in of[run.id] if child.id in case.journeys)
        planned = {child.path for action in journey.actions for child in action.plans}
        for path, count in paths.items():
            if count > 1 or path not in planned:
                yield Violation("twice", "children", run.name, f"{count} children do {path}")
        if run.view["state"] == "Succeeded" and set(paths) != planned:
            yield Violation("lost", "children", run.name, f"its children are {sorted(paths)}, not {sorted(planned)}")
    for run, _, result in case.succeeded():
        for one in (one for item in result["items"] for one in item.get("ended", ())):
            child = case.by_id.get(one["id"])
            state = child.view["state"] if child else "gone"
            if child is None or state != one["status"] or (state == "Succeeded" and child.view.get("result") != one["result"]):
                yield Violation("wrong", "children", run.name, f"child {one['id']} is {state}; its parent was told {one['status']}")


def fired(case: Case) -> Iterator[Violation]:
    """A firing that was acknowledged made one run; and no firing made two."""
    for trigger, deliveries in case.evidence.deliveries.items():
        by_id = {one["delivery_id"]: one for one in deliveries}
        for ack in case.evidence.acked("emitted") if trigger == "wish" else ():
            if by_id.get(ack["delivery"], {}).get("state") != "DONE":
                yield Violation("lost", "fired", ack["name"], f"delivery {ack['delivery']} is {by_id.get(ack['delivery'])}")
        wished = {ack["delivery"] for ack in case.evidence.acked("emitted")}
        for one in deliveries if trigger == "wish" else ():
            if one["delivery_id"] not in wished:
                yield Violation("wrong", "fired", str(one["run"]), f"nobody was told of the delivery {one['delivery_id']}")
        for run, count in Counter(one.get("run") for one in deliveries if one["state"] == "DONE").items():
            if count > 1 or run not in case.by_name:
                yield Violation("twice" if count > 1 else "lost", "fired", str(run), f"{count} deliveries of {trigger} name this run")
    for name, told in _group(case.evidence.acked("emitted")).items():
        if len(told) > 1:
            yield Violation("twice", "fired", name, f"one wish made the deliveries {sorted(told)}")


def _group(acks: list[Json]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for ack in acks:
        found[ack["name"]].add(ack["delivery"])
    return found


RULES: tuple[Callable[[Case], Iterator[Violation]], ...] = (created, ended, signals, received, effects, results, children, fired)


def check(evidence: Evidence) -> list[Violation]:
    case = Case(evidence)
    return [violation for rule in RULES for violation in rule(case)]


def journeys_of(begun: list[Journey]) -> dict[str, Journey]:
    """By path, with all that they start."""
    return {one.path: one for journey in begun for one in every(journey)}

"""The evidence of a small soak in which all went as it should, made by hand, for tests to tamper with."""

from __future__ import annotations

import itertools
from typing import Any

from tests.soak.evidence import Evidence, Json, Shown
from tests.soak.journey import Action, Journey, every

CHILD = Journey("main-a5c0", [Action("step", "a0", amount=2), Action("effect", "a1", policy="assume-not-done")])
MAIN = Journey(
    "main",
    [
        Action("step", "a0", amount=5),
        Action("effect", "a1", policy="query"),
        Action("signal", "a2", names=["red"]),
        Action("all", "a3", names=["red", "green"]),
        Action("effect", "a4", policy="ask"),
        Action("children", "a5", join="all", bond="cancel", plans=[CHILD]),
        Action("effect", "a6", policy="retry-same-key"),
        Action("race", "a7", names=["blue"], seconds=1),
        Action("timeout", "a8", names=["never"], seconds=1),
        Action("effect", "a9", policy="fail"),
        Action("step", "a10", amount=1),
        Action("sleep", "a11", seconds=1),
    ],
)
FAILS = Journey("fails", [Action("effect", "a0", policy="query"), Action("fail", "a1")])
HANGS = Journey("hangs", [Action("step", "a0", amount=1), Action("hang", "a1")])
OTHER = Journey("other", [Action("step", "a0", amount=4), Action("effect", "a1", policy="query")])
WISH = Journey("wish-0", [Action("step", "a0", amount=3)])
BEAT = Journey("", [Action("step", "a0", amount=3)])


class _Run:
    """Writes down one run as it is carried out."""

    def __init__(self, made: Evidence, journey: Journey, name: str = "", parent: str | None = None) -> None:
        self.made, self.path = made, journey.path or name
        given = {"path": journey.path, "actions": []}
        view: Json = {"runId": f"id-{name or journey.path}", "name": name or journey.path, "parent": parent, "input": given, "error": None}
        self.shown = Shown(view, [], [])
        self.seq = itertools.count(1)
        made.runs.append(self.shown)
        if parent is None and not name:
            made.acks.append({"what": "created", "name": journey.path, "run": self.shown.id})

    def log(self, kind: str, **data: Any) -> int:
        seq = next(self.seq)
        self.shown.events.append({"seq": seq, "at": "2026-01-01T00:00:00.000000", "epoch": 1, "kind": kind, "data": data})
        return seq

    def step(self, part: str) -> Json:
        nonce = f"nonce of {self.path}/{part}"
        self.made.world.append({"what": "step", "identity": f"{self.path}/{part}", "nonce": nonce})
        self.shown.journal.append({"kind": "step", "key": f"step:count={part}", "output": nonce})
        return {"nonce": nonce}

    def effect(self, part: str, policy: str, *, repeated: bool = False) -> Json:
        identity = f"{self.path}/{part}"
        self.log("activity.started", key=f"key of {identity}")
        line = {"identity": identity, "key": f"key of {identity}", "policy": policy, "ref": f"ref of {identity}", "repeated": repeated}
        self.made.world.append({"what": "effect", "attempt": 1, "at": 0.0, **line})
        return {"ref": line["ref"]}

    def send(self, name: str, id: str, amount: int) -> Json:
        seq = self.log("signal.received", name=name, id=id)
        about = {"name": self.path, "run": self.shown.id, "signal": name, "id": id, "amount": amount}
        self.made.acks.append({"what": "signal", **about, "seq": seq, "duplicate": False})
        return {"name": name, "id": id, "amount": amount}

    def take(self, part: str, *sent: Json) -> Json:
        fired = [{"kind": "signal", "name": one["name"], "id": one["id"]} for one in sent]
        self.shown.journal.append({"kind": "wait", "key": f"wait:x={part}", "data": {"status": "satisfied", "fired": fired}})
        return {"got": list(sent)}

    def end(self, state: str, items: list[Json] | None = None, value: int = 0) -> Json:
        trail = [item["nonce"] for item in items or () if "nonce" in item]
        result = None if items is None else {"items": items, "trail": trail, "value": value}
        self.shown.view |= {"state": state, "reason": state, "message": "", "result": result}
        return {"id": self.shown.id, "status": state, "result": result}


def honest() -> Evidence:
    made = Evidence({one.path: one for journey in (MAIN, FAILS, HANGS, OTHER, WISH, BEAT) for one in every(journey)}, [], [], [])
    main, child = _Run(made, MAIN), _Run(made, CHILD, parent="id-main")
    red, other_red = main.send("red", "r1", 7), main.send("red", "r2", 8)
    green = main.send("green", "g1", 9)
    main.send("red", "r3", 10)
    items = [main.step("a0"), main.effect("a1", "query"), main.take("a2", red), main.take("a3", other_red, green), main.effect("a4", "ask")]
    main.log("activity.resolved", key="key of main/a4", by="person", state="FAILED")
    main.effect("a4", "ask")
    child_items = [child.step("a0"), child.effect("a1", "assume-not-done")]
    child.effect("a1", "assume-not-done")
    ended = child.end("Succeeded", child_items, 2)
    items += [{"children": [child.shown.id], "ended": [ended]}, main.effect("a6", "retry-same-key")]
    main.effect("a6", "retry-same-key", repeated=True)
    items += [{"got": []}, {"got": []}, {"unknown": True}, main.step("a10"), {}]
    main.end("Succeeded", items, 5 + 7 + 8 + 9 + 2 + 1)

    fails = _Run(made, FAILS)
    fails.effect("a0", "query")
    fails.end("Failed")
    hangs = _Run(made, HANGS)
    hangs.step("a0")
    hangs.end("Cancelled")
    made.acks.append({"what": "cancel", "name": "hangs", "run": hangs.shown.id})
    made.acks.append(
        {"what": "refused", "deed": "signal", "name": "hangs", "run": hangs.shown.id, "signal": "red", "id": "late", "code": "run-finished"}
    )
    other = _Run(made, OTHER)
    other.end("Succeeded", [other.step("a0"), other.effect("a1", "query")], 4)

    for trigger, journey, name in (("wish", WISH, "wish-1234"), ("beat", BEAT, "beat-1")):
        fired = _Run(made, journey, name)
        fired.end("Succeeded", [fired.step("a0")], 3)
        made.deliveries[trigger] = [{"delivery_id": f"d-{trigger}", "state": "DONE", "run": name}]
    made.acks.append({"what": "emitted", "name": "wish-0", "delivery": "d-wish", "duplicate": False})
    return made

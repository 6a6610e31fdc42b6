"""During an upgrade gateways of the version before call the functions of this one: each call still fits and is answered as it was.

``calls_of_the_version_before.json`` has, of every function that it calls, the types of the arguments and the columns of the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import asyncpg

CALLS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("calls_of_the_version_before.json").read_text())
BY_POSITION = {"silent_leases", "outdated_runs"}
"""Of these it reads whole rows, so one more column would end it."""


async def test_the_version_before_is_answered(database: str) -> None:
    connection = await asyncpg.connect(database)
    wrong = []
    for name, call in CALLS.items():
        places = ", ".join(f"${n}" for n in range(1, len(call["arguments"]) + 1))
        prepared = await connection.prepare(f"select * from perdure.{name}({places})")
        arguments = [parameter.name for parameter in prepared.get_parameters()]
        answer = [(column.name, column.type.name) for column in prepared.get_attributes()]
        before = list(call["columns"].items())
        # Columns may be added, at the end: some answers are read by their first column.
        if arguments != call["arguments"] or answer[: len(before)] != before or (name in BY_POSITION and answer != before):
            wrong.append((name, arguments, answer))
    await connection.close()
    assert wrong == []

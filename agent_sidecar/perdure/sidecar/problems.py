"""Every error that the sidecar itself can answer, in one table; the gateway's own are passed on as they came.

``app`` turns a :class:`ProblemError` into problem JSON, ``openapi`` lists the table.
"""

from __future__ import annotations

from msgspec import Struct

from perdure.protocol import Problem, encode_json


class Kind(Struct, frozen=True):
    status: int
    title: str
    retryable: bool
    action: str


KINDS: dict[str, Kind] = {
    "bad-request": Kind(400, "The request is not well formed", False, "Correct the request; the detail says what is wrong."),
    "unauthorized": Kind(
        401, "The secret of the current run is missing or wrong", False, "Send Authorization: Bearer with the run's secret."
    ),
    "parent-only": Kind(
        403, "Only the parent process may ask this", False, "Ask over the unix socket, as the process that forks the agents."
    ),
    "foreign-origin": Kind(403, "Browsers may not use this interface", False, "Call from the agent process, without an Origin header."),
    "not-found": Kind(404, "There is no such path", False, "See /openapi.json for the paths."),
    "method-not-allowed": Kind(405, "The path exists with another method", False, "See /openapi.json for the methods."),
    "no-run": Kind(409, "This pod holds no run yet", True, "Wait for a run with GET /v1/run, then try again."),
    "lease-lost": Kind(409, "This pod no longer holds the run", False, "Stop now. Only activities/end is still taken, as evidence."),
    "run-released": Kind(
        409, "The run has let this pod go", False, "Exit now: the run has finished or suspended. Only activities/end is still taken."
    ),
    "retiring": Kind(410, "This pod takes no more runs", False, "Exit now."),
    "payload-too-large": Kind(
        413, "The body is too large", False, "Send less at once, for instance as several chunks of an append-only slice."
    ),
    "misdirected": Kind(421, "The Host header does not name this machine", False, "Use 127.0.0.1 or localhost as the host."),
    "headers-too-large": Kind(431, "The head of the request is too large", False, "Send fewer or smaller headers."),
    "internal": Kind(500, "The sidecar has a bug", True, "Try again with the same Perdure-Request-Id; report the detail."),
    "busy": Kind(503, "Too much is waiting for the gateway", True, "Try again with the same Perdure-Request-Id after Retry-After seconds."),
}


class ProblemError(Exception):
    """An answer that is an error. ``problem.type`` is the stable code, ``problem.retryable`` says whether a retry helps."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def problem(code: str, detail: str) -> Problem:
    kind = KINDS[code]
    return Problem(
        type=f"urn:perdure:{code}", title=kind.title, status=kind.status, detail=detail, retryable=kind.retryable, action=kind.action
    )


def refuse(code: str, detail: str) -> ProblemError:
    """To be raised."""
    return ProblemError(problem(code, detail))


def encode_problem(value: Problem) -> bytes:
    return encode_json(value)

"""The states of a run and the events that move it."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
ACTIVE = frozenset(State) - TERMINAL


class Event(StrEnum):
    LEASE = "lease"  # a pod takes the run
    SUSPEND = "suspend"  # the worker waits and gives the pod back
    WAKE = "wake"  # a wait is satisfied, or somebody resumed
    LOSE = "lose"  # the worker is gone: heartbeat, pod, node
    RETRY = "retry"  # the worker reports that this attempt failed and another is allowed
    YIELD = "yield"  # the worker gives the pod back although there is work left
    PAUSE = "pause"  # parked by a person or by too many losses
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"


class Effect(StrEnum):
    GRANT = "grant"  # new epoch, lease row, pod row leased
    RELEASE = "release"  # lease row gone, pod row no longer leased
    REVOKE = "revoke"  # epoch + 1, so that the old worker is fenced from this commit on
    ORPHAN = "orphan"  # open execution tokens become UNKNOWN
    ATTEMPT = "attempt"  # the next lease is a new attempt
    ENQUEUE = "enqueue"  # into the queue of the pool
    CLOCK_ON = "clock_on"  # activeDeadlineSeconds counts
    CLOCK_OFF = "clock_off"
    FINISH = "finish"  # waits closed, parent told, children cancelled by policy

"""The sidecar of a worker pod: the only process of the pod that talks to the gateway.

An agent of any language speaks HTTP/1.1 JSON or a WebSocket to it on loopback; it speaks msgpack frames on one WebSocket to a
gateway. It adds the fence (run, epoch) and resends what a lost connection left unanswered. It does not understand operations.

Flow of one operation: ``http_server`` or ``session`` -> ``app``/``pod`` (may it pass?) -> ``outbox`` (kept until answered) -> ``link``
(the connection) -> gateway, and the answer the same way back, byte for byte.

Imports are kept few on purpose: this process starts with every pod and its start is part of every cold wake.
"""

from __future__ import annotations

VERSION = "0.1.0"

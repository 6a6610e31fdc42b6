"""Receipts of plain HTTP clients, kept on disk until the gateway has them (design R3).

An SDK resends what was not answered; ``curl`` does not. So the end of an activity that came by plain HTTP is on disk before it is sent,
and is sent again after a restart of this process, or after a refusal that may pass, with the request id of the first time. Under an epoch
that is over by then the gateway takes it as evidence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec
from msgspec import Struct

from perdure.protocol import Answer
from perdure.sidecar.outbox import Outcome, Waiter
from perdure.sidecar.spool import Record, Spool

RETRY_SECONDS = 2.0

log = logging.getLogger("perdure.sidecar.receipts")


class Submit(Protocol):
    """How an operation gets to the gateway."""

    def __call__(self, *, run: str, epoch: int, op: str, body: bytes, req: str, waiter: Waiter) -> None: ...


class Receipt(Struct, array_like=True, frozen=True):
    """What is needed to send an activity.end again. ``body`` is JSON with its tag."""

    run: str
    epoch: int
    req: str
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Receipt)


class Receipts:
    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._flushing = asyncio.Lock()
        self._flushed = 0
        self.damaged = 0
        self.failed = 0

    @property
    def unacknowledged(self) -> int:
        return self._spool.unacknowledged

    def replay(self, submit: Submit) -> None:
        """Sends what an earlier process left behind; to be called before anything else is sent."""
        recovery = self._spool.recover()
        self.damaged = len(recovery.damage)
        for damage in recovery.damage:
            log.error(
                "a part of the spool cannot be read",
                extra={"segment": damage.segment, "offset": damage.offset, "bytes": damage.size, "what": damage.what},
            )
        for record in recovery.records:
            self._resend(submit, record)
        if recovery.records:
            log.info("receipts of an earlier process are sent again", extra={"receipts": len(recovery.records)})

    def _resend(self, submit: Submit, record: Record) -> None:
        try:
            receipt = _decoder.decode(record.payload)
        except msgspec.DecodeError:
            log.exception("a receipt cannot be read", extra={"sequence": record.sequence})
            self._spool.acknowledge(record.sequence)
            return

        submit(
            run=receipt.run,
            epoch=receipt.epoch,
            req=receipt.req,
            op="activity.end",
            body=receipt.body,
            waiter=lambda outcome: self.answered(submit, record, outcome),
        )

    async def keep(self, *, run: str, epoch: int, req: str, body: bytes) -> Record:
        """Returns when the receipt is on disk, or when the disk has failed: then it is only as safe as its sender makes it. One fsync
        serves all that came while the last one ran."""
        payload = _encoder.encode(Receipt(run, epoch, req, body))
        sequence = self._spool.append(payload)
        async with self._flushing:
            if sequence > self._flushed:
                upto, data = self._spool.last_sequence, self._spool.take_buffer()
                try:
                    await asyncio.get_running_loop().run_in_executor(None, self._spool.write, data)
                except OSError as error:
                    self.failed += 1
                    log.error("a receipt could not be written to the spool", extra={"error": str(error)})
                self._flushed = upto
        return Record(sequence, payload)

    def close(self) -> None:
        self._spool.close()

    def answered(self, submit: Submit, record: Record, outcome: Outcome) -> None:
        """The gateway has spoken: done with, unless it was a refusal that may pass."""
        if isinstance(outcome, Answer) or not outcome.problem.retryable:
            self._spool.acknowledge(record.sequence)
        else:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._resend, submit, record)

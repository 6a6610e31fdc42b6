"""What a lease left behind because it is large: fetched when it is needed, several values in one window.

The journal's index and the session are needed whole before the agent begins: an entry that is missed would be done again, and a slice is
read without awaiting. Outputs and payloads are fetched when a redo meets them, with those that it will meet next; they are kept only until
then.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from msgspec import Raw
from msgspec.structs import replace

from perdure.protocol import ChunkRef, ErrorInfo, Fetch, Fetched, FiredRef, JournalEntry, WaitOutcome
from perdure.sdk.errors import Refused

if TYPE_CHECKING:
    from perdure.sdk.execution import Execution

AHEAD: Final = 32
"""Values asked for at once; how many come is the gateway's affair."""
_CORRUPT: Final = "corrupt-payload"


class Fetching:
    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._outputs: dict[str, Raw] = {}
        self._marked: dict[str, list[tuple[int, str]]] = {}

    async def all_that_must_be_there(self) -> None:
        """The rest of the journal's index and of the session. Raises Refused."""
        context, journal = self._execution.context, self._execution.journal
        after = context.journal_after
        while after is not None:
            page = await self._fetch(Fetch(after=after))
            context.journal.extend(page.journal)
            journal.update((entry.key, entry) for entry in page.journal)
            after = page.journal[-1].key if page.more else None
        for state in context.slices:
            seqs = state.fetch
            while seqs:
                try:
                    chunks = await self._values(Fetch(chunks=[ChunkRef(name=state.name, seq=seq) for seq in seqs[:AHEAD]]))
                except Refused as refusal:
                    if refusal.problem_code != _CORRUPT:
                        raise
                    # A slice of which a part is lost says less than none: the session reports it and starts it fresh.
                    state.chunks = [Raw(b"")]
                    break
                state.chunks.extend(chunks)
                seqs = seqs[len(chunks) :]

    async def entry(self, entry: JournalEntry) -> JournalEntry:
        """With its output. Raises Refused."""
        if not entry.fetch:
            return entry
        output = self._outputs.pop(entry.key, None)
        if output is None:
            keys = [entry.key, *self._following(entry)]
            try:
                values = await self._values(Fetch(keys=keys))
            except Refused as refusal:
                if refusal.problem_code != _CORRUPT:
                    raise
                broken = ErrorInfo(type="JournalCorrupt", message=refusal.problem.detail[:20_000], retryable=False)
                return replace(entry, state="failed", error=broken, fetch=False)
            self._outputs = dict(zip(keys, values, strict=False))
            output = self._outputs.pop(entry.key)
        return replace(entry, output=output, fetch=False)

    def _following(self, entry: JournalEntry) -> list[str]:
        """Those that a redo will meet next. The index is complete before the first entry is met, and no marked one comes later."""
        if entry.kind not in self._marked:
            entries = self._execution.journal.values()
            self._marked[entry.kind] = sorted((other.seq, other.key) for other in entries if other.fetch and other.kind == entry.kind)
        marked = self._marked[entry.kind]
        start = bisect_right(marked, entry.seq, key=itemgetter(0))
        return [key for _, key in marked[start : start + AHEAD - 1]]

    async def outcome(self, key: str, outcome: WaitOutcome) -> WaitOutcome:
        """With all payloads. Raises Refused."""
        left = [item for item in outcome.fired if item.fetch]
        while left:
            payloads = await self._values(Fetch(fired=[FiredRef(key=key, index=item.index) for item in left[:AHEAD]]))
            for item, payload in zip(left, payloads, strict=False):
                item.payload, item.fetch = payload, False
            left = left[len(payloads) :]
        return outcome

    async def _values(self, body: Fetch) -> list[Raw]:
        """At least one."""
        values = (await self._fetch(body)).values
        assert values, "a window holds at least what was asked for first"
        return [Raw(bytes(value)) for value in values]  # not a view of the whole window

    async def _fetch(self, body: Fetch) -> Fetched:
        return await self._execution.call(body, Fetched)

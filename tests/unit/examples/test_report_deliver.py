"""The three effects against real receivers. Outside a run a tool is the function that it decorates."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from aiohttp import ClientConnectorError
from examples.report import deliver
from tests.unit.examples.outside import Outside

from perdure import NotExecuted

PDF = b"%PDF-1.3 not much of it"
SHA256 = hashlib.sha256(PDF).hexdigest()
CONTENT = base64.b64encode(PDF).decode()


@pytest.fixture
def receivers(sinks: Outside, monkeypatch: pytest.MonkeyPatch) -> Outside:
    for name, value in sinks.at.environment.items():
        monkeypatch.setattr(deliver, name, value)
    return sinks


async def found(kind: Callable[[str], object], key: str) -> object:
    """What a reconcile function says; by its type it may be a plain one."""
    return await cast("Awaitable[object]", kind(key))


async def test_what_was_done_is_found_under_its_key(receivers: Outside) -> None:
    for ask in (deliver.uploaded, deliver.mailed, deliver.notified):
        assert await found(ask, "k") is None
    stored = await deliver.upload("r.pdf", SHA256, CONTENT, key="k")
    sent = await deliver.send_mail("b@example.org", "Report", "Hello.", "r.pdf", SHA256, key="k")
    told = await deliver.notify("report-sent", "r.pdf", key="k")
    asked = [await found(ask, "k") for ask in (deliver.uploaded, deliver.mailed, deliver.notified)]
    assert asked == [stored, sent, told]
    [mail] = await receivers.effects("mails", key=sent.id)
    assert [file["sha256"] for file in mail["files"]] == [SHA256]


async def test_other_bytes_are_neither_stored_nor_mailed(receivers: Outside) -> None:
    with pytest.raises(NotExecuted):
        await deliver.upload("r.pdf", SHA256, base64.b64encode(b"other").decode(), key="k")
    await receivers.put("r.pdf", b"other", "x")
    with pytest.raises(NotExecuted):
        await deliver.send_mail("b@example.org", "Report", "Hello.", "r.pdf", SHA256, key="k")
    assert await receivers.effects("mails") == []


async def test_without_a_connection_it_is_certain_that_nothing_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver, "STORE_URL", "http://127.0.0.1:1/objects")
    with pytest.raises(ClientConnectorError):
        await deliver.upload("r.pdf", SHA256, CONTENT, key="k")
    with pytest.raises(NotExecuted):
        await deliver.send_mail("b@example.org", "Report", "Hello.", "r.pdf", SHA256, key="k")


async def test_a_refusal_is_final(receivers: Outside) -> None:
    with pytest.raises(deliver.Rejected):
        await deliver.upload("no/such/place", SHA256, CONTENT, key="k")

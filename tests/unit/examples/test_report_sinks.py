"""The sinks count effects: the verdict of the demo rests on that."""

from __future__ import annotations

import asyncio
import hashlib
import smtplib
from email.message import EmailMessage
from pathlib import Path

import pytest
from tests.unit.examples.outside import Outside


async def test_a_repeated_put_under_a_known_key_stores_nothing(sinks: Outside) -> None:
    puts = (("a.pdf", b"one", "k1"), ("a.pdf", b"two", "k1"), ("b.pdf", b"x", "k2"))
    assert [await sinks.put(*put) for put in puts] == [201, 200, 201]
    assert len(await sinks.effects("objects")) == 2
    assert await sinks.object("a.pdf") == b"one"
    assert await sinks.object("none.pdf") is None


@pytest.mark.parametrize("sinks", [("--naive",)], indirect=True)
async def test_a_naive_store_does_it_again(sinks: Outside) -> None:
    assert [await sinks.put("a.pdf", b"one", "k1") for _ in range(2)] == [201, 201]
    assert len(await sinks.effects("objects", key="k1")) == 2


async def test_every_notification_counts(sinks: Outside) -> None:
    for _ in range(2):
        url, headers = f"{sinks.at.http}/notifications", {"Idempotency-Key": "n"}
        async with sinks.client.post(url, json={"event": "done"}, headers=headers) as response:
            assert response.status == 202
    assert len(await sinks.effects("notifications", key="n")) == 2
    assert await sinks.effects("notifications", key="other") == []


async def test_a_mail_is_found_by_its_message_id_with_its_attachment(sinks: Outside, tmp_path: Path) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "a@example.org", "b@example.org", "Bericht: fünf"
    message["Message-ID"] = "<k@example.org>"
    message.set_content("Hello.")
    message.add_attachment(b"%PDF-1.3", maintype="application", subtype="pdf", filename="report.pdf")
    host, port = sinks.at.smtp.split(":")

    def send() -> None:
        with smtplib.SMTP(host, int(port)) as server:
            server.send_message(message)

    await asyncio.to_thread(send)
    assert await sinks.effects("mails", key="<other@example.org>") == []
    [mail] = await sinks.effects("mails", key="<k@example.org>")
    assert (mail["subject"], mail["to"]) == ("Bericht: fünf", ["b@example.org"])
    [attachment] = mail["files"]
    assert attachment["sha256"] == hashlib.sha256(b"%PDF-1.3").hexdigest()
    assert attachment["path"] == str(tmp_path / "mails" / "report.pdf")

"""The three effects of the report: stored, mailed, announced. Each is committed as an intent before it is made, carries the key of the
ledger to its receiver, and knows how to ask that receiver whether it has happened.

An exception means that nobody knows, unless it is declared: ``not_executed`` ones prove that nothing has happened, ``rejected`` ones
that the receiver has refused for good.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import smtplib
from email.message import EmailMessage
from email.utils import localtime
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientSession

from perdure import NotExecuted, tool

STORE_URL = os.environ.get("STORE_URL", "http://127.0.0.1:8090/objects")
WEBHOOK_URL = os.environ.get("WEBHOOK_URL", "http://127.0.0.1:8090/notifications")
MAILBOX_URL = os.environ.get("MAILBOX_URL", "http://127.0.0.1:8090/mails")
SMTP_ADDRESS = os.environ.get("SMTP_ADDRESS", "127.0.0.1:8025")


class Receipt(msgspec.Struct, frozen=True):
    """``id``: under what the receiver knows the effect."""

    id: str


class Rejected(Exception):
    """The receiver answered that it will not."""


@tool(
    effect="external",
    scope=("name", "sha256"),
    on_unknown="query",
    timeout=30,
    not_executed=(ClientConnectorError,),
    rejected=(Rejected,),
)
async def upload(name: str, sha256: str, pdf: str, key: str = "") -> Receipt:
    """Puts an object into the store. ``pdf`` in base64."""
    content = _checked(name, base64.b64decode(pdf), sha256)
    return await _http("PUT", f"{STORE_URL}/{name}", key, data=content)


@upload.reconcile
async def uploaded(key: str) -> Receipt | None:
    return await _ask(STORE_URL, key)


@tool(
    effect="external",
    scope=("to", "subject", "sha256"),
    on_unknown="query",
    timeout=30,
    not_executed=(ConnectionRefusedError, smtplib.SMTPConnectError),
    rejected=(smtplib.SMTPSenderRefused, smtplib.SMTPRecipientsRefused),
    provider_ref=attrgetter("id"),
)
async def send_mail(to: str, subject: str, body: str, name: str, sha256: str, key: str = "") -> Receipt:
    """Mails the object ``name`` of the store; refuses to send anything but the bytes with that hash."""
    content = await _fetch(name, sha256)
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "reports@example.org", to, subject
    message["Message-ID"], message["Date"] = _message_id(key), localtime()
    message.set_content(body)
    message.add_attachment(content, maintype="application", subtype="pdf", filename=name)
    await asyncio.to_thread(_submit, message)
    return Receipt(_message_id(key))


@send_mail.reconcile
async def mailed(key: str) -> Receipt | None:
    return await _ask(MAILBOX_URL, _message_id(key))


@tool(
    effect="external",
    scope=("event", "subject"),
    on_unknown="query",
    timeout=30,
    not_executed=(ClientConnectorError,),
    rejected=(Rejected,),
)
async def notify(event: str, subject: str, key: str = "") -> Receipt:
    """Tells the webhook."""
    return await _http("POST", WEBHOOK_URL, key, json={"event": event, "subject": subject})


@notify.reconcile
async def notified(key: str) -> Receipt | None:
    return await _ask(WEBHOOK_URL, key)


def _message_id(key: str) -> str:
    return f"<{key}@reports.example.org>"


def _submit(message: EmailMessage) -> None:
    host, _, port = SMTP_ADDRESS.rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=20) as server:
        server.send_message(message)


async def _http(method: str, url: str, key: str, **body: Any) -> Receipt:
    async with ClientSession() as session, session.request(method, url, headers={"Idempotency-Key": key}, **body) as response:
        if 400 <= response.status < 500:
            raise Rejected(f"{method} {url}: {response.status} {response.reason}")
        response.raise_for_status()
        return Receipt((await response.json())["key"])


async def _ask(url: str, key: str) -> Receipt | None:
    async with ClientSession() as session, session.get(url, params={"key": key}) as response:
        response.raise_for_status()
        items = (await response.json())["items"]
    return Receipt(items[0]["key"]) if items else None


async def _fetch(name: str, sha256: str) -> bytes:
    try:
        async with ClientSession() as session, session.get(f"{STORE_URL}/{name}") as response:
            response.raise_for_status()
            return _checked(name, await response.read(), sha256)
    except ClientError as error:
        raise NotExecuted(f"{name} could not be read from the store: {error}") from error


def _checked(name: str, content: bytes, sha256: str) -> bytes:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise NotExecuted(f"this is another {name} than the one that was asked for")
    return content

"""The outside world of the example: a mail server, an object store and a webhook receiver in one process.

It remembers every effect, so that anybody can count them, and answers the question an agent asks after a crash: "has the
effect with this key happened?" Mail comes by SMTP; the rest is HTTP:

    PUT  /objects/<name>     body: the object, header Idempotency-Key   GET /objects/<name>
    POST /notifications      body: JSON,       header Idempotency-Key
    GET  /objects  /notifications  /mails      {"items": [...]}, with ?key=K only those under that key

The key of a mail is its Message-ID. One item is one effect: a repeated PUT under a known key answers with the first receipt
and adds nothing, unless the store was started with ``--naive``, which does what it is told as often as it is told.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
from datetime import UTC, datetime
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiosmtpd.smtp import SMTP, Envelope, Session

HTTP_PORT, SMTP_PORT = 8090, 8025


class StoredFile(msgspec.Struct, frozen=True, rename="camel"):
    """``path``: where the sink keeps it on this machine. ``size`` in bytes."""

    name: str
    sha256: str
    size: int
    path: str


class Effect(msgspec.Struct, frozen=True, rename="camel"):
    """One thing that happened in the outside world. ``at``: RFC 3339."""

    key: str
    at: str
    subject: str
    to: list[str] = []
    files: list[StoredFile] = []
    body: Any = None


class Sinks:
    """``folder`` receives objects and mails as files. ``naive``: the object store stores again what it has under the same key."""

    def __init__(self, folder: Path, *, naive: bool = False) -> None:
        self.folder = folder
        self.naive = naive
        self.effects: dict[str, list[Effect]] = {"objects": [], "notifications": [], "mails": []}

    def keep(self, kind: str, name: str, content: bytes) -> StoredFile:
        path = self.folder / kind / Path(name).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return StoredFile(path.name, hashlib.sha256(content).hexdigest(), len(content), str(path.resolve()))

    def record(self, kind: str, effect: Effect) -> Effect:
        self.effects[kind].append(effect)
        return effect

    def find(self, kind: str, key: str | None) -> list[Effect]:
        return [effect for effect in self.effects[kind] if key is None or effect.key == key]

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802, aiosmtpd's name
        raw = envelope.content if isinstance(envelope.content, bytes) else str(envelope.content).encode()
        message = message_from_bytes(raw, policy=policy.default)
        self.keep("mails", f"{len(self.effects['mails']) + 1}.eml", raw)
        files = [self.keep("mails", part.get_filename("attachment"), part.get_content()) for part in message.iter_attachments()]
        self.record(
            "mails", Effect(str(message["Message-ID"]), _now(), str(message["Subject"]), [str(to) for to in envelope.rcpt_tos], files)
        )
        return "250 OK"

    async def put_object(self, request: web.Request) -> web.Response:
        key, name = request.headers.get("Idempotency-Key", ""), request.match_info["name"]
        known = [] if self.naive or not key else self.find("objects", key)
        if known:
            return _json(known[0])
        stored = self.keep("objects", name, await request.read())
        return _json(self.record("objects", Effect(key, _now(), name, files=[stored])), status=201)

    async def get_object(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / "objects" / Path(request.match_info["name"]).name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def post_notification(self, request: web.Request) -> web.Response:
        body = await request.json()
        effect = Effect(request.headers.get("Idempotency-Key", ""), _now(), str(body.get("event", "")), body=body)
        return _json(self.record("notifications", effect), status=202)

    async def list_effects(self, request: web.Request) -> web.Response:
        return _json({"items": self.find(request.match_info["kind"], request.query.get("key"))})

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.put("/objects/{name}", self.put_object),
                web.get("/objects/{name}", self.get_object),
                web.post("/notifications", self.post_notification),
                web.get("/{kind:objects|notifications|mails}", self.list_effects),
            ]
        )
        return app


async def serve(sinks: Sinks, host: str, http_port: int, smtp_port: int, stop: asyncio.Event) -> None:
    """Prints ``ready http=<url> smtp=<host>:<port>`` once both ports listen (port 0: any free one); returns when ``stop`` is set."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(sinks.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, http_port).start()
    mail = await loop.create_server(lambda: SMTP(sinks, hostname="sink.example", enable_SMTPUTF8=True, loop=loop), host, smtp_port)
    try:
        print(f"ready http=http://{host}:{runner.addresses[0][1]} smtp={host}:{mail.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
    finally:
        mail.close()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.report.sinks", description="Mail server, object store and webhook receiver.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=HTTP_PORT)
    parser.add_argument("--smtp-port", type=int, default=SMTP_PORT)
    parser.add_argument("--folder", type=Path, default=Path(".perdure/sinks"))
    parser.add_argument("--naive", action="store_true", help="store an object again when its key is known")
    options = parser.parse_args()

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        sinks = Sinks(options.folder, naive=options.naive)
        await serve(sinks, options.host, options.http_port, options.smtp_port, stop)

    asyncio.run(run())


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


if __name__ == "__main__":
    main()

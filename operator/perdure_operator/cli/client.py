"""A small synchronous client of the gateway's public API.

Tries the gateways in turn: a request is sent to the next one only if it was not answered *and* repeating it changes nothing (a read, a
PUT, or a POST with an Idempotency-Key or a verb that is idempotent by itself). Problem JSON becomes a typed error with its ``action``.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from perdure_operator.cli.views import EventView, RunView

TIMEOUT_SECONDS = 30.0
STREAM_TIMEOUT_SECONDS = 90.0
"""A tail that says nothing for so long, not even a comment, is opened again."""


class ApiError(Exception):
    """Base of what can go wrong. ``action`` says what to do, ``exit_code`` is the command's."""

    exit_code = 1

    def __init__(self, detail: str, *, code: str = "", status: int = 0, action: str = "", retryable: bool = False) -> None:
        super().__init__(detail)
        self.code, self.status, self.action, self.retryable = code, status, action, retryable


class Refused(ApiError):
    """The gateway understood and said no."""


class Invalid(ApiError):
    """The request is not well-formed."""

    exit_code = 2


class NotFound(ApiError):
    exit_code = 3


class Unavailable(ApiError):
    """No gateway answered, or the store behind it did not."""

    exit_code = 4


class Client:
    """``urls``: gateways, http or https. Raises :class:`ApiError` subclasses. A client may be used by several threads."""

    def __init__(self, urls: Sequence[str], token: str, *, hint: str = "") -> None:
        self._urls = list(urls)
        self._token = token
        self._hint = hint

    # ------------------------------------------------------------------------------------------------ what one asks for

    def run(self, namespace: str, run: str) -> RunView:
        return read(RunView, self.get(run_path(namespace, run)))

    def runs(self, namespace: str, **filters: str | None) -> Iterator[RunView]:
        return (read(RunView, item) for item in self.run_items(namespace, **filters))

    def run_items(self, namespace: str, **filters: str | None) -> Iterator[Any]:
        """All of them, page by page, oldest first. ``-`` is every namespace. Filters: state, pool, parent."""
        query: dict[str, Any] = {"limit": 500, **{k: v for k, v in filters.items() if v is not None}}
        while True:
            page = self.get(f"/v1/namespaces/{_q(namespace)}/runs", query)
            yield from page["items"]
            if not page.get("next"):
                return
            query["after"] = page["next"]

    def events(self, namespace: str, run: str, start: int = 1) -> Iterator[EventView]:
        return (read(EventView, item) for item in self.event_items(namespace, run, start))

    def event_items(self, namespace: str, run: str, start: int = 1) -> Iterator[Any]:
        """From sequence ``start`` to the present end of the log."""
        while True:
            page = self.get(run_path(namespace, run, "events"), {"from": start, "limit": 500})
            yield from page["items"]
            if not page["items"] or not page.get("next"):
                return
            start = page["items"][-1]["seq"] + 1

    def put_pool(self, namespace: str, name: str, spec: dict[str, Any]) -> None:
        self.send("PUT", f"/v1/namespaces/{_q(namespace)}/pools/{_q(name)}", {"spec": spec})

    def submit(self, namespace: str, body: dict[str, Any], key: str) -> RunView:
        """The run that this key made, now or before."""
        return read(RunView, self._request("POST", f"/v1/namespaces/{_q(namespace)}/runs", body, key=key, repeatable=True))

    def signal(self, namespace: str, run: str, name: str, payload: Any, signal_id: str) -> dict[str, Any]:
        path = run_path(namespace, run, f"signals/{_q(name)}")
        return dict(self._request("POST", path, payload, key=signal_id, repeatable=True))

    def tail(self, namespace: str, run: str, start: int = 1) -> Iterator[EventView]:
        """Live, from sequence ``start``, until the run is terminal; goes on after a lost connection."""
        attempts = 0
        while True:
            try:
                for kind, data in self._stream(run_path(namespace, run, "tail"), {"from": start}):
                    attempts = 0
                    if kind == "end":
                        return
                    event = read(EventView, json.loads(data))
                    start = event.seq + 1
                    yield event
            except Unavailable:
                attempts += 1
                if attempts > 2 * len(self._urls):
                    raise

    # ------------------------------------------------------------------------------------------------ plain requests

    def get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        """Decoded JSON."""
        return self._request("GET", path + (f"?{urlencode(query)}" if query else ""), repeatable=True)

    def send(self, method: str, path: str, body: Any) -> Any:
        return self._request(method, path, body, repeatable=True)

    def _request(self, method: str, path: str, body: Any = None, *, key: str = "", repeatable: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None
        if method != "GET":
            data = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
            headers["Content-Type"] = "application/json"
        if key:
            headers["Idempotency-Key"] = key
        failure: Exception | None = None
        for url in list(self._urls):
            connection = _connect(url, TIMEOUT_SECONDS)
            try:
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
                raw = response.read()
            except (OSError, http.client.HTTPException) as error:
                failure = error
                if not repeatable and not isinstance(error, ConnectionRefusedError):
                    break
                self._turn(url)
                continue
            finally:
                connection.close()
            if response.status == 503 and repeatable and url != self._urls[-1]:
                self._turn(url)
                failure = _problem(response.status, raw)
                continue
            if response.status >= 400:
                raise _problem(response.status, raw)
            return json.loads(raw) if raw else None
        raise self._unreachable(failure)

    def _stream(self, path: str, query: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """(event, data) of a server-sent event stream; ends when the connection does."""
        url = self._urls[0]
        connection = _connect(url, STREAM_TIMEOUT_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}
            connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _problem(response.status, response.read())
            kind: str = "message"
            data: list[str] = []
            for raw in response:
                line = raw.decode().rstrip("\r\n")
                field, _, value = line.partition(":")
                if not line and data:
                    yield kind, "\n".join(data)
                    kind, data = "message", []
                elif field == "event":
                    kind = value.strip()
                elif field == "data":
                    data.append(value.removeprefix(" "))
            raise ConnectionResetError("the stream ended")
        except (OSError, http.client.HTTPException) as error:
            self._turn(url)
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _turn(self, url: str) -> None:
        """The gateway that failed is tried last from now on."""
        if self._urls[0] == url:
            self._urls = [*self._urls[1:], url]

    def _unreachable(self, failure: Exception | None) -> ApiError:
        if isinstance(failure, ApiError):
            return failure
        action = self._hint or "Check that the gateway runs and can be reached, then try again."
        return Unavailable(f"no gateway answers at {', '.join(self._urls)}: {failure}", code="unreachable", action=action, retryable=True)


T = TypeVar("T")


def read(kind: type[T], value: Any) -> T:
    """An answer as one of the views. Raises Refused when it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Refused(
            f"the gateway's answer is not what this version understands: {error}",
            code="unexpected-answer",
            action="Use a command line and a gateway of the same version.",
        ) from None


def _connect(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.netloc, timeout=timeout, context=ssl.create_default_context())
    return http.client.HTTPConnection(parts.netloc, timeout=timeout)


def _problem(status: int, raw: bytes) -> ApiError:
    try:
        body = json.loads(raw)
        problem = body if isinstance(body, dict) else {}
    except ValueError:
        problem = {}
    detail = str(
        problem.get("detail") or problem.get("title") or raw[:500].decode(errors="replace") or http.client.responses.get(status, "")
    )
    kind = NotFound if status == 404 else Invalid if status in (400, 413, 422) else Unavailable if status in (502, 503, 504) else Refused
    return kind(
        detail,
        code=str(problem.get("type", "")).removeprefix("urn:perdure:"),
        status=status,
        action=str(problem.get("action", "")),
        retryable=bool(problem.get("retryable", False)),
    )


def _q(part: str) -> str:
    return quote(part, safe="")


def run_path(namespace: str, run: str, rest: str = "") -> str:
    return f"/v1/namespaces/{_q(namespace)}/runs/{_q(run)}" + (f"/{rest}" if rest else "")

"""A small synchronous client of the gateway's public API.

Tries the ways to a gateway in turn. A request that was not answered is sent again on the next one: repeating changes nothing, because
all are reads, PUTs, POSTs with an Idempotency-Key, or verbs that are idempotent by themselves. Problem JSON becomes a typed error with
its ``action``.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote, urlencode

import msgspec

from perdure_operator.cli.routes import Route
from perdure_operator.cli.views import EventView, RunView

TIMEOUT_SECONDS = 30.0
MAX_PAGE = 500
STREAM_TIMEOUT_SECONDS = 90.0
"""A tail that says nothing for so long, not even a comment, is opened again."""


Credential = Callable[[bool], str]
"""Gives a bearer token; asked with True for another one, since the last was refused."""


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


class Forbidden(ApiError):
    """Whoever asked is not known to the gateway (401), or may not do this (403)."""

    exit_code = 4


class Unavailable(ApiError):
    """No gateway answered, or the store behind it did not."""

    exit_code = 5


Elsewhere = Callable[[str, str], NotFound | None]
"""What else is known of a run (namespace, name) that the gateway does not know."""


class Client:
    """``routes``: ways to the gateways, or their addresses. Raises :class:`ApiError` subclasses. May be used by several threads."""

    def __init__(
        self, routes: Sequence[Route | str], token: str | Credential, *, hint: str = "", elsewhere: Elsewhere = lambda *_: None
    ) -> None:
        self._routes = [Route(route) if isinstance(route, str) else route for route in routes]
        self._credential: Credential = token if callable(token) else lambda _: token
        self._hint, self._elsewhere = hint, elsewhere

    # ------------------------------------------------------------------------------------------------ what one asks for

    def run(self, namespace: str, run: str) -> RunView:
        return read(RunView, self.get(run_path(namespace, run)))

    def runs(self, namespace: str, **filters: str | None) -> Iterator[RunView]:
        return (read(RunView, item) for item in self.run_items(namespace, **filters))

    def run_items(self, namespace: str, **filters: str | None) -> Iterator[Any]:
        """All of them, page by page, oldest first. ``-`` is every namespace. Filters: state, pool, parent."""
        query: dict[str, Any] = {"limit": MAX_PAGE, **{k: v for k, v in filters.items() if v is not None}}
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
            page = self.get(run_path(namespace, run, "events"), {"from": start, "limit": MAX_PAGE})
            yield from page["items"]
            if not page["items"] or not page.get("next"):
                return
            start = page["items"][-1]["seq"] + 1

    def records(self, namespace: str, run: str, what: Literal["journal", "ledger"]) -> list[Any]:
        """All of them, page by page."""
        items: list[Any] = []
        following: int | None = 1
        while following is not None:
            page = self.get(run_path(namespace, run, what), {"from": following} if following > 1 else None)
            items += page["items"]
            following = page.get("next")
        return items

    def put_pool(self, namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Gives the specification as it is stored."""
        stored: dict[str, Any] = self.send("PUT", f"/v1/namespaces/{_q(namespace)}/pools/{_q(name)}", {"spec": spec})["spec"]
        return stored

    def pools(self) -> dict[str, dict[str, Any]]:
        """The specifications of all pools, by namespace/name."""
        return {item["pool"]: item["spec"] for item in self.get("/v1/namespaces/-/pools")["items"]}

    def submit(self, namespace: str, body: dict[str, Any], key: str) -> RunView:
        """The run that this key made, now or before."""
        return read(RunView, self._request("POST", f"/v1/namespaces/{_q(namespace)}/runs", body, key=key))

    def signal(self, namespace: str, run: str, name: str, payload: Any, signal_id: str) -> dict[str, Any]:
        return dict(self._request("POST", run_path(namespace, run, f"signals/{_q(name)}"), payload, key=signal_id))

    def delivery_items(self, namespace: str, trigger: str, *, state: str | None = None, page: int = MAX_PAGE) -> Iterator[Any]:
        """All of them, the youngest first; ``page``: how many are asked for at once."""
        query: dict[str, Any] = {"limit": min(page, MAX_PAGE)} | ({"state": state} if state is not None else {})
        while True:
            answer = self.get(trigger_path(namespace, trigger, "deliveries"), query)
            yield from answer["items"]
            if not answer.get("next"):
                return
            query["before"] = answer["next"]

    def redrive(self, namespace: str, trigger: str, delivery: str) -> dict[str, Any]:
        return dict(self.send("POST", trigger_path(namespace, trigger, f"deliveries/{_q(delivery)}/redrive"), None))

    def fire(self, namespace: str, trigger: str, payload: Any, key: str) -> dict[str, Any]:
        return dict(self._request("POST", trigger_path(namespace, trigger, "emit"), payload, key=key))

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
                if attempts > 2 * len(self._routes):
                    raise

    # ------------------------------------------------------------------------------------------------ plain requests

    def get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        """Decoded JSON."""
        return self._request("GET", path + (f"?{urlencode(query)}" if query else ""))

    def send(self, method: str, path: str, body: Any) -> Any:
        return self._request(method, path, body)

    def close(self) -> None:
        for route in self._routes:
            route.close()

    def _request(self, method: str, path: str, body: Any = None, *, key: str = "") -> Any:
        headers = {"Accept": "application/json"}
        data = None
        if method != "GET":
            data = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
            headers["Content-Type"] = "application/json"
        if key:
            headers["Idempotency-Key"] = key
        failure: Exception | None = None
        for route in list(self._routes):
            try:
                status, raw = self._send(route, method, path, data, headers)
            except (OSError, http.client.HTTPException) as error:
                failure = error
                self._turn(route)
                continue
            if status == 503 and route is not self._routes[-1]:
                self._turn(route)
                failure = _problem(status, raw)
                continue
            if status >= 400:
                raise self._refused(path, status, raw)
            return json.loads(raw) if raw else None
        raise self._unreachable(failure)

    def _send(self, route: Route, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        status, raw = route.exchange(method, path, data, headers | self._authorization(), TIMEOUT_SECONDS)
        if status == 401:
            # Another credential, if there is one: tokens run out while one watches.
            status, raw = route.exchange(method, path, data, headers | self._authorization(fresh=True), TIMEOUT_SECONDS)
        return status, raw

    def _authorization(self, *, fresh: bool = False) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._credential(fresh)}"}

    def _stream(self, path: str, query: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """(event, data) of a server-sent event stream; ends when the connection does."""
        route = self._routes[0]
        try:
            connection = route.connect(STREAM_TIMEOUT_SECONDS)
            try:
                headers = {"Accept": "text/event-stream"} | self._authorization()
                connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise self._refused(path, response.status, response.read())
                yield from _server_sent(response)
                raise ConnectionResetError("the stream ended")
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            self._turn(route)
            raise self._unreachable(error) from None

    def _turn(self, route: Route) -> None:
        """The way that failed is tried last from now on."""
        if self._routes[0] is route:
            self._routes = [*self._routes[1:], route]

    def _refused(self, path: str, status: int, raw: bytes) -> ApiError:
        error = _problem(status, raw)
        if error.code == "run-not-found" and (run := _RUN_PATH.match(path)):
            return self._elsewhere(unquote(run["namespace"]), unquote(run["run"])) or error
        return error

    def _unreachable(self, failure: Exception | None) -> ApiError:
        if isinstance(failure, ApiError):
            return failure
        action = self._hint or "Check that the gateway runs and can be reached, then try again."
        where = ", ".join(map(str, self._routes))
        return Unavailable(f"no gateway answers at {where}: {failure}", code="unreachable", action=action, retryable=True)


def _server_sent(response: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    kind, data = "message", list[str]()
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


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid, 401: Forbidden, 403: Forbidden, 404: NotFound, 413: Invalid, 422: Invalid, 502: Unavailable, 503: Unavailable,
    504: Unavailable,
}  # fmt: skip


def _problem(status: int, raw: bytes) -> ApiError:
    try:
        body = json.loads(raw)
        problem = body if isinstance(body, dict) else {}
    except ValueError:
        problem = {}
    detail = str(
        problem.get("detail") or problem.get("title") or raw[:500].decode(errors="replace") or http.client.responses.get(status, "")
    )
    kind = _BY_STATUS.get(status, Refused)
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


def trigger_path(namespace: str, trigger: str, rest: str) -> str:
    return f"/v1/namespaces/{_q(namespace)}/triggers/{_q(trigger)}/{rest}"


_RUN_PATH = re.compile("/v1/namespaces/(?P<namespace>[^/]+)/runs/(?P<run>[^/]+)")

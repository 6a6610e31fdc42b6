"""Watches objects, with kopf as the shell around watch streams: every event goes into a cache and its key to whoever asked for it.

kopf runs in a thread and a loop of its own (in a shared loop it would cancel tasks that are not its own when it ends), with ``on.event``
handlers only, so it never writes to the cluster. News are handed over by ``call_soon_threadsafe``; all methods belong to our loop.

    thread: kopf  LIST → WATCH → event ──►  our loop: cache → on_change
                    └─ a watch begins after a list ──► our own consistent LIST → cache.replace

kopf does not notice what was deleted between a watch that broke and its next list (after a 410, say). So each watch that begins anew is
followed by one more list, of ours, which is younger than the point where the watch begins: then nothing can be missed. ``synced`` says
that this has happened for all watches once.

kopf is given an HTTP session of ours. That is where tokens are renewed, and where the age of the last news is measured, bookmarks
included: a quiet cluster is not a silent watch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import kopf
import structlog

from perdure_operator.kube.cache import Cache, Object, OnChange
from perdure_operator.kube.client import KubeApi, Resource
from perdure_operator.kube.connection import Connection, connect
from perdure_operator.kube.errors import KubeError, KubeUnavailable
from perdure_operator.kube.metrics import WATCH_AGE
from perdure_operator.kube.names import FIELD_MANAGER

log = structlog.get_logger(__name__)

STOP_SECONDS = 10.0
"""A thread that has not ended by then is left to end with the process."""
AGAIN_SECONDS = 1.0
"""Between two tries of something that the apiserver does not do now."""

_Place = tuple[Resource, str | None]


class InformerEnded(KubeError):
    """The watches ended though nobody stopped them."""

    code = "informer-ended"
    action = "Start again; the log says what kopf ran into."


class Informer:
    """``namespaces`` empty: all of them. ``selectors``: of kinds of which not all objects are ours. ``on_change`` is called in the
    loop in which ``start`` was called."""

    def __init__(
        self, resources: Sequence[Resource], namespaces: Sequence[str], on_change: OnChange, selectors: Mapping[Resource, str], *,
        kube: KubeApi, connection: Callable[[], Awaitable[Connection]] = connect,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.synced = asyncio.Event()
        self._cache = Cache(on_change)
        self._kube, self._selectors, self._connection, self._ticks = kube, selectors, connection, ticks
        self._resources, self._namespaces = tuple(resources), tuple(namespaces)
        self._places: dict[str, _Place] = {
            resource.path(namespace): (resource, namespace) for resource in resources for namespace in (*namespaces,) or (None,)
        }
        self._heard: dict[str, float] = {}
        self._uncorrected = set(self._places.values())
        self._corrections: asyncio.Queue[_Place] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self) -> asyncio.Task[None]:
        """The task ends with ``stop``, or with the error that ended the watches: whoever started it ends the process then."""
        self._task = asyncio.create_task(self.run(), name="informer")
        return self._task

    async def stop(self) -> None:
        """Returns when the thread has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def run(self) -> None:
        """Until cancelled. Raises what ended kopf, or InformerEnded."""
        await self._served()
        self._heard = dict.fromkeys(self._places, self._ticks())
        WATCH_AGE.set_function(self.age)
        kopf_thread = _Kopf(self, asyncio.get_running_loop())
        tasks = {asyncio.create_task(self._correct()), asyncio.create_task(kopf_thread.run())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _served(self) -> None:
        """kopf asks once which kinds there are, and would never watch one that comes later."""
        for resource, namespace in self._places.values():
            while True:
                try:
                    await self._kube.get(resource, namespace or "default", FIELD_MANAGER)
                    break
                except KubeUnavailable as error:
                    log.warning("waiting for the apiserver to serve a kind", kind=resource.plural, error=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)

    async def _correct(self) -> None:
        while True:
            place = resource, namespace = await self._corrections.get()
            try:
                objects, version = await self._kube.list(resource, namespace, labels=self._selectors.get(resource, ""))
            except KubeUnavailable as error:
                log.warning("a list failed", kind=resource.plural, error=str(error))
                await asyncio.sleep(error.retry_after or AGAIN_SECONDS)
                self._corrections.put_nowait(place)
                continue
            self.replace(resource, objects, version, namespace)
            self._uncorrected.discard(place)
            if not self._uncorrected:
                self.synced.set()

    # --------------------------------------------------------------------------------------------------------- reads

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The newest state that was seen."""
        return self._cache.get(resource, namespace, name)

    def items(self, resource: Resource, namespace: str | None = None) -> Iterable[Object]:
        return self._cache.items(resource, namespace)

    def deleted(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The last state of an object that was seen deleted, until it is forgotten."""
        return self._cache.deleted(resource, namespace, name)

    def forget(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        self._cache.forget(resource, namespace, name, uid)

    def replace(self, resource: Resource, objects: Iterable[Object], version: str, namespace: str | None = None) -> None:
        """What a consistent list of a namespace, or of all, has found."""
        self._cache.replace(resource, objects, version, namespace)

    def age(self) -> float:
        """Seconds since the most silent of the watches was last heard; apiservers send a bookmark about once a minute."""
        now = self._ticks()
        return now - min(self._heard.values(), default=now)

    # ------------------------------------------------------------------------------------------- news, from the thread

    def event(self, resource: Resource, kind: str | None, found: Object) -> None:
        if kind == "DELETED":
            self._cache.gone(resource, found)
        else:
            self._cache.seen(resource, found)

    def watching(self, path: str) -> None:
        self._corrections.put_nowait(self._places[path])

    def heard(self, path: str) -> None:
        """Called in the thread: one store of a float."""
        if path in self._heard:
            self._heard[path] = self._ticks()


class _Kopf:
    """The thread, and everything in it."""

    def __init__(self, informer: Informer, ours: asyncio.AbstractEventLoop) -> None:
        self._informer, self._ours = informer, ours
        self._ended: asyncio.Future[None] = ours.create_future()
        self._stopped = False
        self._stop: Callable[[], object] | None = None
        self._listed: set[str] = set()
        self._thread = threading.Thread(target=self._main, name="kopf", daemon=True)

    async def run(self) -> None:
        """In our loop: until kopf ends. Cancelled, it ends kopf first."""
        self._thread.start()
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            # In this order, and the thread in the other: one of the two sees what the other has set.
            self._stopped = True
            if self._stop is not None and not self._ended.done():
                self._stop()
            await asyncio.wait({self._ended}, timeout=STOP_SECONDS)
            if self._ended.done():
                self._thread.join()
            raise
        raise InformerEnded

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate())  # also where our own loop is another kind
        except BaseException as caught:  # noqa: BLE001 (whatever it is, it is raised again in our loop)
            error = caught
        self._ours.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if error is None or self._stopped:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _operate(self) -> None:
        informer, stop, loop = self._informer, asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        if self._stopped:
            return
        connection = await informer._connection()
        registry = kopf.OperatorRegistry()
        for resource in informer._resources:
            kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(self._handler(resource))

        async def login(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=connection.endpoint.server, aiohttp_session=self._session(connection))

        kopf.on.login(registry=registry)(login)
        logging.getLogger("kopf").setLevel(logging.WARNING)
        await kopf.operator(
            registry=registry, settings=self._settings(), standalone=True, stop_flag=stop,
            clusterwide=not informer._namespaces, namespaces=informer._namespaces,
        )  # fmt: skip

    def _handler(self, resource: Resource) -> Callable[..., Awaitable[None]]:
        async def handle(event: Any, **_: Any) -> None:
            self._ours.call_soon_threadsafe(self._informer.event, resource, event["type"], event["object"])

        handle.__name__ = resource.plural
        return handle

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.persistence.finalizer = "perdure.dev/informer"
        settings.networking.request_timeout = 60
        settings.networking.connect_timeout = 5
        settings.networking.error_backoffs = [1, 2, 5, 10, 20]
        settings.watching.server_timeout = 300
        settings.watching.initial_streaming = False
        settings.queueing.worker_limit = None
        settings.queueing.exit_timeout = 0.5
        for resource, selector in self._informer._selectors.items():
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = selector
        return settings

    def _session(self, connection: Connection) -> aiohttp.ClientSession:
        endpoint = connection.endpoint
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=endpoint.tls()),
            headers={"User-Agent": FIELD_MANAGER},
            proxy=endpoint.proxy,
            trust_env=True,
            middlewares=[self._authorized(connection), self._observed],
        )

    def _authorized(self, connection: Connection) -> aiohttp.ClientMiddlewareType:
        """Requests carry the token of the moment. kopf never sees a 401: it would close the session under the other watches."""

        async def send(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            fresh = False
            while True:
                if (authorization := await connection.authorization(fresh=fresh)) is not None:
                    request.headers["Authorization"] = authorization
                response = await handler(request)
                if response.status != 401:
                    return response
                response.release()
                log.warning("the apiserver does not accept our token", path=request.url.path)
                await asyncio.sleep(AGAIN_SECONDS)
                fresh = True

        return send

    async def _observed(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """Lists and watches are told of as they begin, and each piece of an answer as it comes."""
        path, informer = request.url.path, self._informer
        if path in informer._places:
            if "watch" not in request.url.query:
                self._listed.add(path)
            elif path in self._listed:
                self._listed.discard(path)
                self._ours.call_soon_threadsafe(informer.watching, path)
        response = await handler(request)
        if response.status < 300:
            informer.heard(path)
            response.content = _Audible(response.content, lambda: informer.heard(path))  # type: ignore[assignment]
        return response


class _Audible:
    """A body that tells of each piece of it."""

    def __init__(self, stream: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._stream, self._heard = stream, heard

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._stream.iter_chunked(size):
            self._heard()
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

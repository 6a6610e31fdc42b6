"""Reads objects of the API server over one connection: tests look often, and a program started each time would cost most of it."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tests.cluster.errors import ClusterError

Json = dict[str, Any]
SECONDS = 30.0


class Reader:
    """``dial``: calls a function where the API server is within reach; a socket that is opened there can be used from anywhere."""

    def __init__(self, kubeconfig: Path, dial: Callable[[Callable[[], None]], None]) -> None:
        self._kubeconfig = kubeconfig
        self._dial = dial
        self._connection: http.client.HTTPSConnection | None = None

    def get(self, path: str, **query: str) -> Json | None:
        """None if it is not there. Raises ClusterError."""
        wanted = f"{path}?{urlencode(query)}" if query else path
        try:
            status, body = self._ask(wanted)
        except (OSError, http.client.HTTPException):
            self._connection = None  # it has been restarted since
            try:
                status, body = self._ask(wanted)
            except (OSError, http.client.HTTPException) as error:
                self._connection = None
                raise ClusterError(f"the API server does not answer: {error}") from None
        if status == 404:
            return None
        if status != 200:
            raise ClusterError(f"GET {wanted}: {status} {body.decode(errors='replace')[:500]}")
        found: Json = json.loads(body)
        return found

    def _ask(self, path: str) -> tuple[int, bytes]:
        if self._connection is None:
            connection = self._connect()
            self._dial(connection.connect)
            self._connection = connection
        self._connection.request("GET", path, headers={"Accept": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read()

    def _connect(self) -> http.client.HTTPSConnection:
        config = json.loads(self._kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        tls = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
        with tempfile.NamedTemporaryFile("w") as pair:
            pair.write(_decoded(user["client-certificate-data"]) + _decoded(user["client-key-data"]))
            pair.flush()
            tls.load_cert_chain(pair.name)
        server = urlsplit(cluster["server"])
        return http.client.HTTPSConnection(server.hostname or "", server.port, timeout=SECONDS, context=tls)


def _decoded(data: str) -> str:
    return base64.b64decode(data).decode()

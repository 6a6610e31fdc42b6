"""Kubeconfig files as people have them: merged, with contexts, tokens, token files, client certificates and credential plugins.

Read here and not by the library: to load it costs 6 s of CPU time, which a person waits for at every command, and where a credential
plugin fails it goes on without a credential. Users with an ``auth-provider``, which kubectl has not known since 1.26, are left to it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perdure_operator.kube.connection import KUBECONFIG_SECONDS, Connection, Endpoint, NoCluster

Json = dict[str, Any]


class NoCredential(NoCluster):
    """The kubeconfig's way to a credential failed."""

    code = "no-credential"
    action = "Log in again as your cluster's manual says; kubectl get namespaces must work first."


@dataclass(frozen=True)
class Context:
    """A context with what it names. Paths in ``cluster`` and ``user`` are absolute."""

    name: str
    namespace: str
    cluster: Json
    user: Json


def default_paths(env: Mapping[str, str] = os.environ) -> str:
    """``KUBECONFIG``, several files separated as in PATH, else the file in the home folder."""
    return env.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def read_context(paths: str, name: str | None = None) -> Context:
    """The context ``name``, else the current one. As in kubectl the first file that has an entry of a name wins. Raises NoCluster."""
    merged: dict[str, dict[str, Json]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = None
    for path in (Path(part).expanduser() for part in paths.split(os.pathsep) if part):
        content = _content(path)
        current = current or content.get("current-context")
        for kind, known in merged.items():
            for entry in content.get(kind) or ():
                known.setdefault(entry["name"], _absolute(entry.get(kind.removesuffix("s")) or {}, path.absolute().parent))
    if not (chosen := name or current):
        raise NoCluster(f"{paths}: there is no current context", action="Name one with --context, or: kubectl config use-context NAME.")
    if (context := merged["contexts"].get(chosen)) is None:
        names = ", ".join(sorted(merged["contexts"])) or "none"
        raise NoCluster(f"{paths}: there is no context {chosen}", action=f"Contexts that there are: {names}.")
    cluster = merged["clusters"].get(context.get("cluster", ""))
    if cluster is None or not cluster.get("server"):
        raise NoCluster(f"{paths}: the context {chosen} names no cluster with a server", action="Correct the kubeconfig.")
    return Context(chosen, context.get("namespace") or "default", cluster, merged["users"].get(context.get("user", ""), {}))


def _content(path: Path) -> Json:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoCluster(f"the kubeconfig {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise NoCluster(f"the kubeconfig {path} is not a mapping")
    return content


def _absolute(entry: Json, folder: Path) -> Json:
    """Paths in a kubeconfig are relative to it; so is the command of a plugin, if it is a path at all."""
    files = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    entry = entry | {key: str(folder / entry[key]) for key in files if entry.get(key)}
    if (plugin := entry.get("exec")) and os.sep in plugin.get("command", ""):
        entry["exec"] = plugin | {"command": str(folder / plugin["command"])}
    return entry


class Kubeconfig(Connection):
    """``context`` is what the files said at the beginning; a credential is read anew when it is old or was refused."""

    def __init__(self, paths: str | None = None, context: str | None = None) -> None:
        super().__init__(KUBECONFIG_SECONDS)
        self._paths = paths or default_paths()
        self.context = read_context(self._paths, context)
        # Python loads certificates from files only. Private, and gone with this object.
        self._files = tempfile.TemporaryDirectory(prefix="perdure-")

    async def _read(self) -> str | None:
        context = read_context(self._paths, self.context.name)
        cluster, user = context.cluster, context.user
        if "auth-provider" in user:
            return await self._read_by_library(context.name)
        if plugin := user.get("exec"):
            user = await _run_plugin(plugin, cluster)
        self.endpoint = Endpoint(
            cluster["server"].rstrip("/"),
            self._file(cluster, "certificate-authority"),
            self._file(user, "client-certificate"),
            self._file(user, "client-key"),
            not cluster.get("insecure-skip-tls-verify"),
            cluster.get("tls-server-name"),
            cluster.get("proxy-url"),
        )
        return _authorization(user)

    def _file(self, entry: Json, key: str) -> str | None:
        """As in kubectl, inline data comes before the file."""
        if data := entry.get(f"{key}-data"):
            path = Path(self._files.name, key)
            path.touch(mode=0o600)
            try:
                path.write_bytes(base64.b64decode(data, validate=True))
            except ValueError as error:
                raise NoCluster(f"{self._paths}: {key}-data is not base64: {error}") from error
            return str(path)
        return entry.get(key)

    async def _read_by_library(self, context: str) -> str | None:
        from kubernetes.aio.client.configuration import Configuration
        from kubernetes.aio.config import ConfigException, load_kube_config

        found = Configuration()
        try:
            await load_kube_config(self._paths, context=context, client_configuration=found, persist_config=False)
        except (ConfigException, OSError, ValueError) as error:
            raise NoCredential(f"{self._paths}: {error}") from error
        self.endpoint = Endpoint(
            found.host, found.ssl_ca_cert, found.cert_file, found.key_file, found.verify_ssl, found.tls_server_name, found.proxy
        )
        token: str | None = found.api_key.get("BearerToken")
        return token


def _authorization(user: Json) -> str | None:
    token = user.get("token")
    if not token and user.get("tokenFile"):
        try:
            token = Path(user["tokenFile"]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise NoCredential(f"the token file {user['tokenFile']} cannot be read: {error}") from error
    if token:
        return f"Bearer {token}"
    if user.get("username") and user.get("password"):
        return "Basic " + base64.b64encode(f"{user['username']}:{user['password']}".encode()).decode()
    return None


async def _run_plugin(plugin: Json, cluster: Json) -> Json:
    """What the plugin answers, as fields of a user. It may talk to the person: it has this terminal."""
    told: Json = {"interactive": sys.stdin.isatty() and plugin.get("interactiveMode") != "Never"}
    if plugin.get("provideClusterInfo"):
        told["cluster"] = _cluster_info(cluster)
    request = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": told}
    env = os.environ | {item["name"]: item["value"] for item in plugin.get("env") or ()} | {"KUBERNETES_EXEC_INFO": json.dumps(request)}
    command = plugin.get("command", "")
    try:
        process = await asyncio.create_subprocess_exec(
            command, *(plugin.get("args") or ()), env=env, stdin=None if told["interactive"] else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        hint = plugin.get("installHint") or "Install it, or put its folder into PATH."
        raise NoCredential(f"the credential plugin {command} does not start: {error}", action=hint) from error
    output, _ = await process.communicate()
    if process.returncode:
        raise NoCredential(f"the credential plugin {command} ended with code {process.returncode}")
    try:
        status = json.loads(output)["status"]
        pairs = {"token": "token", "client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        given = {key: status[name] for key, name in pairs.items() if status.get(name)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoCredential(f"the credential plugin {command} did not print an ExecCredential: {error}") from error
    # The plugin prints PEM text, a kubeconfig holds base64.
    return {key: value if key == "token" else base64.b64encode(value.encode()).decode() for key, value in given.items()}


def _cluster_info(cluster: Json) -> Json:
    info: Json = {key: cluster[key] for key in ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url") if key in cluster}
    if data := cluster.get("certificate-authority-data"):
        info["certificate-authority-data"] = data
    elif path := cluster.get("certificate-authority"):
        info["certificate-authority-data"] = base64.b64encode(Path(path).read_bytes()).decode()
    for extension in cluster.get("extensions") or ():
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info

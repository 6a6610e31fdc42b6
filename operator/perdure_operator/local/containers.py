"""What the ``agent`` container of a pool's template is on this machine: a command, an environment, a folder.

There is no image here: the command runs with this machine's programs, in the folder of the manifest when the container's own does not
exist. Whatever the template asks for and a plain process cannot have is named in ``notes``, once a pool, so that nobody wonders.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.api.podtemplate import Container, EnvVar, PodSpec
from perdure_operator.kube.api.v1alpha1 import AgentPoolSpec

DEFAULT_GRACE = 30.0
_REFERENCE = re.compile(r"\$(\$?)\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")


class Unlaunchable(PerdureError):
    """The pool's template cannot be run as a local process."""

    code, status = "unlaunchable", 400
    action = "Change the AgentPool's template; the fleet tries again by itself."


@dataclass(frozen=True)
class AgentCommand:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    grace_seconds: float
    notes: tuple[str, ...]


def agent_command(spec: AgentPoolSpec, *, pod_name: str, namespace: str, folder: Path, environ: Mapping[str, str]) -> AgentCommand:
    """``folder`` is the manifest's; ``environ`` is what the agent inherits. Raises :class:`Unlaunchable`."""
    pod = spec.template.spec
    container = pod.agent
    if not container.command:
        raise Unlaunchable("the container `agent` has no command: locally there is no image whose entrypoint could be used")
    own: dict[str, str] = {}
    for variable in container.env or ():
        value = _value(variable, own, pod_name, namespace, environ)
        if value is not None:
            own[variable.name] = value
    argv = tuple(_expand(word, own) for word in (*container.command, *(container.args or ())))
    env = {**inherited(environ), "PYTHONUNBUFFERED": "1", **own}
    cwd = folder / container.working_dir if container.working_dir else folder
    notes = list(_notes(pod, container))
    if not cwd.is_dir():
        notes.append(f"workingDir {container.working_dir} does not exist here; the agent runs in {folder}")
        cwd = folder
    grace = DEFAULT_GRACE if pod.termination_grace_period_seconds is None else float(pod.termination_grace_period_seconds)
    return AgentCommand(argv, env, cwd, grace, tuple(notes))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what is Perdure's own, with this Python first in the path."""
    env = {name: value for name, value in environ.items() if not name.startswith("PERDURE_")}
    return {**env, "PATH": os.pathsep.join((str(Path(sys.executable).parent), env.get("PATH", os.defpath)))}


def _value(variable: EnvVar, own: Mapping[str, str], pod_name: str, namespace: str, environ: Mapping[str, str]) -> str | None:
    source = variable.value_from
    if source is None:
        return _expand(variable.value or "", own)
    if source.field_ref is not None:
        return {"metadata.name": pod_name, "metadata.namespace": namespace, "status.podIP": "127.0.0.1"}.get(
            source.field_ref.field_path, ""
        )
    if variable.name in environ:
        return None  # inherited under the same name
    kind, reference = ("Secret", source.secret_key_ref) if source.secret_key_ref else ("ConfigMap", source.config_map_key_ref)
    if reference is None or reference.optional:
        return None
    raise Unlaunchable(
        f"{variable.name} comes from the {kind} {reference.name}, which does not exist on this machine",
        action=f"Set {variable.name} in the environment of `perdure dev`: export {variable.name}=…",
    )


def _expand(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` as Kubernetes does it: an unknown name stays, ``$$(NAME)`` is an escape."""
    return _REFERENCE.sub(lambda m: f"$({m[2]})" if m[1] else env.get(m[2], m[0]), text)


def _notes(pod: PodSpec, container: Container) -> Iterator[str]:
    yield f"image {container.image} is not used here: `{' '.join(container.command or ())}` runs with this machine's programs"
    if container.resources is not None:
        yield "resource requests and limits are not enforced here"
    if others := [c.name for c in (*pod.containers, *(pod.init_containers or ())) if c is not container]:
        yield f"only the container `agent` runs here, not {', '.join(others)}"
    if container.env_from:
        yield "envFrom is not read here; the agent inherits the environment of `perdure dev`"
    if container.volume_mounts:
        yield f"volumes are not mounted here: {', '.join(m.mount_path for m in container.volume_mounts)}"

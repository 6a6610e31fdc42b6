"""Manifests from files: YAML or JSON, several documents a file, folders too, with the line of every mistake.

PyYAML's nodes know their lines and its values do not, so a document is composed first, checked as a tree (duplicate keys), built into
values, and parsed by the same models that a cluster uses. Scalars follow Kubernetes, not YAML 1.1: dates and 12:30 stay text.
All mistakes of all files are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from perdure_operator.domain.errors import PerdureError
from perdure_operator.kube.api import unenforced
from perdure_operator.kube.api.problems import InvalidManifest, Loc
from perdure_operator.kube.api.v1alpha1 import AgentPool, AgentRun, Manifest, Trigger, parse_manifest

MAX_FILE_BYTES = 16 * 1024 * 1024
SUFFIXES = (".yaml", ".yml", ".json")
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and where: ``line`` counts from 1, ``document`` too; 0 where there is none. ``unread``: nothing was read at all."""

    file: Path
    message: str
    line: int = 0
    document: int = 0
    unread: bool = False

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        return f"{place}: {self.message}" + (f" (document {self.document})" if self.document > 1 else "")


class ManifestError(PerdureError):
    """The files do not hold valid manifests."""

    code, status = "invalid-manifest", 400
    action = "Correct the lines named above; nothing was started."

    def __init__(self, mistakes: list[Mistake]) -> None:
        unread = all(mistake.unread for mistake in mistakes)
        super().__init__("\n".join(map(str, mistakes)), action="Check the path; nothing was started." if unread else None)
        self.mistakes = mistakes


@dataclass(frozen=True)
class Loaded:
    """One manifest and where it stands."""

    manifest: Manifest
    file: Path
    line: int
    namespace: str

    @property
    def name(self) -> str:
        return self.manifest.metadata.name or ""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


def load(paths: Iterable[Path], *, namespace: str = DEFAULT_NAMESPACE) -> list[Loaded]:
    """The AgentPools and AgentRuns in these files and folders, in order; ``namespace`` is for those that name none.

    Raises :class:`ManifestError` with every mistake of every file.
    """
    found: list[Loaded] = []
    mistakes: list[Mistake] = []
    for path in paths:
        try:
            for file in _files(path):
                found += _read(file, namespace, mistakes)
        except OSError as error:
            mistakes.append(Mistake(path, f"cannot be read: {error.strerror or error}", unread=True))
    mistakes += _doubles(found)
    if mistakes:
        raise ManifestError(mistakes)
    return found


def warnings(loaded: Iterable[Loaded]) -> Iterator[str]:
    """A line for each manifest that sets fields which are not in force yet."""
    for item in loaded:
        if found := unenforced.given(item.manifest.spec):
            yield str(Mistake(item.file, f"warning: {', '.join(found)}: {unenforced.WARNING}", item.line))


def _doubles(found: list[Loaded]) -> Iterator[Mistake]:
    seen: dict[tuple[str, str], Loaded] = {}
    for item in found:
        if item.name and (first := seen.setdefault((item.manifest.kind, item.full_name), item)) is not item:
            yield Mistake(item.file, f"{item.manifest.kind} {item.full_name} is defined already at {first.file}:{first.line}", item.line)


def pools(loaded: Iterable[Loaded]) -> list[tuple[Loaded, AgentPool]]:
    return [(item, item.manifest) for item in loaded if isinstance(item.manifest, AgentPool)]


def runs(loaded: Iterable[Loaded]) -> list[tuple[Loaded, AgentRun]]:
    return [(item, item.manifest) for item in loaded if isinstance(item.manifest, AgentRun)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES and f.is_file())
    if not files:
        raise OSError(f"the folder holds no file that ends in {', '.join(SUFFIXES)}")
    return files


def _read(file: Path, namespace: str, mistakes: list[Mistake]) -> Iterator[Loaded]:
    if file.stat().st_size > MAX_FILE_BYTES:
        mistakes.append(Mistake(file, f"is larger than {MAX_FILE_BYTES} bytes"))
        return
    number = 0
    try:
        loader = _Loader(file.read_bytes())
        while loader.check_node():
            number += 1
            node = loader.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
                continue  # a document of comments only
            found = _document(loader, node, file, number)
            if isinstance(found, list):
                mistakes += sorted(found, key=lambda mistake: mistake.line)
            else:
                yield Loaded(found, file, node.start_mark.line + 1, found.metadata.namespace or namespace)
        if number == 0:
            mistakes.append(Mistake(file, "holds no document"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        mistakes.append(Mistake(file, f"is not YAML: {error.problem or error}", mark.line + 1 if mark else 0, number))
    except yaml.YAMLError as error:
        mistakes.append(Mistake(file, f"is not YAML: {error}", document=number))
    except RecursionError:
        mistakes.append(Mistake(file, "is nested too deeply, or refers to itself", document=number))


def _document(loader: _Loader, node: yaml.Node, file: Path, number: int) -> Manifest | list[Mistake]:
    """The resource in one document, or what is wrong with it."""
    if doubles := [Mistake(file, f"the key {key!r} stands twice in one mapping", line, number) for key, line in _duplicates(node)]:
        return doubles
    try:
        manifest = parse_manifest(loader.construct_document(node))
    except InvalidManifest as invalid:
        return [Mistake(file, str(p), _line(node, p.loc), number) for p in invalid.problems]
    if isinstance(manifest, Trigger):
        return [Mistake(file, "a Trigger fires on a cluster only: `kubectl apply` it there", node.start_mark.line + 1, number)]
    return manifest


def _line(node: yaml.Node, loc: Loc) -> int:
    """The line of the deepest part of ``loc`` that is in the document."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            entry = next(((k, v) for k, v in node.value if k.value == part), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _duplicates(root: yaml.Node) -> Iterator[tuple[str, int]]:
    """Keys that a mapping holds twice (YAML keeps the last in silence) and their lines; aliases are looked at once."""
    open_nodes, looked = [root], {id(root)}
    while open_nodes:
        node = open_nodes.pop()
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in names and key.value != "<<":
                    yield key.value, key.start_mark.line + 1
                names.add(key.value if isinstance(key, yaml.ScalarNode) else "")
                children.append(value)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        open_nodes += [c for c in children if id(c) not in looked]
        looked |= {id(c) for c in children}


class _Loader(yaml.SafeLoader):
    """Safe, and without the two surprises of YAML 1.1 that Kubernetes does not have: dates and base-60 numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+|0o?[0-7]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def _int(_loader: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value.lower()
    digits = text.lstrip("+-")
    base = 16 if digits.startswith("0x") else 8 if len(digits) > 1 and digits.startswith("0") else 10
    value = int(digits.removeprefix("0x").removeprefix("0o"), base)
    return -value if text.startswith("-") else value


_Loader.add_constructor("tag:yaml.org,2002:int", _int)

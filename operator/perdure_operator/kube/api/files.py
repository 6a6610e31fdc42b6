"""The definitions as files: plain ones for ``kubectl apply -f crds/``, and the same as templates of the chart.

In the chart, because Helm installs a folder ``crds/`` once and never upgrades it; kept on uninstall, because deleting a definition deletes
every run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from perdure_operator.kube.api.admission import policies
from perdure_operator.kube.api.crd import DEFINITIONS

PLAIN = Path("crds")
CHART = Path("charts/perdure/templates/crds")
_HEADER = "# Written by `make generate` from operator/perdure_operator/kube/api; do not edit.\n"
_KEEP = {"helm.sh/resource-policy": "keep"}


def files() -> Iterator[tuple[Path, str]]:
    """Path below the repository and content of each."""
    for name, documents in [(d.plural, [d.to_json()]) for d in DEFINITIONS] + [("admission", policies())]:
        yield PLAIN / f"{name}.yaml", _HEADER + _yaml(documents)
        yield (
            CHART / f"{name}.yaml",
            f"{_HEADER}{{{{- if .Values.crds.install }}}}\n{_literal(_yaml(map(_kept, documents)))}{{{{- end }}}}\n",
        )


def _yaml(documents: Any) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _kept(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    document["metadata"] = {"name": document["metadata"]["name"], "annotations": _KEEP}
    return document


def _literal(text: str) -> str:
    """``text`` as a template that renders to it."""
    return text.replace("{{", "{{ `{{` }}")

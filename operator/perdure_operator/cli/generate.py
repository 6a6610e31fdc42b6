"""Writes the files that are generated from code, or checks that they are what the code says (``--check``, for ``make verify``)."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from perdure.sidecar.openapi import document as sidecar_openapi
from perdure_operator.domain import transitions
from perdure_operator.gateway.openapi import openapi
from perdure_operator.kube.api import reference
from perdure_operator.kube.api.files import files

ROOT = Path(__file__).resolve().parents[3]


def generated() -> dict[Path, str]:
    """Content of every generated file, by path below the repository."""
    return {
        Path("operator/perdure_operator/store/sql/00_transitions.sql"): transitions.to_sql(),
        Path("docs/state_machine.md"): transitions.to_markdown(),
        Path("docs/openapi/gateway.json"): _pretty(openapi()),
        Path("docs/openapi/sidecar.json"): _pretty(sidecar_openapi()),
        Path("docs/manifests.md"): reference.to_markdown(),
        **dict(files()),
    }


def _pretty(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2).decode() + "\n"


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    drifted = []
    for path, content in generated().items():
        target = ROOT / path
        if check:
            if not target.exists() or target.read_text() != content:
                drifted.append(str(path))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
    if drifted:
        sys.exit(f"these files are not what the code generates: {', '.join(drifted)}; run `make generate`")


if __name__ == "__main__":
    main()

"""Label selectors, as ``kubectl -l`` takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from perdure_operator.kube.errors import KubeInvalid

_TERM = re.compile(r"\s*(?:(!)?([\w./-]+)|([\w./-]+)\s*(==?|!=)\s*([\w.-]*)|([\w./-]+)\s+(in|notin)\s*\(([^)]*)\))\s*(?:,|$)")


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether the labels fit every term of the selector; the empty one fits all."""
    position, fits = 0, True
    while position < len(selector):
        term = _TERM.match(selector, position)
        if term is None:
            raise KubeInvalid(f"unable to parse requirement: {selector[position:]}")
        position = term.end()
        absent, bare, key, equality, value, set_key, membership, members = term.groups()
        if bare:
            fits &= (bare in labels) is (absent is None)
        elif key:
            fits &= (labels.get(key) == value) is (equality != "!=")
        else:
            fits &= (labels.get(set_key) in [member.strip() for member in members.split(",")]) is (membership == "in")
    return fits

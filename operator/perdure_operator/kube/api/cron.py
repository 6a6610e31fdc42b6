"""Cron expressions as Debian's cron reads them: five fields or a macro, in a named time zone. cronsim does the work.

The API server can check the form, by a pattern; that a day is in some month, only cronsim knows. Both are asked here, so a file is not
told anything else than a cluster is.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from perdure_operator.kube.api.base import Rule

MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


def _field(value: str, *alone: str) -> str:
    """A list of ``*``, values and ranges, each with a step if need be, and of what takes no step."""
    item = "|".join((rf"([*]|{value}(-{value})?)(/[1-9][0-9]?)?", *alone))
    return f"({item})(,({item}))*"


_WEEKDAY = "([0-7]|SUN|MON|TUE|WED|THU|FRI|SAT)"
_FIELDS = (
    _field("[0-5]?[0-9]"),
    _field("([01]?[0-9]|2[0-3])"),
    _field("(0?[1-9]|[12][0-9]|3[01])", "LW?"),
    _field("(0?[1-9]|1[0-2]|JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC)"),
    _field(_WEEKDAY, "[0-7]L", f"{_WEEKDAY}#[1-5]"),
)
_PATTERN = f"(?i)^({' +'.join(_FIELDS)}|{'|'.join(MACROS)})$"


def is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return False
    return True


CRON = Rule(
    f"self.matches('{_PATTERN}')",
    f"is not five fields (minute, hour, day of month, month, day of week), such as 0 7 * * 1-5, nor one of {', '.join(MACROS)}",
    lambda text: re.fullmatch(_PATTERN, text) is not None,
)
ZONE = Rule(
    "self != 'Local' && timestamp('2000-01-01T00:00:00Z').getHours(self) >= 0",
    "is not a time zone of the IANA database, such as Europe/Berlin",
    is_zone,
)


def five_fields(cron: str) -> str:
    """The expression with a macro spelled out. ValueError: it is none, or no day of any year matches it."""
    CRON.check(cron)
    fields = MACROS.get(cron.lower(), cron)
    try:
        next(CronSim(fields, datetime(2000, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration):
        raise ValueError(f"never comes: no day of any year matches {cron!r}") from None
    return fields

"""Translates what asyncpg raises into Perdure's typed errors, in one place.

A statement whose answer was lost is *unknown*: it may have been committed. That is ``Unavailable``, and callers send the same request
id again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from perdure_operator.domain.errors import Busy, PerdureError, StoreError, Unavailable, from_code

REFUSED = "PD001"
"""What perdure.refuse raises: the message is the code of a typed error."""

_LOST = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,  # shut down, starting, or a statement cancelled
    asyncpg.InsufficientResourcesError,  # connections, memory, disk
    asyncpg.ReadOnlySQLTransactionError,  # a standby: the other one has taken over
)


_UNTRUSTED = (ssl.SSLCertVerificationError, asyncpg.ClientConfigurationError)


class Untrusted(Unavailable):
    """The database cannot be told from an impostor: its certificate, or what it would have to be compared with, is not right."""

    action = "Check sslmode and host of the DSN, and the authorities in PGSSLROOTCERT (of the chart: postgres.caSecret)."


@contextmanager
def translated() -> Iterator[None]:
    """Raises Busy, Unavailable or StoreError in place of driver errors."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise _translate(error) from error
    except _UNTRUSTED as error:
        raise Untrusted(f"no connection to the database can be made safe: {error}. {Untrusted.action}") from error
    except _LOST as error:
        raise Unavailable(f"the database did not answer: {str(error) or type(error).__name__}") from error


def _translate(error: asyncpg.PostgresError) -> PerdureError:
    if error.sqlstate == REFUSED:
        return from_code(str(error.args[0]), error.detail or "")
    if isinstance(error, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
        return Busy(str(error))
    if isinstance(error, _LOST):
        return Unavailable(f"the database did not answer: {error}")
    return StoreError(f"{type(error).__name__}: {error}")

"""Translates what asyncpg raises into Perdure's typed errors, in one place.

A statement whose answer was lost is *unknown*: it may have been committed. That is ``Unavailable``, and callers send the same request
id again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from perdure_operator.domain.errors import Busy, StoreError, Unavailable

_LOST = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises Busy, Unavailable or StoreError in place of driver errors."""
    try:
        yield
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
        raise Busy(str(error)) from error
    except _LOST as error:
        raise Unavailable(f"the database did not answer: {str(error) or type(error).__name__}") from error
    except asyncpg.PostgresError as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error

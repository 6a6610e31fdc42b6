"""Logs are JSON lines on standard error, or readable lines on a terminal."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure() -> None:
    """Level from ``PERDURE_LOG_LEVEL`` (default info)."""
    level = logging.getLevelNamesMapping().get(os.environ.get("PERDURE_LOG_LEVEL", "info").upper(), logging.INFO)
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")

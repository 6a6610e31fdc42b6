"""Fixtures of the tests of the store alone."""

from tests.harness.fixtures import pg, store

__all__ = ["pg", "store"]

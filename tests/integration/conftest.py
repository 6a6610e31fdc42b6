"""Fixtures of the tests with real gateways."""

from tests.harness.fixtures import cluster, pg, store, zygote

__all__ = ["cluster", "pg", "store", "zygote"]

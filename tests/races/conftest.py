"""Fixtures of the races."""

from tests.harness.fixtures import cluster, own_cluster, pg, store, zygote

__all__ = ["cluster", "own_cluster", "pg", "store", "zygote"]

"""Fixtures of the capacity search: the places of the load generator's tests."""

from tests.loadgen.conftest import model, place

__all__ = ["model", "place"]

"""The made-up run of the tests of `agentrl.track`."""

from tests.unit.track.conftest import clock, metrics

__all__ = ["clock", "metrics"]

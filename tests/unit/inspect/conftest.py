"""The made-up run of the tests of `agentrl.track`."""

from tests.unit.track.conftest import metrics

__all__ = ["metrics"]

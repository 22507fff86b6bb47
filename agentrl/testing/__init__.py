"""Contract tests for what users write themselves: an engine, an environment, a metric sink; each is one call in a test of theirs.

A check raises `AssertionError` with what is violated. It runs an event loop of its own, so it may be called from any test, asynchronous
ones included. The tests of agentrl hold its own engines and sinks to the same.
"""

from agentrl.testing.engines import check_engine
from agentrl.testing.environments import check_environment
from agentrl.testing.sinks import check_sink

__all__ = ["check_engine", "check_environment", "check_sink"]

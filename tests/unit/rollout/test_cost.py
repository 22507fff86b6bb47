"""Many episodes at once cost little: a small version of `tests.benchmarks.episode_cost`, with slack for busy machines."""

from tests.benchmarks.episode_cost import memory, run


def test_time_and_cpu() -> None:
    cost = run(200)
    assert cost.seconds < 1.5 * cost.bound_s
    assert cost.cpu_ms < 2.0


def test_memory() -> None:
    beside, tokens = memory(200)
    assert beside < 100
    assert 0 < tokens < beside

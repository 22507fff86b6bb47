"""How fast each advantage estimator learns mental arithmetic with the bundled model, as a Markdown table.

    python -m tests.benchmarks.estimators

About 3 minutes on 2 cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.benchmarks._runs import run

ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
NUM_STEPS = 40
FLAGS = (
    *("--num-steps", str(NUM_STEPS), "--groups-per-step", "16", "--n-samples-per-prompt", "8", "--max-new-tokens", "8"),
    *("--learning-rate", "5e-4", "--policy-loss", "ppo", "--seed", "1"),
)
GAIN = 0.15
"""What an estimator must gain."""
FIRST, LAST = 5, 10
"""Steps over which the reward at the beginning and at the end is averaged."""


def gain(rewards: Sequence[float]) -> float:
    """Mean reward of the last steps less that of the first."""
    return statistics.fmean(rewards[-LAST:]) - statistics.fmean(rewards[:FIRST])


def steps_to_threshold(rewards: Sequence[float]) -> int | None:
    """Steps until the mean of `FIRST` steps in a row is `GAIN` above that of the first ones; `None`: never."""
    goal = statistics.fmean(rewards[:FIRST]) + GAIN
    return next((end for end in range(FIRST, len(rewards) + 1) if statistics.fmean(rewards[end - FIRST : end]) >= goal), None)


def main() -> None:
    """Train once with each and print the table."""
    print(
        f"| estimator | first {FIRST} steps | steps to +{GAIN:g} | last {LAST} of {NUM_STEPS} steps | final weights, all tasks | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for name in ESTIMATORS:
        trained = run([*FLAGS, "--advantage-estimator", name], evaluate=4)
        rewards = trained.column("reward/mean")
        first, last = statistics.fmean(rewards[:FIRST]), statistics.fmean(rewards[-LAST:])
        reached = steps_to_threshold(rewards) or "not reached"
        print(f"| `{name}` | {first:.3f} | {reached} | {last:.3f} | {trained.evaluation:.3f} | {trained.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()

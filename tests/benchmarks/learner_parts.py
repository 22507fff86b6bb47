"""How much of a step's training is hidden behind its slow groups with ``--learner-parts``: synchronous runs on the real stack.

    python -m tests.benchmarks.learner_parts [--steps N] [--parts K ...]

The time that a group takes is that of its task, so all runs wait for the same groups. About 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tests.benchmarks._runs import run

ENVIRONMENTS = Path(__file__).with_name("_environments.py")
FLAGS = (
    *("--agent", f"{ENVIRONMENTS}:LateGroups", "--groups-per-step", "8", "--n-samples-per-prompt", "4", "--max-new-tokens", "16"),
    *("--advantage-estimator", "rloo", "--micro-batch-tokens", "2048", "--learning-rate", "1e-6"),
)
SETTLING = 1
"""First steps that are not counted."""


def main() -> None:
    """Print a row per number of parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4, 8], help="parts of a step, a run each")
    args = parser.parse_args()
    print("parts  step, s  training, s  before the last group, s  learner idle")
    for parts in args.parts:
        trained = run([*FLAGS, "--num-steps", str(args.steps), "--learner-parts", str(parts)])
        step_s, train_s, idle = (
            statistics.fmean(trained.column(name)[SETTLING:]) for name in ("time/step_s", "time/train_s", "idle/learner")
        )
        early_s = statistics.fmean(trained.column("time/train_early_s")[SETTLING:] or [0.0])
        print(f"{parts:5}  {step_s:7.2f}  {train_s:11.2f}  {early_s:24.2f}  {idle:12.0%}", flush=True)


if __name__ == "__main__":
    main()

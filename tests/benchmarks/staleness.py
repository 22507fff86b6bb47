"""What staleness costs, and which off-policy correction wins it back: 5 bounds x 6 corrections x 3 seeds.

    python -m tests.benchmarks.staleness

Results are appended to ``runs/staleness.jsonl`` as runs end, and runs that are there are not repeated; the tables go to
standard output and the plot to ``docs/staleness.png``. About 15 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks._runs import ROOT, Trained, run

BOUNDS = (0, 1, 2, 4, 8)
CORRECTIONS = {
    **{name: ("--off-policy", name) for name in ("none", "tis", "icepop", "seq-mask-tis", "decoupled")},
    "seq-mask-tis 0.5-2": ("--off-policy", "seq-mask-tis", "--off-policy-range", "0.5", "2"),
}
SEEDS = (1, 2, 3)
FLAGS = (
    *("--num-steps", "40", "--groups-per-step", "8", "--n-samples-per-prompt", "8", "--max-new-tokens", "8"),
    *("--learning-rate", "1e-3", "--allow-uncorrected"),
)
EVALUATE = 4

Record = dict[str, Any]
Value = Callable[[Record], float]


def record(bound: int, correction: str, seed: int, trained: Trained) -> Record:
    """What is kept of one run; importance ratios are averaged over the steps that trained on older tokens, if there are any."""
    stale = [row for row in trained.steps if row["staleness/fraction"] > 0] or trained.steps

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in stale)

    return {
        "max_staleness": bound,
        "off_policy": correction,
        "seed": seed,
        "reward": trained.evaluation,
        "rewards": [round(value, 4) for value in trained.column("reward/mean")],
        "staleness": mean("staleness/mean"),
        "staleness_max": max(trained.column("staleness/max")),
        "ess": mean("ess/rho"),
        "ess_min": min(trained.column("ess/rho")),
        "ess_weights": mean("ess/weights"),
        "kl": mean("staleness/kl"),
        "kl_same_version": max(trained.column("mismatch/kl"), default=0.0),
        "rho_max": max(trained.column("rho/max")),
        "masked": mean("off_policy/masked"),
        "bounded": mean("off_policy/bounded"),
        "seconds": trained.seconds,
    }


def study(path: Path) -> list[Record]:
    """Run what `path` does not hold yet; seeds are outermost, so that an interrupted study is already a small one."""
    records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["max_staleness"], r["off_policy"], r["seed"]) for r in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed, bound, correction in itertools.product(SEEDS, BOUNDS, CORRECTIONS):
        if (bound, correction, seed) in done:
            continue
        flags = (*FLAGS, "--max-staleness", str(bound), *CORRECTIONS[correction], "--seed", str(seed))
        records.append(record(bound, correction, seed, run(flags, evaluate=EVALUATE)))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[-1]) + "\n")
    return records


def of(records: Sequence[Record], bound: int, correction: str, value: Value) -> list[float]:
    """One value of the runs with these settings, one per seed."""
    return [value(r) for r in records if r["max_staleness"] == bound and r["off_policy"] == correction]


def table(records: Sequence[Record], title: str, cell: Callable[[list[Record]], str]) -> str:
    """Markdown: one row per bound, one column per correction."""
    lines = [f"| S | {' | '.join(f'`{name}`' for name in CORRECTIONS)} |", "|---|" + "---|" * len(CORRECTIONS)]
    for bound in BOUNDS:
        cells = [[r for r in records if r["max_staleness"] == bound and r["off_policy"] == name] for name in CORRECTIONS]
        lines.append(f"| {bound} | {' | '.join(cell(runs) if runs else '' for runs in cells)} |")
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def spread(name: str, digits: int) -> Callable[[list[Record]], str]:
    """Mean and standard deviation over the seeds."""

    def cell(runs: list[Record]) -> str:
        values = [r[name] for r in runs]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"

    return cell


def average(name: str, digits: int) -> Callable[[list[Record]], str]:
    """Mean over the seeds."""
    return lambda runs: f"{statistics.fmean(r[name] for r in runs):.{digits}f}"


def whole_run(runs: list[Record]) -> str:
    """Mean training reward over all steps and seeds: how fast it was learned."""
    return f"{statistics.fmean(statistics.fmean(r['rewards']) for r in runs):.3f}"


def tables(records: Sequence[Record]) -> str:
    """Everything as Markdown."""
    parts = (
        ("Reward of the final weights (mean ± standard deviation over the seeds):", spread("reward", 3)),
        ("Reward over the whole run:", whole_run),
        ("Measured staleness of the oldest token of a group, steps:", average("staleness", 2)),
        ("Effective sample size of the importance ratios, `ess/rho`:", average("ess", 3)),
        ("Effective sample size of the weights that were applied, `ess/weights`:", average("ess_weights", 3)),
        ("KL between the policy and the one that sampled, tokens of older versions, `staleness/kl`:", average("kl", 4)),
        ("Share of tokens masked:", average("masked", 3)),
        ("Seconds per run:", average("seconds", 1)),
    )
    return "\n".join(table(records, title, cell) for title, cell in parts)


def plot(records: Sequence[Record], path: Path) -> None:
    """Reward, effective sample size and KL over the bound, one line per correction; bars are one standard deviation."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = (("reward", "reward of the final weights"), ("ess", "effective sample size (share)"), ("kl", "KL of older tokens"))
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axis, (name, title) in zip(axes, panels, strict=True):
        for index, correction in enumerate(CORRECTIONS):
            values = [of(records, bound, correction, lambda r, name=name: float(r[name])) for bound in BOUNDS]
            places = [i + 0.06 * (index - 2.5) for i in range(len(BOUNDS))]
            means = [statistics.fmean(v) for v in values]
            bars = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
            axis.errorbar(places, means, bars, marker="o", markersize=4, capsize=2, linewidth=1.2, label=correction)
        axis.set_xticks(range(len(BOUNDS)), [str(bound) for bound in BOUNDS])
        axis.set_xlabel("max staleness S")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "staleness.jsonl", help="results, appended as runs end")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "staleness.png", help="where the plot goes")
    options = parser.parse_args()
    records = study(options.out)
    print(tables(records))
    plot(records, options.plot)


if __name__ == "__main__":
    main()

"""Draws the reward of a run.

python -m agentrl.inspect.curve RUN_DIR --out reward.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.track.jsonl import read_lines
from agentrl.track.summary import FIRST_STEPS, LAST_STEPS
from agentrl.track.text import mean

WINDOW = 5


def read_rewards(run_dir: Path) -> tuple[list[int], list[float]]:
    """Steps and mean rewards of a run.

    Raises:
        ConfigError: If there are no metrics.
    """
    path = run_dir / "metrics.jsonl"
    rows = read_lines(path) if path.exists() else []
    rows = [row for row in rows if row.get("reward/mean") is not None]
    if not rows:
        raise ConfigError("RUN_DIR", str(run_dir), "has no rewards in metrics.jsonl", "Name the directory of a run that finished a step.")
    return [row["step"] for row in rows], [row["reward/mean"] for row in rows]


def moving_average(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and of up to `window` - 1 values before it."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw(run_dir: Path, out: Path, *, title: str = "") -> None:
    """Write a picture of the mean reward per step.

    Args:
        run_dir: Directory of the run.
        out: File to write; its ending says in which format.
        title: Line above the picture.

    Raises:
        ConfigError: If there are no metrics, or matplotlib is not installed.
    """
    steps, rewards = read_rewards(run_dir)
    figure, axes = _subplots()
    axes.plot(steps, rewards, ".", color="#9ecae1", markersize=6, label="one step")
    axes.plot(steps, moving_average(rewards), color="#08519c", linewidth=2.2, label=f"mean of {WINDOW} steps")
    for part, edge in ((slice(None, FIRST_STEPS), "first"), (slice(-LAST_STEPS, None), "last")):
        level, at = mean(rewards[part]), steps[part]
        axes.hlines(level, at[0], at[-1], color="#d94801", linewidth=1.6)
        side = {"first": ("left", at[0]), "last": ("right", at[-1])}[edge]
        axes.annotate(
            f"{edge} {len(at)} steps: {level:.2f}", (side[1], level), (0, -24), textcoords="offset points", ha=side[0], color="#d94801"
        )
    axes.set(xlabel="optimizer step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def _subplots() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--out", "picture", "needs matplotlib", "Run `pip install matplotlib`.") from error
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    return figure, figure.subplots()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.inspect.curve", description="Draw the mean reward of a run.")
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--out", type=Path, default=Path("reward.png"), help="picture to write (default: %(default)s)")
    parser.add_argument("--title", default="", help="line above the picture")
    args = parser.parse_args(argv)
    try:
        draw(args.run_dir, args.out, title=args.title)
    except ConfigError as error:
        sys.stderr.write(f"curve: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

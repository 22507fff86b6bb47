"""The one screen shown when a run ends."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.track.summary import FIRST_STEPS, LAST_STEPS
from agentrl.track.text import count, duration, number, percent, sparkline

LABEL_WIDTH = 11


def print_summary(summary: Mapping[str, Any], *, console: Console, rewards: Sequence[float] = (), agent: str = "") -> None:
    """Print the summary; styled in a terminal, plain text elsewhere.

    Args:
        summary: As `SummaryBuilder.build` returns it.
        console: Where to print.
        rewards: Mean reward per step, for the curve.
        agent: The environment as given to ``--agent``, for the suggested commands.
    """
    console.print()
    for label, text in summary_rows(summary, rewards=rewards, agent=agent, unicode=console.encoding.lower().startswith("utf")):
        console.print(Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold cyan"), text), soft_wrap=True)


def summary_rows(summary: Mapping[str, Any], *, rewards: Sequence[float], agent: str, unicode: bool = True) -> list[tuple[str, str]]:
    """Label and text of every line; a continued row has the label ""."""
    rows = [(str(summary["status"]), f"{summary['steps']} steps in {duration(summary['wall_s'])}")]
    if summary["steps"]:
        rows += [("reward", _trend_text(summary["reward"], summary["steps"]))]
        if unicode and len(rewards) > 1:
            rows += [("", sparkline(rewards, 60))]
        if summary["score"]["last"] is not None:
            score = summary["score"]
            rows += [("score", f"{number(score['first'])} to {number(score['last'])}")]
        rows += _evaluation(summary["eval"])
        rows += _figures(summary)
    rows += [("saved", summary["run_dir"])]
    rows += [("", "  ".join(Path(path).name for path in summary["paths"].values()))] if summary["paths"] else []
    return rows + [("next" if i == 0 else "", command) for i, command in enumerate(_next_commands(summary, agent))]


def _evaluation(evaluated: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The first and the last evaluation, and which model was the best."""
    if not evaluated:
        return []
    first, last, best = evaluated["first"], evaluated["last"], evaluated["best"]
    figures = [
        f"{name} {number(first[name])} to {number(last[name])}"
        for name in ("reward", "score", "pass@1")
        if name in first.keys() & last.keys()
    ]
    text = f"{', '.join(figures) or 'nothing measured'}; steps {first['step']} to {last['step']}"
    return [("evaluation", text + (f"; best {number(best['value'])} after step {best['step']}" if best else ""))]


def _trend_text(reward: Mapping[str, float], steps: int) -> str:
    first, last = min(FIRST_STEPS, steps), min(LAST_STEPS, steps)
    return (
        f"{number(reward['first'])} to {number(reward['last'])} ({reward['gain']:+.3f}); "
        f"mean of the first {first} and of the last {last} steps; best {number(reward['best'])}"
    )


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    time, staleness, idle, speed = (summary[name] for name in ("time", "staleness", "idle", "tokens_per_s"))
    loop_s = time["loop_s"] or float("nan")
    return [
        ("episodes", f"{summary['episodes']}, {count(summary['tokens'])} tokens sampled, {count(_or_nan(speed['mean']))} tokens/s"),
        (
            "time",
            f"start and end {duration(time['outside_loop_s'])}, training loop {duration(time['loop_s'])}: "
            f"training {percent(time['train_s'] / loop_s)}, publishing {percent(time['publish_s'] / loop_s)}, "
            f"waiting for episodes {percent(time['wait_s'] / loop_s)}",
        ),
        ("idle", f"generator {percent(_or_nan(idle['generator']))}, learner {percent(_or_nan(idle['learner']))}"),
        ("staleness", f"mean {number(_or_nan(staleness['mean']), 2)}, max {number(_or_nan(staleness['max']), 0)} steps"),
        ("mismatch", f"max {_or_nan(summary['mismatch_max']):.1e} between engine and learner log-probabilities"),
        ("groups", _ledger_line(summary["ledger"])),
    ]


def _ledger_line(ledger: Mapping[str, int]) -> str:
    parts = " + ".join(f"{ledger.get(name, 0)} {name.replace('_', ' ')}" for name in ("trained", "filtered", "dropped", "in_flight"))
    return f"{ledger.get('submitted', 0)} submitted = {parts}"


def _next_commands(summary: Mapping[str, Any], agent: str) -> list[str]:
    paths = summary["paths"]
    commands = []
    if "tensorboard" in paths:
        commands.append(shlex.join([_program("tensorboard"), "--logdir", paths["tensorboard"]]))
    if "trajectories" in paths:
        commands.append(shlex.join([_program("agentrl"), "inspect", str(summary["run_dir"])]))
    if "model" in paths and "evaluations" in paths:
        commands.append(shlex.join([_program("agentrl"), "eval", "--run", str(summary["run_dir"]), "--baseline", "start"]))
    if "model" in paths and agent:
        commands.append(shlex.join([_program("agentrl"), "train", "--agent", agent, "--model", paths["model"]]))
    return commands


def _program(name: str) -> str:
    """`name` if the shell finds it, else the path beside this Python, as for an environment that is not activated."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value

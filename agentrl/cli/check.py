"""``agentrl check``: whether an environment is right, learnable and fast enough, before a model is trained in it."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.assets import tiny_model_path
from agentrl.check.findings import CheckSettings, Report, Severity
from agentrl.check.report import print_report
from agentrl.check.rules import by_severity, count, rule
from agentrl.check.supervise import check, command
from agentrl.config.load import field_error
from agentrl.config.ranges import Count, CountOrZero, Positive
from agentrl.core.errors import ConfigError
from agentrl.rollout.tasks import context_length

CPU_CONTEXT = 4096


@dataclass(frozen=True, kw_only=True)
class CheckArgs:
    """Play an environment without a model and report what is wrong with it. Exit code: 0 no errors, 1 errors, 2 bad request."""

    env: Annotated[str, tyro.conf.Positional]
    """What ``agentrl train --agent`` takes: ``file.py``, ``file.py:Name``, ``package.module:Name``, ``gym:ID``."""
    prompts: str = ""
    """JSONL or Parquet file, or data set, with the tasks. Empty: the environment's own."""
    prompt_split: str = "train"
    """Split to load when ``--prompts`` names a Hugging Face data set."""
    input_key: str = "prompt"
    """Column that holds the prompt."""
    label_key: str = "label"
    """Column that holds the label."""
    model: str = ""
    """Model whose tokenizer and chat template are used; its weights are not read. Empty: the bundled tiny one."""
    max_model_len: CountOrZero = 0
    """Context length in tokens; 0: the model's own."""
    max_new_tokens: Count = 128
    """Tokens that a turn may take."""
    max_turns: Count = 8
    """Turns of an episode at most."""
    concurrency: Count = 128
    """Episodes that one worker is to run at once."""
    env_threads: Count = 32
    """Threads per worker for plain ``def`` methods."""
    turn_s: Positive = 1.0
    """Seconds that the model is assumed to take for a turn."""
    episodes: Count = 8
    """Episodes per policy."""
    recorded: str = ""
    """Directory of a run, or its ``trajectories.jsonl``, whose answers are given as well."""
    timeout_s: Positive = 30.0
    """Deadline of one call of the environment."""
    budget_s: Positive = 120.0
    """Seconds for the whole check."""
    seed: CountOrZero = 0
    """Decides which tasks are played and what the random policies write."""
    json: bool = False
    """Write the report as JSON."""
    fix_hints: bool = False
    """Show a piece of code with each remedy."""


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Flags after ``check``.

    Returns:
        0 if there is no error, 1 if there is one.
    """
    words = [word for word in words if word != "--debug"]
    args = _validated(tyro.cli(CheckArgs, prog="agentrl check", args=words))
    report = check(_settings(args), command(sys.executable, "-m", "agentrl.check.worker"))
    if args.json:
        sys.stdout.write(json.dumps(as_json(report, fix_hints=args.fix_hints), indent=2) + "\n")
    else:
        print_report(report, fix_hints=args.fix_hints)
    return int(count(report.findings, Severity.ERROR) > 0)


def as_json(report: Report, *, fix_hints: bool = False) -> dict[str, Any]:
    """The report with what is known of each rule."""
    findings = [
        {
            "id": finding.id,
            "severity": str(rule(finding).severity),
            "title": rule(finding).title,
            "where": finding.where,
            "seen": finding.seen,
            "count": finding.count,
            "why": rule(finding).why,
            "remedy": rule(finding).remedy,
            **({"snippet": rule(finding).snippet} if fix_hints else {}),
        }
        for finding in by_severity(report.findings)
    ]
    counts = {str(severity): count(report.findings, severity) for severity in Severity}
    return {"ok": not counts["error"], "counts": counts, **report.to_dict(), "findings": findings}


def _validated(args: CheckArgs) -> CheckArgs:
    try:
        return TypeAdapter(CheckArgs).validate_python(dataclasses.asdict(args))
    except ValidationError as error:
        raise field_error(error, "check") from None


def _settings(args: CheckArgs) -> CheckSettings:
    model = args.model or str(tiny_model_path())
    if args.model and Path(args.model).exists() and not Path(args.model).is_dir():
        raise ConfigError("--model", args.model, "is a file", "Give the directory of a model.")
    length = args.max_model_len or min(context_length(model) or CPU_CONTEXT, CPU_CONTEXT)
    return CheckSettings(
        env=args.env,
        prompts=args.prompts,
        prompt_split=args.prompt_split,
        input_key=args.input_key,
        label_key=args.label_key,
        model=model,
        model_given=bool(args.model),
        max_model_len=length,
        max_new_tokens=args.max_new_tokens,
        max_turns=args.max_turns,
        concurrency=args.concurrency,
        env_threads=args.env_threads,
        turn_s=args.turn_s,
        episodes=args.episodes,
        recorded=args.recorded,
        timeout_s=args.timeout_s,
        budget_s=args.budget_s,
        seed=args.seed,
    )

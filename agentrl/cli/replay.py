"""``agentrl replay``: repeat recorded actions in the environment, and say what came out differently.

Exit codes: 0 everything compared is the same, 1 something differs, 2 the request was wrong or there was nothing to compare.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from agentrl.api.signals import run_until_signal
from agentrl.config.ranges import Count
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.env.given import PREFIX, SOURCE
from agentrl.inspect.directory import Record, RunDirectory
from agentrl.track.text import Screen, duration, text_difference

if TYPE_CHECKING:
    from agentrl.core.types import Task
    from agentrl.env.load import AgentSpec
    from agentrl.inspect.replay import Records, Replay, Replayer
    from agentrl.rollout.chat import ChatCodec


@dataclass(frozen=True, kw_only=True)
class ReplayArgs:
    """Repeat recorded actions in the environment, and say what came out differently."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""
    episodes: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[EPISODE ...]")] = ()
    """Names of episodes, as ``agentrl inspect`` lists them; a group's number stands for all of its episodes."""
    all: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replay every recorded episode, and show which share of them replays."""
    agent: str = ""
    """Environment to replay in; by default the run's own."""
    jobs: Count = 8
    """Episodes to replay side by side."""
    show: Count = 20
    """Differences to list with ``--all``."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show tracebacks."""


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Words after ``replay``.

    Returns:
        The exit code.
    """
    args = tyro.cli(ReplayArgs, prog="agentrl replay", args=words)
    if args.all == bool(args.episodes):
        problem = "comes with names of episodes" if args.all else "is not given, and no episode is named"
        raise ConfigError("--all", args.all, problem, f"Name an episode (`agentrl inspect {args.run}` lists them), or give --all.")
    run = RunDirectory(args.run)
    named = [] if args.all else _named(run, args.episodes)
    episodes = run.episodes() if args.all else iter(named)
    replayer = open_replayer(run, args.agent)
    screen = Screen()
    outcomes, seconds = run_until_signal(_replay(replayer, episodes, args.jobs, screen))
    for line in run.unreadable:
        screen.line((f"not readable: {line}", "yellow"))
    if args.all:
        _report_all(screen, outcomes, seconds, args)
    else:
        order = {str(records[0].get("episode_id")): place for place, records in enumerate(named)}
        for outcome in sorted(outcomes, key=lambda outcome: order[outcome.episode_id]):
            _report_one(screen, outcome)
    verdicts = Counter(str(outcome.verdict) for outcome in outcomes)
    return 1 if verdicts["differs"] else 0 if verdicts["same"] else 2


def _named(run: RunDirectory, names: Sequence[str]) -> list[Records]:
    found: list[Records] = []
    for name in names:
        episodes = list(run.episodes(name))
        if not episodes:
            remedy = f"`agentrl inspect {run.path}` lists them; a run with --record sample records one episode of each group."
            raise ConfigError("EPISODE", name, "is not among the recorded episodes", remedy)
        found += episodes
    return found


def open_replayer(run: RunDirectory, agent: str = "") -> Replayer:
    """Make the replayer of a run's episodes.

    Args:
        run: The run.
        agent: Environment to use in place of the run's own.

    Raises:
        ConfigError: If the run's settings, environment or tokenizer cannot be used.
    """
    from agentrl.core.tokenizers import load_tokenizer
    from agentrl.inspect.replay import Replayer
    from agentrl.rollout.chat import ChatCodec
    from agentrl.rollout.records import EngineLimits
    from agentrl.rollout.settings import episode_settings
    from agentrl.rollout.tasks import context_length

    config = run.config()
    spec = _load(run, config, agent)
    model = tokenizer_path(run, config)
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)

    def make_codec(end_token_ids: Sequence[int]) -> ChatCodec:
        return ChatCodec(tokenizer, system_prompt=config.data.system_prompt, end_token_ids=end_token_ids)

    limits = EngineLimits(max_model_len=config.engine.max_model_len or context_length(model) or 4096)
    settings = episode_settings(config, model)
    return Replayer(spec, settings, make_codec=make_codec, find_task=_task_finder(config, spec), limits=limits)


def _load(run: RunDirectory, config: TrainConfig, agent: str) -> AgentSpec:
    from agentrl.env.load import load_agent

    try:
        return load_agent(agent or config.run.agent)
    except EnvLoadError as error:
        if agent:
            raise
        if config.run.agent.startswith(PREFIX):
            problem = f"its environment {config.run.agent} was given as an object in Python code"
            remedy = f"Put its class ({run.path / SOURCE}) with its imports into a file, and name that with --agent FILE."
            raise EnvLoadError("RUN", str(run.path), problem, remedy) from error
        remedy = "Replay from the folder that the run was started in, or name the environment with --agent FILE."
        raise EnvLoadError("RUN", str(run.path), f"its environment {error.value} cannot be used: {error.problem}", remedy) from error


def tokenizer_path(run: RunDirectory, config: TrainConfig) -> str:
    """Return the directory of the run's tokenizer: its initial model, else its saved model."""
    from agentrl.cluster.build import model_path

    path, saved = model_path(config), run.path / "model"
    local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    return str(saved) if local and not Path(path).expanduser().is_dir() and saved.is_dir() else path


def _task_finder(config: TrainConfig, spec: AgentSpec, most: int = 50_000) -> Callable[[str], Task | None]:
    tasks: dict[str, Task] = {}

    def find(name: str) -> Task | None:
        from agentrl.rollout.tasks import open_tasks

        if not tasks:
            unshuffled = replace(config, data=replace(config.data, shuffle=False))
            with suppress(ConfigError):
                tasks.update({task.id: task for task in open_tasks(unshuffled, spec).first(most)})
        return tasks.get(name)

    return find


async def _replay(replayer: Replayer, episodes: Iterator[Records], jobs: int, screen: Screen) -> tuple[list[Replay], float]:
    """Replay, showing how far it is; of episodes without a difference only what a report needs is kept."""
    start, outcomes = time.monotonic(), []
    try:
        await replayer.start()
        with screen.console.status("replaying") as status:
            async for outcome in replayer.replay_all(episodes, jobs=jobs):
                outcomes.append(outcome if outcome.difference else replace(outcome, records=[*map(_slim, outcome.records)]))
                status.update(f"replaying: {len(outcomes)} episodes")
    finally:
        await replayer.close()
    return outcomes, time.monotonic() - start


def _slim(record: Record) -> Record:
    names = ("episode_id", "agent", "status", "reward", "task")
    return {**{name: record.get(name) for name in names}, "turns": [None] * len(record.get("turns") or ())}


def _report_all(screen: Screen, outcomes: Sequence[Replay], seconds: float, args: ReplayArgs) -> None:
    same, differs, skipped = ([outcome for outcome in outcomes if outcome.verdict == kind] for kind in ("same", "differs", "skipped"))
    compared = len(same) + len(differs)
    turns = sum(len(record["turns"]) for outcome in same for record in outcome.records)
    share = f"{100 * len(same) / compared:.4g}%" if compared else "none"
    screen.line(
        (share, "bold green" if not differs else "bold red"),
        f" of the episodes replay: {len(same)} of {compared}, {turns} turns, in {duration(seconds)}",
    )
    for reason, count in Counter(outcome.reason for outcome in same if outcome.reason).most_common():
        screen.line(f"of these {count} {reason}", indent=2)
    for reason, count in Counter(outcome.reason for outcome in skipped).most_common():
        screen.line((f"{count} not compared: {reason}", "yellow"))
    if not differs:
        return
    for reason, count in Counter(outcome.reason for outcome in differs).most_common():
        screen.line((f"{count} differ: {reason}", "red"))
    screen.line()
    screen.table(("episode", "task", "turn#", "differs in", "expected", "got"), [_row(outcome) for outcome in differs[: args.show]])
    if len(differs) > args.show:
        screen.line(f"and {len(differs) - args.show} more (--show {len(differs)})")
    agent = ["--agent", args.agent] if args.agent else []
    command = shlex.join(["agentrl", "replay", args.run, differs[0].episode_id, *agent])
    screen.line(f"`{command}` shows one in full.")


def _row(outcome: Replay) -> tuple[str, ...]:
    found = outcome.difference
    if found is None:
        return (outcome.episode_id, _task_name(outcome), "", "", "", "")
    what = f"{found.what} ({found.agent})" if found.agent else found.what
    expected, got = (_short(text, other) for text, other in ((found.expected, found.got), (found.got, found.expected)))
    return (outcome.episode_id, _task_name(outcome), str(found.turn + 1), what, expected, got)


def _short(text: str, other: str, width: int = 40) -> str:
    """The part of a text from shortly before where it differs from another."""
    same = next((index for index, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other)))
    start = max(0, same - 12) if len(text) > width else 0
    cut = text[start : start + width]
    return ("..." if start else "") + cut + ("..." if start + width < len(text) else "")


def _report_one(screen: Screen, outcome: Replay) -> None:
    record = outcome.records[0]
    turns = sum(len(record["turns"]) for record in outcome.records)
    count = f"{turns} turn{'s' * (turns != 1)}"
    rewards = ", ".join(f"{record['agent'] or 'reward'} {_number(record['reward'])}" for record in outcome.records)
    screen.line((f"episode {outcome.episode_id}", "bold"), f"  task {_task_name(outcome)}, {count}, {record['status']}, {rewards}")
    found = outcome.difference
    if outcome.verdict == "skipped":
        screen.line(("not compared", "yellow"), f": {outcome.reason}")
    elif found is None:
        note = f", {outcome.reason}" if outcome.reason else ""
        screen.line(("replays", "green"), f": every observation, every reward, the score and the end are the same{note}")
    else:
        who = f", agent {found.agent}" if found.agent else ""
        screen.line(("differs", "bold red"), f" at turn {found.turn + 1} of {max(turns, found.turn + 1)}{who}: {found.what}")
        _show_difference(screen, outcome)
        screen.line(outcome.reason)


def _show_difference(screen: Screen, outcome: Replay) -> None:
    found = outcome.difference
    if found is None:
        return
    if not found.expected_ids and not found.got_ids:
        screen.line(("expected  ", "red"), found.expected, indent=2)
        screen.line(("got       ", "green"), found.got, indent=2)
        return
    pairs = zip(found.expected_ids, found.got_ids, strict=False)
    at = next((index for index, (then, now) in enumerate(pairs) if then != now), min(len(found.expected_ids), len(found.got_ids)))
    then, now = (str(ids[at]) if at < len(ids) else "nothing" for ids in (found.expected_ids, found.got_ids))
    lengths = f"{len(found.expected_ids)} expected, {len(found.got_ids)} got"
    screen.line(f"first different token: number {at} of the observation, {then} expected, {now} got ({lengths} in all)", indent=2)
    if found.expected == found.got:
        screen.line("the text is the same: the tokenizer or its chat template is not that of the run", indent=2)
    for line, style in text_difference(found.expected, found.got):
        screen.line((line, style), indent=2)


def _task_name(outcome: Replay) -> str:
    return str((outcome.records[0].get("task") or {}).get("id", "?"))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"

"""``agentrl inspect``: a run, its episodes, or one episode turn by turn, read from the run's files."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError
from agentrl.core.settings import CountOrZero
from agentrl.inspect.directory import TRAJECTORIES, RunDirectory
from agentrl.inspect.episode import forks_of
from agentrl.inspect.episodes import SORTS, Pieces, make_table, show_episode, show_run, show_table
from agentrl.inspect.export import export, plot_rewards
from agentrl.inspect.pieces import TokenTexts
from agentrl.inspect.store import PART, named
from agentrl.track.text import Screen, counted


@dataclass(frozen=True, kw_only=True)
class InspectArgs:
    """Show a run, its episodes, or one episode turn by turn, from the run's files."""

    run: str = ""
    """Directory of the run, which may still be running."""
    episode: str = ""
    """Name of an episode, to show it turn by turn; a group's number lists the group's episodes."""
    sort: str = "time"
    """Order of episodes: time, reward, score, turns, tokens, task or status; with a minus before it, descending."""
    status: tuple[str, ...] = ()
    """Only episodes with one of these statuses: finished, truncated, env_error, timeout, engine_error, cancelled."""
    task: str = ""
    """Only episodes of tasks whose id contains this text."""
    step: int | None = None
    """Only episodes started when this step was next; in a synchronous run, the episodes that the step trained on."""
    agent: str = ""
    """Only episodes of this agent, in an environment with several agents."""
    min_reward: float = -math.inf
    """Only episodes with at least this reward."""
    max_reward: float = math.inf
    """Only episodes with at most this reward."""
    limit: CountOrZero = 20
    """Maximum number of episodes to list; 0: all."""
    logprobs: bool = False
    """With EPISODE: show the log-probability of every sampled token."""
    export: Path | None = None
    """Write all chosen episodes to this file, .jsonl or .parquet, for ``datasets.load_dataset``."""
    plot: Path | None = None
    """Draw the mean reward of each step into this file, for example reward.png; needs matplotlib."""


INSPECT = command_of("inspect", InspectArgs, word("run", "RUN"), word("episode", "EPISODE", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``inspect``."""
    args: InspectArgs = read(INSPECT, words)
    if args.sort.lstrip("-") not in SORTS:
        raise ConfigError("--sort", args.sort, "is no order", f"Choose {', '.join(SORTS)}, with a minus before it for descending.")
    run, screen = RunDirectory(args.run).played(), Screen()
    if args.plot is not None:
        screen.line(f"rewards of {plot_rewards(run.metrics(), args.plot)} steps drawn in {args.plot}")
    elif args.export is not None:
        _export(run, args, args.export, screen)
    elif args.episode and not args.episode.isdecimal():
        _one_episode(run, args, screen)
    else:
        _overview(run, args, screen)
    for line in (*run.unreadable, *run.unreadable_records()):
        screen.line((f"not readable: {line}", "yellow"))
    return 0


def _chosen(args: InspectArgs) -> dict[str, Any]:
    bounds = {name: value for name, value in (("min_reward", args.min_reward), ("max_reward", args.max_reward)) if math.isfinite(value)}
    return {"status": ",".join(args.status), "task": args.task, "started": args.step, "agent": args.agent, **bounds}


def _export(run: RunDirectory, args: InspectArgs, path: Path, screen: Screen) -> None:
    written, left_out = export(run.chosen({"before": PART, **named(args.episode), **_chosen(args)}), path)
    screen.line(f"{counted(written, 'episode')} written to {path}")
    if left_out:
        screen.line((f"{left_out} left out: their records were cut because they were too long, or are incomplete", "yellow"))


def _one_episode(run: RunDirectory, args: InspectArgs, screen: Screen) -> None:
    name = args.episode
    # Each agent of an episode has a trajectory with a name of its own, which may be given too.
    records = next(run.episodes(name), None) or [*run.chosen({"name": name})][:1]
    if not records:
        remedy = f"`agentrl inspect {run.path}` lists them; --record all records every one."
        raise ConfigError("EPISODE", name, "is not among the recorded episodes", remedy)
    show_episode(screen, records, _pieces(run), logprobs=args.logprobs, forks=forks_of(run.recorded(), records[0]))


def _pieces(run: RunDirectory) -> Pieces | None:
    """Return the decoder of the run's tokens; `None` if the tokenizer cannot be loaded."""
    from agentrl.core.tokenizers import load_tokenizer

    try:
        config = run.config()
    except ConfigError:
        return None
    texts = TokenTexts(run, config.model.model)
    if texts.tokenizer is not None:
        return lambda ids: texts.pieces(ids) or []
    # Transformers, which is slow to import, is needed only where there is no such file.
    try:
        tokenizer = load_tokenizer(run.tokenizer_path(config.model.model), trust_remote_code=config.model.trust_remote_code)
    except ConfigError:
        return None
    return lambda ids: [str(tokenizer.decode([token])) for token in ids]


def _overview(run: RunDirectory, args: InspectArgs, screen: Screen) -> None:
    if not args.episode:
        show_run(run, screen)
    if not args.episode and not (run.path / TRAJECTORIES).is_file():
        screen.line((f"no episodes: {TRAJECTORIES} is missing. Train with --record all to record every one.", "yellow"))
        return
    table = make_table(run, _chosen(args), group=args.episode, sort=args.sort, limit=args.limit)
    show_table(screen, table, group=args.episode, sort=args.sort, by_status=bool(args.status))
    if table.rows:
        screen.line(f"`{shlex.join(['agentrl', 'inspect', args.run, table.rows[0].name])}` shows one turn by turn.")

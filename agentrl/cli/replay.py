"""``agentrl replay``: repeat recorded actions in the environment, and say what came out differently.

Exit codes: 0 everything compared is the same, 1 something differs, 2 the request was wrong or there was nothing to compare.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.api.background import run_until_signal
from agentrl.cli.words import command_of, read, word
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count
from agentrl.inspect.directory import Record, RunDirectory
from agentrl.track.text import Screen, counted

if TYPE_CHECKING:
    from agentrl.inspect.compare import Records, Replay
    from agentrl.inspect.replay import Replayer


@dataclass(frozen=True, kw_only=True)
class ReplayArgs:
    """Repeat recorded actions in the environment, and say what came out differently."""

    run: str = ""
    """Directory of the run."""
    episodes: tuple[str, ...] = ()
    """Names of episodes, as ``agentrl inspect`` lists them; a group's number stands for all of its episodes."""
    all: bool = False
    """Replay every recorded episode, and show which share of them replays."""
    agent: str = ""
    """Environment to replay in; by default the run's own."""
    jobs: Count = 8
    """Episodes to replay side by side."""
    show: Count = 20
    """Differences to list with ``--all``."""


REPLAY = command_of("replay", ReplayArgs, word("run", "RUN"), word("episodes", "EPISODE", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``replay``."""
    args: ReplayArgs = read(REPLAY, words)
    run = RunDirectory(args.run)
    if args.all == bool(args.episodes):
        problem = "comes with names of episodes" if args.all else "is not given, and no episode is named"
        raise ConfigError("--all", args.all, problem, f"Name an episode (`agentrl inspect {args.run}` lists them), or give --all.")
    named = [] if args.all else _named(run, args.episodes)
    episodes = run.episodes() if args.all else iter(named)
    from agentrl.inspect.compare import show_replay, show_replays
    from agentrl.inspect.replay import open_replayer

    replayer = open_replayer(run, args.agent)
    screen = Screen()
    outcomes, seconds = run_until_signal(_replay(replayer, episodes, args.jobs, screen))
    for line in run.unreadable:
        screen.line((f"not readable: {line}", "yellow"))
    if args.all:
        show_replays(screen, outcomes, seconds, run=args.run, agent=args.agent, limit=args.show)
    else:
        order = {str(records[0].get("episode_id")): place for place, records in enumerate(named)}
        for outcome in sorted(outcomes, key=lambda outcome: order[outcome.episode_id]):
            show_replay(screen, outcome)
    verdicts = Counter(str(outcome.verdict) for outcome in outcomes)
    return 1 if verdicts["differs"] else 0 if verdicts["same"] else 2


def _named(run: RunDirectory, names: Sequence[str]) -> list[Records]:
    found: list[Records] = []
    for name in names:
        episodes = list(run.episodes(name))
        if not episodes:
            remedy = f"`agentrl inspect {run.path}` lists them; --record all records every one."
            raise ConfigError("EPISODE", name, "is not among the recorded episodes", remedy)
        found += episodes
    return found


async def _replay(replayer: Replayer, episodes: Iterator[Records], jobs: int, screen: Screen) -> tuple[list[Replay], float]:
    """Replay, showing how far it is; of episodes without a difference only what a report needs is kept."""
    start, outcomes = time.monotonic(), []
    try:
        await replayer.start()
        with screen.console.status("replaying") as status:
            async for outcome in replayer.replay_all(episodes, jobs=jobs):
                outcomes.append(outcome if outcome.difference else replace(outcome, records=[*map(_slim, outcome.records)]))
                status.update(f"replaying: {counted(len(outcomes), 'episode')}")
    finally:
        await replayer.close()
    return outcomes, time.monotonic() - start


def _slim(record: Record) -> Record:
    names = ("episode_id", "agent", "status", "reward", "task")
    return {**{name: record.get(name) for name in names}, "turns": [None] * len(record.get("turns") or ())}

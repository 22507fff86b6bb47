"""Work of the busiest learner rank against the mean, and the time that a rank needs to collate its part of a batch.

python -m tests.benchmarks.balance
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from agentrl.core.types import FinishReason, Group, IntArray, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Layout
from agentrl.learner.sharding import balance, plan_updates, work
from agentrl.learner.trees import one_row_bundles, share_prefixes

HIDDEN_SIZE = 3584
BUDGET = 32768


def episodes(groups: int) -> Batch:
    """The batch of `make_groups`."""
    return collate(make_groups(groups))


def make_groups(groups: int, members: int = 16, *, prompt: int = 500, median: int = 1500, seed: int = 0) -> list[Group]:
    """Groups of single-turn episodes; a group has one prompt, and answers are lognormal with sigma 0.7, cut at 8,192 tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(groups):
        given = ints(rng.integers(0, 1000, prompt).astype(np.int32))
        lengths = np.minimum(8192, rng.lognormal(np.log(median), 0.7, members) + 1).astype(int)
        turns = [answer(given, int(length)) for length in lengths]
        members_of = tuple(
            Trajectory(trajectory_id=str(n), episode_id=str(n), group_id=number, turns=(turn,), status=Status.FINISHED, reward=0.0)
            for n, turn in enumerate(turns)
        )
        made.append(Group(group_id=number, task=Task("x"), trajectories=members_of))
    return made


def answer(prompt: IntArray, length: int) -> Turn:
    """A turn of `length` sampled tokens after a prompt."""
    return Turn(
        prompt_ids=prompt,
        token_ids=ints(np.ones(length, np.int32)),
        logprobs=floats(np.zeros(length, np.float32)),
        versions=ints(np.zeros(length, np.int32)),
        finish_reason=FinishReason.STOP,
    )


def places(batch: Batch, *, ranks: int, share: bool) -> tuple[list[list[int]], Sequence[int]]:
    """Return the sequences of each rank, by number, and the work of every sequence."""
    bundles = share_prefixes(batch, budget=BUDGET, hidden_size=HIDDEN_SIZE, parts=ranks) if share else one_row_bundles(batch)
    lengths, group = [bundle.length for bundle in bundles], [bundle.group for bundle in bundles]
    (plan,) = plan_updates(lengths, group, updates=1, ranks=ranks, budget=BUDGET, packed=True, hidden_size=HIDDEN_SIZE)
    return [[row for micro in micros for row in micro] for micros in plan.micros], [work(length, HIDDEN_SIZE) for length in lengths]


def max_over_mean(batch: Batch, *, ranks: int, share: bool = False) -> float:
    """Work of the busiest rank over that of the mean rank."""
    spread, effort = places(batch, ranks=ranks, share=share)
    loads = [sum(effort[row] for row in rows) for rows in spread]
    return max(loads) / fmean(loads)


def longest_over_mean(batch: Batch, *, ranks: int) -> float:
    """Work of the longest row over that of the mean rank: no spread of whole rows does better, if it is above 1."""
    effort = [work(length, HIDDEN_SIZE) for length in batch.input_lengths().tolist()]
    return max(effort) / (sum(effort) / ranks)


def whole_groups(batch: Batch, *, ranks: int) -> float:
    """As `max_over_mean`, if groups were given whole to ranks, by their tokens."""
    lengths, groups = batch.input_lengths().tolist(), batch.row_group().tolist()
    tokens, effort = [0] * batch.num_groups, [0] * batch.num_groups
    for length, group in zip(lengths, groups, strict=True):
        tokens[group] += length
        effort[group] += work(length, HIDDEN_SIZE)
    loads = [sum(effort[group] for group in part) for part in balance(tokens, range(len(tokens)), ranks)]
    return max(loads) / fmean(loads)


def collate_seconds(batch: Batch, *, ranks: int) -> tuple[float, int]:
    """Return the seconds that the first of `ranks` needs to lay out its own rows, and their tokens."""
    bundles = one_row_bundles(batch)
    spread, _ = places(batch, ranks=ranks, share=False)
    mine = [bundles[row] for row in spread[0]]
    layout = Layout(batch)
    begin = time.process_time()
    for bundle in mine:
        layout.micro_batch([bundle], packed=True)
    return time.process_time() - begin, sum(bundle.length for bundle in mine)


def main() -> None:
    """Print one line per number of ranks, then the time that a rank needs for its rows."""
    for ranks, groups in ((512, 256), (64, 64), (16, 32), (8, 8)):
        batch = episodes(groups)
        begin = time.process_time()
        value = max_over_mean(batch, ranks=ranks)
        took = time.process_time() - begin
        shared = max_over_mean(batch, ranks=ranks, share=True)
        print(
            f"ranks={ranks} max_over_mean={value:.3f} groups={groups} longest_row={longest_over_mean(batch, ranks=ranks):.3f} "
            f"shared_prompts={shared:.3f} whole_groups={whole_groups(batch, ranks=ranks):.3f} plan_s={took:.3f}"
        )
    groups_of = make_groups(128)
    begin = time.process_time()
    batch = collate(groups_of)
    print(f"episodes={batch.num_rows} tokens={batch.num_tokens} flat_s={time.process_time() - begin:.3f}")
    for ranks in (1, 2, 4, 8, 16, 32):
        seconds, tokens = collate_seconds(batch, ranks=ranks)
        print(f"ranks={ranks} collate_s={seconds:.3f} tokens={tokens} us_per_1k_tokens={1e9 * seconds / tokens:.1f}")


if __name__ == "__main__":
    main()

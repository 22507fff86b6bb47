"""Tokens and time of the learner for an episode with ten branches: as one prefix tree, and as rows.

    python -m tests.benchmarks.tree [--pairs 3] [--case branches] [--kernel sdpa] [--small]

prints a line per case and kernel, ``CASE KERNEL longest=.. rows=.. tree=.. tokens=.. rows_s=.. tree_s=.. time=..``. The model has random
weights and is two layers as wide as SmolLM2-135M's, with 8,192 tokens, in float32. A pass is the layout of the batch, forward and
backward of `PolicyModel` through all its micro-batches of at most 16,384 tokens. Rows and tree take turns; times are of the CPU.

``branches`` is an episode of twelve turns: a prompt of 200 tokens, then 32 sampled and 48 given tokens a turn. From the fourth turn on a
helper is asked after each turn, which reads the context so far and 24 tokens, and samples 24. ``forks`` are ten episodes that share eleven
such turns and part at the twelfth (`--branch-at`); their shared turns are sampled tokens of each.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.attention import KERNELS, register
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Layout
from agentrl.learner.models import PolicyModel
from agentrl.learner.sharding import plan_updates
from agentrl.learner.trees import Bundle, one_row_bundles, share_prefixes

BUDGET = 16384
TURNS, FIRST = 12, 4
LARGE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 8192}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one case takes with one kernel."""

    longest: int  # tokens of the longest row
    rows: int  # tokens of all rows
    tree: int  # tokens of the tree
    seconds: dict[str, float]  # medians over all pairs, by "rows" and "tree"
    ratio: float  # median ratio of the times of a pair
    difference: float  # largest difference of a gradient, over the largest gradient


def turn(rng: np.random.Generator, prompt: list[int], sampled: int, *, fresh: bool = False) -> Turn:
    """A turn that reads a prompt and samples some tokens."""
    return Turn(
        prompt_ids=ints(prompt),
        token_ids=ints(rng.integers(3, 500, sampled).tolist()),
        logprobs=floats([-1.0] * sampled),
        versions=ints([0] * sampled),
        finish_reason=FinishReason.STOP,
        fresh=fresh,
    )


def group_of(*episodes: list[Turn]) -> Batch:
    """The batch of one group of episodes."""
    members = tuple(
        Trajectory(trajectory_id=str(n), episode_id=str(n), group_id=0, turns=tuple(turns), status=Status.FINISHED, reward=float(n % 2))
        for n, turns in enumerate(episodes)
    )
    return collate([Group(group_id=0, task=Task("x"), trajectories=members)])


def conversation(rng: np.random.Generator) -> list[Turn]:
    """The turns of one context."""
    return [turn(rng, rng.integers(3, 500, 48 if number else 200).tolist(), 32) for number in range(TURNS)]


def branches(seed: int = 0) -> Batch:
    """An episode with ten branches."""
    rng = np.random.default_rng(seed)
    turns = conversation(rng)
    context: list[int] = []
    helpers = []
    for number, each in enumerate(turns):
        context += [*each.prompt_ids.tolist(), *each.token_ids.tolist()]
        if number >= FIRST - 1:
            helpers.append(turn(rng, [*context, *rng.integers(3, 500, 24).tolist()], 24, fresh=True))
    return group_of([*turns, *helpers])


def forks(seed: int = 0) -> Batch:
    """Ten episodes that part at the last turn."""
    rng = np.random.default_rng(seed)
    *shared, last = conversation(rng)
    return group_of(*([*shared, turn(rng, last.prompt_ids.tolist(), 32)] for _ in range(10)))


CASES = {"branches": branches, "forks": forks}


def one_pass(policy: PolicyModel, batch: Batch, bundles: list[Bundle], *, packed: bool) -> float:
    """Run all micro-batches forward and backward; return the seconds of CPU."""
    policy.zero_grad()
    weights = torch.linspace(-1.0, 1.0, batch.num_actions)
    begin = time.process_time()
    lengths, group = [bundle.length for bundle in bundles], [bundle.group for bundle in bundles]
    (plan,) = plan_updates(lengths, group, updates=1, ranks=1, budget=BUDGET, packed=packed, hidden_size=1)
    for places in plan.micros[0]:
        micro = Layout(batch).micro_batch([bundles[place] for place in places], packed=packed)
        new, _, _ = policy(micro)
        (new * weights[micro.actions]).sum().backward()
    return time.process_time() - begin


def compare(case: str, kernel: str, *, pairs: int, sizes: dict[str, int]) -> Found:
    """Measure rows and tree of a case in turns, after one pass of each that does not count."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=4096))
    if KERNELS[kernel].packed:
        register(kernel)
    model.set_attn_implementation(KERNELS[kernel].implementation)
    policy, batch, packed = PolicyModel(model).train(), CASES[case](), KERNELS[kernel].packed
    laid_out = {
        "rows": one_row_bundles(batch),
        "tree": share_prefixes(batch, budget=BUDGET, hidden_size=sizes["hidden_size"], costs=KERNELS[kernel].costs),
    }
    gradients = []
    for bundles in laid_out.values():
        one_pass(policy, batch, bundles, packed=packed)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    took: dict[str, list[float]] = {name: [] for name in laid_out}
    for _ in range(pairs):
        for name, bundles in laid_out.items():
            took[name].append(one_pass(policy, batch, bundles, packed=packed))
    lengths = batch.input_lengths()
    return Found(
        longest=int(lengths.max()),
        rows=int(lengths.sum()),
        tree=sum(bundle.length for bundle in laid_out["tree"]),
        seconds={name: median(seconds) for name, seconds in took.items()},
        ratio=median(tree / rows for tree, rows in zip(took["tree"], took["rows"], strict=True)),
        difference=float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()),
    )


def main() -> None:
    """Print one line per case and kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--kernel", choices=["sdpa", "varlen"], nargs="*", default=["sdpa", "varlen"])
    parser.add_argument("--small", action="store_true", help="a model that takes no time")
    arguments = parser.parse_args()
    for case in arguments.case:
        for kernel in arguments.kernel:
            found = compare(case, kernel, pairs=arguments.pairs, sizes=SMALL if arguments.small else LARGE)
            print(
                f"{case} {kernel} longest={found.longest} rows={found.rows} tree={found.tree} tokens={found.tree / found.rows:.3f} "
                f"over_longest={found.tree / found.longest:.2f} rows_s={found.seconds['rows']:.2f} tree_s={found.seconds['tree']:.2f} "
                f"time={found.ratio:.3f} gradients_differ={found.difference:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()

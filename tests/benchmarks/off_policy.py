"""The off-policy correction to choose at a staleness of 1, 4 and 16: each at the learning rate that suits it, over many seeds.

    python -m tests.benchmarks.off_policy

A small autoregressive policy, tanh of embeddings of task, place and last token, learns a sequence of tokens for each task; the reward is
the square of the share of right tokens. Batches are sampled by the weights of exactly S steps before. Advantages, corrections and losses
are those of `agentrl.algo`; all seeds are trained at once, each with parameters of its own. A learning rate is the best for the first
seeds, and the table shows the others. Results are appended to ``runs/off_policy.jsonl``, and what is there is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.compute import compute_advantages, compute_correction, compute_policy_loss
from agentrl.algo.corrections import correction_facts
from agentrl.algo.losses.ppo import PpoOptions
from agentrl.algo.off_policy import CorrectionInputs, interpolate_old
from agentrl.algo.token_losses import LossInputs
from tests.benchmarks._runs import ROOT

BOUNDS = (0, 1, 4, 16)
CORRECTIONS = ("none", "tis", "seq-tis", "icepop", "behaviour ratio", "decoupled", "tis, interpolated")
RATES = (0.03, 0.06, 0.12)
SEEDS, FIRST = 24, 8
STEPS, UPDATES = 80, 2
TASKS, LENGTH, TOKENS, WIDTH = 32, 6, 8, 16
GROUPS, SAMPLES = 8, 8

Parameters = dict[str, Tensor]


def initial() -> Parameters:
    """Parameters of every seed's policy, which is close to uniform."""
    random = torch.Generator().manual_seed(0)
    shapes = {"task": (TASKS, WIDTH), "place": (LENGTH, WIDTH), "last": (TOKENS + 1, WIDTH), "output": (WIDTH, TOKENS)}
    return {name: 0.3 * torch.randn(SEEDS, *shape, generator=random) for name, shape in shapes.items()}


def logits(parameters: Parameters, tasks: Tensor, place: Tensor, last: Tensor) -> Tensor:
    """Logits of the next token. # [seeds, N] each -> [seeds, N, tokens]."""
    seed = torch.arange(SEEDS)[:, None]
    hidden = torch.tanh(parameters["task"][seed, tasks] + parameters["place"][seed, place] + parameters["last"][seed, last])
    return hidden @ parameters["output"]


def sample(parameters: Parameters, tasks: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences for tasks, and their log-probabilities. # [seeds, N] -> [seeds, N, length] twice."""
    last, tokens, found = torch.full_like(tasks, TOKENS), [], []
    for place in range(LENGTH):
        scores = torch.log_softmax(logits(parameters, tasks, torch.full_like(tasks, place), last), -1)
        last = (scores - torch.empty_like(scores).exponential_(generator=random).log()).argmax(-1)
        tokens.append(last)
        found.append(scores.gather(-1, last[..., None])[..., 0])
    return torch.stack(tokens, -1), torch.stack(found, -1)


def score(parameters: Parameters, tasks: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of sequences. # [seeds, N], [seeds, N, length] -> [seeds, N, length]."""
    shape = tokens.shape
    last = torch.cat([torch.full_like(tokens[..., :1], TOKENS), tokens[..., :-1]], -1)
    place = torch.arange(LENGTH).expand(shape)
    flat = (tasks[..., None].expand(shape).flatten(1), place.flatten(1), last.flatten(1))
    scores = torch.log_softmax(logits(parameters, *flat), -1)
    return scores.gather(-1, tokens.flatten(1)[..., None])[..., 0].reshape(shape)


@dataclass
class Samples:
    """One step's sequences of all seeds."""

    tasks: Tensor  # [seeds, N]
    tokens: Tensor  # [seeds, N, length]
    behaviour: Tensor  # [seeds, N, length]
    rewards: Tensor  # [seeds, N]
    version: int

    def advantages(self) -> Tensor:
        """Those of `group_norm`. # [seeds, N, length]."""
        episodes = self.rewards.numel()
        episode = torch.arange(episodes).repeat_interleave(LENGTH)
        earned = torch.zeros(episodes, LENGTH)
        earned[:, -1] = self.rewards.flatten()
        group = torch.arange(episodes) // SAMPLES
        inputs = AdvantageInputs(token_rewards=earned.flatten(), episode=episode, group=group, rewards=self.rewards.flatten())
        return compute_advantages("group_norm", inputs, AdvantageOptions()).advantages.reshape(self.tokens.shape)


def collect(parameters: Parameters, version: int, targets: Tensor, random: torch.Generator) -> Samples:
    """Sample groups of every seed's tasks."""
    tasks = torch.rand(SEEDS, TASKS, generator=random).argsort(-1)[:, :GROUPS].repeat_interleave(SAMPLES, -1)
    tokens, behaviour = sample(parameters, tasks, random)
    right = (tokens == targets[torch.arange(SEEDS)[:, None], tasks]).float().mean(-1)
    return Samples(tasks, tokens, behaviour, right.square(), version)


def loss_of(name: str, parameters: Parameters, batch: Samples, advantages: Tensor, old: Tensor, part: slice, step: float) -> Tensor:
    """The loss of one update, summed over seeds; `step` is the version of the present weights."""
    new = score(parameters, batch.tasks[:, part], batch.tokens[:, part]).flatten()
    behaviour, chosen = batch.behaviour[:, part].flatten(), advantages[:, part].flatten()
    start = old[:, part].flatten()
    if name == "tis, interpolated" and step > int(step):
        versions = torch.full((len(new),), batch.version)
        start = interpolate_old(new.detach(), behaviour, versions, proximal=int(step), current=step)
    row = torch.arange(len(new)) // LENGTH
    same = torch.full((len(new),), batch.version == int(step))
    preset = {"tis, interpolated": "tis", "behaviour ratio": "none"}.get(name, name)
    weighed = CorrectionInputs(old=start, behaviour=behaviour, sequence=row, same_version=same, advantages=chosen)
    correction = compute_correction(preset, weighed, correction_facts(preset).options())
    inputs = LossInputs(new=new, old=start, advantages=chosen, sequence=row)
    per_token = compute_policy_loss("ppo", inputs, PpoOptions()).per_token
    return (per_token * correction.weights).sum() * SEEDS / len(new)


def train(name: str, bound: int, rate: float) -> tuple[list[float], list[float]]:
    """Train all seeds; the mean reward of each over the last steps' own samples and all tasks, and over the whole run."""
    random = torch.Generator().manual_seed(1)
    targets = torch.randint(TOKENS, (SEEDS, TASKS, 1), generator=random) + torch.randint(TOKENS, (SEEDS, 1, LENGTH), generator=random)
    targets = targets % TOKENS
    parameters = {key: value.requires_grad_() for key, value in initial().items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=rate, betas=(0.9, 0.95))
    waiting: deque[Samples] = deque()
    rewards = []
    for step in range(STEPS):
        with torch.no_grad():
            missing = bound + 1 - len(waiting) if step == 0 else 1
            waiting.extend(collect(parameters, step, targets, random) for _ in range(missing))
            batch = waiting.popleft()
            old = batch.behaviour if name == "behaviour ratio" else score(parameters, batch.tasks, batch.tokens)
            advantages = batch.advantages()
        size = GROUPS * SAMPLES // UPDATES
        for update in range(UPDATES):
            part = slice(update * size, (update + 1) * size)
            optimizer.zero_grad()
            loss_of(name, parameters, batch, advantages, old, part, step + update / UPDATES).backward()
            optimizer.step()
        rewards.append(batch.rewards.mean(-1))
    with torch.no_grad():
        last = torch.stack([collect(parameters, STEPS, targets, random).rewards.mean(-1) for _ in range(8)]).mean(0)
    return last.tolist(), torch.stack(rewards).mean(0).tolist()


def read(path: Path) -> list[dict[str, Any]]:
    """What has been done."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def study(path: Path, share: tuple[int, int], limit_s: float) -> None:
    """Do what `path` does not hold; begin nothing after `limit_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [(bound, name, rate) for name, bound, rate in itertools.product(CORRECTIONS, BOUNDS, RATES) if bound or name == "none"]
    start = time.monotonic()
    for bound, name, rate in cells[share[0] :: share[1]]:
        known = {(record["max_staleness"], record["off_policy"], record["learning_rate"]) for record in read(path)}
        if (bound, name, rate) in known or time.monotonic() - start > limit_s:
            continue
        begun = time.process_time()
        final, whole = train(name, bound, rate)
        record = {"max_staleness": bound, "off_policy": name, "learning_rate": rate, "final": final, "whole": whole}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "cpu_s": time.process_time() - begun}) + "\n")


def best(records: Sequence[dict[str, Any]], bound: int, name: str) -> dict[str, Any] | None:
    """The record with the learning rate that is best for the first seeds; `None` before all rates were tried."""
    runs = [record for record in records if (record["max_staleness"], record["off_policy"]) == (bound, name)]
    return max(runs, key=lambda record: statistics.fmean(record["final"][:FIRST])) if len(runs) == len(RATES) else None


def table(records: Sequence[dict[str, Any]], figure: str) -> str:
    """Markdown: mean and standard error over the later seeds, with the learning rate; bold where no other is better by two errors."""
    lines = [f"| correction | {' | '.join(f'S = {bound}' for bound in BOUNDS)} |", "|---|" + "---|" * len(BOUNDS)]
    columns: dict[tuple[int, str], tuple[float, float, float, list[float]]] = {}
    for bound, name in itertools.product(BOUNDS, CORRECTIONS):
        if (record := best(records, bound, name)) is not None:
            seen = record[figure][FIRST:]
            columns[bound, name] = statistics.fmean(seen), statistics.stdev(seen) / len(seen) ** 0.5, record["learning_rate"], seen
    for name in CORRECTIONS:
        row = []
        for bound in BOUNDS:
            if (bound, name) not in columns:
                row.append("")
                continue
            mean, error, rate, seen = columns[bound, name]
            top = max((value for (other, _), value in columns.items() if other == bound), key=lambda value: value[0])
            behind = [mine - theirs for mine, theirs in zip(top[3], seen, strict=True)]
            same = not any(behind) or statistics.fmean(behind) < 2 * statistics.stdev(behind) / len(behind) ** 0.5
            shown = f"{mean:.3f} ± {error:.3f}"
            row.append(f"{f'**{shown}**' if same else shown} ({rate})")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Do what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "off_policy.jsonl", help="results, appended as they come")
    parser.add_argument("--share", default="0/1", help="part of the work to do here, as number/parts; several processes may share it")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which nothing is begun")
    options = parser.parse_args()
    number, parts = map(int, options.share.split("/"))
    torch.set_num_threads(1)
    study(options.out, (number, parts), options.limit_s)
    records = read(options.out)
    print(f"Reward of the final weights:\n\n{table(records, 'final')}\n\nMean reward of all steps:\n\n{table(records, 'whole')}")
    print(f"\n{len(records)} settings of {SEEDS} seeds, {sum(record['cpu_s'] for record in records):.0f} s of CPU")


if __name__ == "__main__":
    main()

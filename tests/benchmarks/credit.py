"""How fast each way to assign credit to a step learns where the reward comes late and one decision counts most, over 24 seeds.

    python -m tests.benchmarks.credit

An episode has ten turns of one token. Each turn has a right action, and one turn of each task is the key: whoever decides wrongly there
earns nothing at the end, whoever decides rightly the share of right actions. The state tells the turn, and whether the key was
turned. In a second study a time limit cuts half of the episodes before their end. Policy and critic are tables, so that nothing but
credit differs. Advantages are those of `agentrl.algo`; all seeds are trained at once, each with parameters of its own. A learning rate
is the best for eight further seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import AdvantageInputs, Advantages, whiten
from agentrl.algo.estimators import estimator_facts, find_estimator

SEEDS, FIRST = 32, 8
"""Seeds, of which the first choose the learning rate and the others are shown."""
STEPS = 120
TASKS, TURNS, ACTIONS, STATUSES = 16, 10, 6, 3
GROUPS, SAMPLES = 8, 8
RATES = (0.1, 0.2, 0.4, 0.8)
GOAL = 0.6
"""Mean reward that counts as learned; the best is 1."""
T_95 = 2.069
"""Of Student's distribution with 23 degrees of freedom."""


@dataclass(frozen=True)
class Way:
    """A way to assign credit.

    Attributes:
        estimator: Name of the estimator.
        options: Its options.
        dense: True if a right action is paid in its turn and not at the end; the reward of an episode is the same.
        branch_at: Turn at which the episodes of a group part, in two families of four; 0: they share nothing.
        cut: True if half of the episodes are cut before one of the turns 3 to 9, drawn at random, and earn nothing.
        bootstrap: True if the critic's value of the state in which an episode was cut stands for what it did not come to earn.
    """

    estimator: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dense: bool = False
    branch_at: int = 0
    cut: bool = False
    bootstrap: bool = False


WAYS: Mapping[str, Way] = {
    "`group_norm`": Way("group_norm"),
    "`turn_norm`, late reward": Way("turn_norm"),
    "`turn_norm`, a reward for each turn": Way("turn_norm", dense=True),
    "`gigpo`": Way("gigpo"),
    "`gigpo`, forked at turn 4 (`--branch-at 4 --branches 4`)": Way("gigpo", branch_at=4),
    "`gae`, lambda 1": Way("gae"),
    "`gae`, lambda 0.9": Way("gae", {"gae_lambda": 0.9}),
    "`gae`, lambda by length, 1 for the critic (VAPO)": Way("gae", {"gae_lambda": "adaptive", "gae_alpha": 2.0, "critic_lambda": 1.0}),
}
CUT_WAYS: Mapping[str, Way] = {
    "`group_norm`": Way("group_norm", cut=True),
    "`gae`, lambda 1, `--no-bootstrap-truncated`": Way("gae", cut=True),
    "`gae`, lambda 1": Way("gae", cut=True, bootstrap=True),
    "`gae`, lambda 0.9, `--no-bootstrap-truncated`": Way("gae", {"gae_lambda": 0.9}, cut=True),
    "`gae`, lambda 0.9": Way("gae", {"gae_lambda": 0.9}, cut=True, bootstrap=True),
}


@dataclass(frozen=True)
class World:
    """Right actions and key turns. # [TASKS, TURNS], [TASKS]."""

    right: Tensor
    key: Tensor

    @classmethod
    def new(cls) -> World:
        """The same for all seeds and ways."""
        random = torch.Generator().manual_seed(0)
        right = torch.randint(ACTIONS, (TASKS, TURNS), generator=random)
        return cls(right, torch.randint(2, 7, (TASKS,), generator=random))

    def after(self, tasks: Tensor, turn: int, actions: Tensor, status: Tensor) -> tuple[Tensor, Tensor]:
        """Whether actions are right, and the status after them: 0 before the key, then 1 for right and 2 for wrong. # [S, N] each."""
        hit = actions == self.right[tasks, turn]
        return hit, torch.where(self.key[tasks] == turn, torch.where(hit, 1, 2), status)


def play(world: World, table: Tensor, tasks: Tensor, random: torch.Generator, branch_at: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, statuses before them, and whether they were right; [S, TASKS, TURNS, STATUSES, ACTIONS] -> [S, N, TURNS] each.

    Forked, an episode goes on from the turns before `branch_at` of the first of its four.
    """
    seeds = torch.arange(len(table))[:, None].expand(tasks.shape)
    first = torch.arange(tasks.shape[1]) // 4 * 4
    status, actions, statuses, hits = torch.zeros_like(tasks), [], [], []
    for turn in range(TURNS):
        scores = table[seeds, tasks, turn, status].log_softmax(-1)
        chosen = (scores - torch.empty_like(scores).exponential_(generator=random).log()).argmax(-1)
        if turn < branch_at:
            chosen = chosen[:, first]
        hit, after = world.after(tasks, turn, chosen, status)
        actions.append(chosen)
        statuses.append(status)
        hits.append(hit)
        status = after
    return torch.stack(actions, -1), torch.stack(statuses, -1), torch.stack(hits, -1)


def earned(world: World, tasks: Tensor, hits: Tensor, dense: bool) -> Tensor:
    """Reward of each turn. # [S, N, TURNS]."""
    opened = hits.gather(-1, world.key[tasks][..., None])
    shares = hits.float() / TURNS * opened
    late = torch.zeros_like(shares)
    late[..., -1] = shares.sum(-1)
    return shares if dense else late


def lengths_of(way: Way, tasks: Tensor, random: torch.Generator) -> Tensor:
    """Turns of each episode that are played. # [S, N]."""
    if not way.cut:
        return torch.full_like(tasks, TURNS)
    at = torch.randint(3, TURNS, tasks.shape, generator=random)
    return torch.where(torch.rand(tasks.shape, generator=random) < 0.5, at, TURNS)


def advantages_of(way: Way, rewards: Tensor, states: Tensor, values: Tensor, lengths: Tensor) -> Advantages:
    """Advantages and targets of the critic, 0 for turns that are not played; groups follow each other. # [S, N, TURNS] each; [S, N]."""
    seeds, episodes, turns = rewards.shape
    each = torch.arange(seeds * episodes)
    played = (torch.arange(turns) < lengths[..., None]).flatten()
    flat = rewards.flatten()[played]
    at_cut = values.gather(-1, lengths[..., None].clamp(max=turns - 1))[..., 0] * (lengths < turns)
    inputs = AdvantageInputs(
        token_rewards=flat,
        episode=each.repeat_interleave(turns)[played],
        group=each // SAMPLES,
        rewards=rewards.sum(-1).flatten(),
        values=values.flatten()[played],
        turn=torch.arange(len(flat)),
        state=((each // SAMPLES).repeat_interleave(turns) * (TURNS * STATUSES) + states.flatten())[played],
        at_cut=at_cut.flatten() if way.bootstrap else None,
    )
    facts = estimator_facts(way.estimator)
    found = find_estimator(way.estimator)(inputs, facts.options(**way.options))
    found = found if isinstance(found, Advantages) else Advantages(advantages=found)
    advantages, returns = (
        None if own is None else torch.zeros(len(played)).masked_scatter(played, own).view_as(rewards)
        for own in (found.advantages, found.returns)
    )
    assert advantages is not None
    if facts.whitens:
        kept = played.view_as(rewards)
        advantages = torch.stack(
            [torch.zeros_like(own).masked_scatter(mask, whiten(own[mask])) for own, mask in zip(advantages, kept, strict=True)]
        )
    return Advantages(advantages=advantages, returns=returns)


def train(way: Way, rate: float) -> Tensor:
    """Mean reward of every seed in each step, of episodes that are neither trained nor cut. # [SEEDS, STEPS]."""
    world, random = World.new(), torch.Generator().manual_seed(1)
    table = torch.zeros(SEEDS, TASKS, TURNS, STATUSES, ACTIONS, requires_grad=True)
    critic = torch.zeros(SEEDS, TASKS, TURNS, STATUSES, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [table], "lr": rate}, {"params": [critic], "lr": 0.1}])
    turn, curve = torch.arange(TURNS), []
    for _ in range(STEPS):
        tasks = torch.rand(SEEDS, TASKS, generator=random).argsort(-1)[:, :GROUPS].repeat_interleave(SAMPLES, 1)
        with torch.no_grad():
            actions, statuses, hits = play(world, table, tasks, random, way.branch_at)
        lengths = lengths_of(way, tasks, random)
        played = (turn < lengths[..., None]).float()
        place = (torch.arange(SEEDS)[:, None, None], tasks[..., None], turn, statuses)
        rewards, values = earned(world, tasks, hits, way.dense) * played, critic[place]
        found = advantages_of(way, rewards, turn * STATUSES + statuses, values.detach(), lengths)
        scores = table[place].log_softmax(-1).gather(-1, actions[..., None])[..., 0]
        loss = -(found.advantages * scores).mean((1, 2)).sum()
        if found.returns is not None:
            loss = loss + ((values - found.returns).square() * played).mean((1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            every = torch.arange(TASKS).repeat(SEEDS, 4)
            *_, hits = play(world, table, every, random)
            curve.append(earned(world, every, hits, dense=False).sum(-1).mean(-1))
    return torch.stack(curve, -1)


def steps_to_goal(curve: Tensor) -> Tensor:
    """First step in which the reward of each seed is at the goal; `STEPS` if it never is. # [S, STEPS] -> [S]."""
    there = curve >= GOAL
    return torch.where(there.any(-1), there.float().argmax(-1), STEPS).float()


def interval(values: Tensor) -> str:
    """Mean and 95 % interval."""
    own = values.tolist()
    return f"{statistics.fmean(own):.1f} ± {T_95 * statistics.stdev(own) / len(own) ** 0.5:.1f}"


def table_of(ways: Mapping[str, Way]) -> None:
    """Print the table of some ways, the first of which the others are compared with."""
    found: dict[str, tuple[float, Tensor]] = {}
    for name, way in ways.items():
        curves = {rate: train(way, rate) for rate in RATES}
        rate = max(RATES, key=lambda each: float(curves[each][:FIRST].mean()))
        found[name] = rate, curves[rate][FIRST:]
    base = steps_to_goal(found["`group_norm`"][1])
    print(f"| credit | learning rate | steps to a reward of {GOAL} | fewer than `group_norm` | reward after {STEPS} steps |")
    print("|---|---|---|---|---|")
    for name, (rate, curve) in found.items():
        steps = steps_to_goal(curve)
        fewer = "" if name == "`group_norm`" else interval(base - steps)
        last = curve[:, -10:].mean(-1) * 100
        print(f"| {name} | {rate:g} | {interval(steps)} | {fewer} | {interval(last)} % |")


def main() -> None:
    """Print both tables."""
    table_of(WAYS)
    print()
    table_of(CUT_WAYS)


if __name__ == "__main__":
    main()

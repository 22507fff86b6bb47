"""Whole training steps against the same steps written out in plain PyTorch, in float64, on nothing but the groups.

Nothing of the package is used here beside its types, so that a wrong line anywhere between a group and the weights shows: which tokens
make a row, what a branch, an episode and an agent are, where rewards and KL are charged,
what is anchored, clipped, weighed, and divided by what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.core.types import Group, Status, Task, Trajectory, floats
from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, make_settings, make_turn

STEPS = 3
RATE, CRITIC_RATE = 0.3, 1.0


def some_groups(step: int, agents: tuple[str, ...]) -> tuple[Group, ...]:
    """Two tasks, three members each; the first episode rewrites its context, so that it has two rows; the second is a step old."""
    rng = np.random.default_rng(50 + step)
    groups = []
    for number in range(2):
        trajectories = []
        for member in range(3):
            for agent in agents:
                count = 3 if member == 0 else int(rng.integers(1, 3))
                turns = tuple(
                    make_turn(
                        rng,
                        version=max(step - (member == 1), 0),
                        fresh=member == 0 and place == 1,
                        reward=float(rng.normal()),
                        temperature=0.9 + 0.2 * place,
                    )
                    for place in range(count)
                )
                shifts = rng.normal(0.2, 1.5, len(turns))
                turns = tuple(replace(turn, logprobs=floats((turn.logprobs + s).tolist())) for turn, s in zip(turns, shifts, strict=True))
                reward = float(np.float32(sum(np.float32(turn.reward) for turn in turns)))
                name = f"{step}-{number}-{member}"
                trajectories.append(
                    Trajectory(
                        trajectory_id=f"{name}-{agent}",
                        episode_id=name,
                        group_id=number,
                        turns=turns,
                        status=Status.FINISHED,
                        reward=reward,
                        agent=agent,
                    )
                )
        groups.append(Group(group_id=number, task=Task("x"), trajectories=tuple(trajectories)))
    return tuple(groups)


@dataclass
class Flat:
    """The action tokens of a step, one after another, with what each belongs to."""

    rows: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)  # tokens, places of actions, temperatures
    row: list[int] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)
    compared: list[tuple[int, str]] = field(default_factory=list)  # of each episode: the task and the agent
    rewards: list[float] = field(default_factory=list)  # of each episode


def flatten(groups: tuple[Group, ...]) -> Flat:
    flat = Flat()
    for group in groups:
        for agent in dict.fromkeys(t.agent for t in group.trajectories):
            for trajectory in (t for t in group.trajectories if t.agent == agent):
                for place, turn in enumerate(trajectory.turns):
                    if place == 0 or turn.fresh:
                        flat.rows.append(([], [], []))
                    tokens, places, temperatures = flat.rows[-1]
                    tokens += turn.prompt_ids.tolist()
                    for token, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
                        places.append(len(tokens))
                        tokens.append(token)
                        temperatures.append(float(np.float32(turn.temperature)))
                        flat.row.append(len(flat.rows) - 1)
                        flat.episode.append(len(flat.rewards))
                        flat.behaviour.append(logprob)
                        flat.version.append(int(turn.versions[0]))
                        flat.earned.append(0.0)
                    flat.earned[-1] = float(np.float32(turn.reward))
                flat.rewards.append(float(np.float32(trajectory.reward)))
                flat.compared.append((group.group_id, agent))
    return flat


class Plain:
    """Policy, reference and critic in float64, trained by stochastic gradient descent."""

    def __init__(self, model: str, algo: dict[str, Any], learner: dict[str, Any]) -> None:
        from transformers import AutoModel, AutoModelForCausalLM

        self.algo, self.learner = algo, learner
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.body = AutoModel.from_pretrained(model, dtype=torch.float64)
        self.head = torch.nn.Parameter(torch.zeros(32, dtype=torch.float64))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=RATE)
        self.critic = [*self.body.parameters(), self.head]
        self.critic_optimizer = torch.optim.SGD(self.critic, lr=CRITIC_RATE)

    def score(self, model: Any, flat: Flat) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the tempered distribution. # [A], [A]."""
        found, entropy = [], []
        for tokens, places, temperatures in flat.rows:
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
            for place, temperature in zip(places, temperatures, strict=True):
                all_of_them = torch.log_softmax(logits[place - 1] / temperature, -1)
                found.append(all_of_them[tokens[place]])
                entropy.append(-(all_of_them.exp() * all_of_them).sum())
        return torch.stack(found), torch.stack(entropy)

    def values(self, flat: Flat) -> Tensor:
        found = []
        for tokens, places, _ in flat.rows:
            hidden = self.body(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            found += [hidden[place - 1] @ self.head for place in places]
        return torch.stack(found)

    def divided(self, losses: Tensor, flat: Flat) -> Tensor:
        """One number of the losses of all tokens."""
        episodes = len(flat.rewards)
        if self.algo["loss_aggregation"] == "token-mean":
            return losses.mean()
        total = losses.new_zeros(())
        for episode in range(episodes):
            mine = losses[[place for place, owner in enumerate(flat.episode) if owner == episode]]
            total = total + (mine.mean() if self.algo["loss_aggregation"] == "seq-mean-token-mean" else mine.sum())
        return total / episodes

    def apply(self, loss: Tensor, parameters: list[Any], optimizer: Any) -> float:
        """Clip and apply the gradient of a loss; its norm before."""
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.learner["max_grad_norm"]))
        optimizer.step()
        return norm


def gae(flat: Flat, earned: list[float], values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Whitened advantages, and returns."""
    found = [0.0] * len(earned)
    for place in reversed(range(len(earned))):
        last = place + 1 == len(earned) or flat.episode[place + 1] != flat.episode[place]
        after, value_after = (0.0, 0.0) if last else (found[place + 1], float(values[place + 1]))
        found[place] = earned[place] + gamma * value_after - float(values[place]) + gamma * lam * after
    raw = torch.tensor(found, dtype=torch.float64)
    return (raw - raw.mean()) / raw.var(correction=0).clamp(min=1e-8).sqrt(), raw + values


def group_norm(flat: Flat) -> Tensor:
    found = []
    for episode in flat.episode:
        others = [reward for reward, whose in zip(flat.rewards, flat.compared, strict=True) if whose == flat.compared[episode]]
        found.append((flat.rewards[episode] - np.mean(others)) / (np.std(others, ddof=1) + 1e-9))
    return torch.tensor(found, dtype=torch.float64)


def k2(difference: Tensor) -> Tensor:
    """Half the square up to 10, and its tangent beyond."""
    bound = 20.0**0.5
    return torch.where(difference.abs() > bound, 10.0 + bound * (difference.abs() - bound), 0.5 * difference.square())


def weights_of(flat: Flat, old: Tensor, algo: dict[str, Any]) -> Tensor:
    log_rho = old - torch.tensor(flat.behaviour, dtype=torch.float64)
    if algo.get("off_policy_level") == "seq" or algo["off_policy"] == "seq-tis":
        return per_row(flat, log_rho, torch.sum).clamp(-20, 20).exp().clamp(max=2.0)
    return log_rho.exp().clamp(max=2.0)


def per_row(flat: Flat, values: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """What `of` says of the tokens of each token's row. # [A]."""
    rows = torch.tensor(flat.row)
    return torch.stack([of(values[rows == row]) for row in flat.row])


def interpolated(flat: Flat, new: Tensor, step: int, done: float) -> Tensor:
    """AReaL's estimate of what the log-probabilities were before the first update, `done` of a step ago. # [A]."""
    found = []
    for now, then, version in zip(new.detach(), flat.behaviour, flat.version, strict=True):
        found.append(then + (step - version) / (step + done - version) * (now - then))
    return torch.stack(found)


def one_step(plain: Plain, groups: tuple[Group, ...], step: int) -> dict[str, float]:
    """A whole step, written out; the means over its updates of what is reported."""
    flat, algo = flatten(groups), plain.algo
    with torch.no_grad():
        old, reference = plain.score(plain.policy, flat)[0], plain.score(plain.reference, flat)[0]
        values = plain.values(flat) if algo["advantage_estimator"] == "gae" else None
    difference = old - reference
    in_loss, coefficient = algo.get("use_kl_loss", False), algo["init_kl_coef"]
    penalty = k2(difference) if algo["kl_estimator"] == "k2" else difference
    returns = None
    if values is not None:
        charged = (torch.tensor(flat.earned, dtype=torch.float64) - (0.0 if in_loss else coefficient) * penalty).tolist()
        advantages, returns = gae(flat, charged, values, algo["gamma"], algo["gae_lambda"])
    else:
        advantages = group_norm(flat)
        if not in_loss:
            places = torch.arange(len(flat.episode))
            episode = torch.tensor(flat.episode)
            ahead = torch.stack([penalty[(episode == episode[p]) & (places >= p)].sum() for p in places])
            advantages = advantages - coefficient * ahead
    weights = weights_of(flat, old, algo)
    seen: dict[str, list[float]] = {}
    for epoch in range(algo["ppo_epochs"]):
        if values is not None and returns is not None:
            new_values, clip = plain.values(flat), plain.learner["value_clip"]
            near = values + (new_values - values).clamp(-clip, clip)
            loss = plain.divided(0.5 * torch.maximum((new_values - returns).square(), (near - returns).square()), flat)
            seen.setdefault("loss/value", []).append(float(loss))
            seen.setdefault("critic/grad_norm", []).append(plain.apply(loss, plain.critic, plain.critic_optimizer))
        new, entropy = plain.score(plain.policy, flat)
        if epoch and algo.get("old_logprobs") == "interpolated":
            old = interpolated(flat, new, step, epoch / algo["ppo_epochs"])
            weights = weights_of(flat, old, algo)
        ratio = (new - old).exp()
        if algo.get("policy_loss") == "gspo":
            ratio = (per_row(flat, (new - old).detach(), torch.mean) + new - new.detach()).exp()
        low, high = 1.0 - algo["eps_clip_low"], 1.0 + algo["eps_clip_high"]
        policy = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages) * weights
        parts = {"loss/policy": plain.divided(policy, flat)}
        if in_loss:
            kl = k2(new - reference) * weights
            parts["loss/kl"] = coefficient * plain.divided(kl, flat)
        parts["loss/entropy"] = -algo["entropy_coef"] * plain.divided(entropy, flat)
        for name, part in parts.items():
            seen.setdefault(name, []).append(float(part))
        norm = plain.apply(torch.stack(list(parts.values())).sum(), list(plain.policy.parameters()), plain.optimizer)
        seen.setdefault("grad_norm", []).append(norm)
    found = {name: float(np.mean(numbers)) for name, numbers in seen.items()}
    return found | {
        "advantage/mean": float(advantages.mean()),
        "advantage/abs": float(advantages.abs().mean()),
        "kl/reference": float(penalty.mean()),
    }


COMMON = {"ppo_epochs": 2, "entropy_coef": 0.01, "eps_clip_low": 0.05, "eps_clip_high": 0.1, "off_policy": "tis", "gamma": 1.0}
KL = {"init_kl_coef": 0.3, "kl_estimator": "k2"}
KL_LOSS = KL | {"use_kl_loss": True}
GAE = {"advantage_estimator": "gae", "gae_lambda": 0.9}
GROUP = {"advantage_estimator": "group_norm", "loss_aggregation": "seq-mean-token-mean"}
SEQUENCE = {"policy_loss": "gspo", "off_policy_level": "seq", "eps_clip_low": 0.02, "eps_clip_high": 0.02}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ppo": (("",), GAE | KL | {"gamma": 0.95, "kl_estimator": "k1", "loss_aggregation": "token-mean"}),
    "ppo, KL in the loss": (("",), GAE | KL_LOSS | {"loss_aggregation": "seq-mean-token-sum"}),
    "gspo": (("ann", "bob"), GROUP | KL | SEQUENCE),
    "grpo": (("ann", "bob"), GROUP | KL_LOSS),
    "interpolated": (("",), GROUP | KL_LOSS | {"old_logprobs": "interpolated", "ppo_epochs": 3, "off_policy": "seq-tis"}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_written_out(tiny_model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Adam's first steps are signs of gradients, of rounding too where there is none, and they undo the clipping.
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr=lr))
    agents, own = CASES[name]
    algo, learner = COMMON | own, {"max_grad_norm": 0.3, "value_clip": 0.1, "critic_learning_rate": CRITIC_RATE, "learning_rate": RATE}
    rank, plain = LearnerRank(make_settings(tiny_model, algo=algo, learner=learner), CollectingSender()), Plain(tiny_model, algo, learner)
    rank.start(0, 1, 0)
    seen = []
    for step in range(STEPS):
        groups = some_groups(step, agents)
        metrics, expected = rank.train(step, *groups).metrics, one_step(plain, groups, step)
        for metric, value in expected.items():
            assert metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, metric)
        seen.append(metrics)
    # Each part is at work in some step, or a fault of it would not show.
    at_work = {"grad_norm": 0.3, "policy/clip_fraction": 0.05, "off_policy/bounded": 0.05, "kl/reference": 1e-3}
    if algo["advantage_estimator"] == "gae":
        at_work |= {"value/clip_fraction": 0.05, "critic/grad_norm": 0.3}
    assert {metric for metric, least in at_work.items() if max(metrics[metric] for metrics in seen) <= least} == set()
    found = dict(rank._started.named_weights())
    rank.close()
    far = max(float((found[key] - parameter).abs().max()) for key, parameter in plain.policy.named_parameters())
    moved = max(float((a - b).abs().max()) for a, b in zip(plain.policy.parameters(), plain.reference.parameters(), strict=True))
    assert far < 1e-4 * moved

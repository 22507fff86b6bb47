"""A tiny random model, random groups, and learner settings for tests of the learner."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.algo.plan import AlgoConfig, AlgoSettings
from agentrl.core.types import FinishReason, Group, Status, Task, Trajectory, Turn, floats, ints
from agentrl.learner.plan import LearnerConfig, LoraConfig
from agentrl.learner.settings import LearnerSettings

VOCABULARY = 64


def write_model(path: Path, *, tied: bool = True, seed: int = 0, **overrides: Any) -> str:
    """A random Llama of about 20 thousand parameters, with a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    own = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.3}
    config = LlamaConfig(tie_word_embeddings=tied, **shape | own | overrides)
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def write_experts(path: Path, kind: str = "Qwen3Moe", *, num_experts: int = 4, **overrides: Any) -> str:
    """A random mixture of experts, with a tokenizer; two experts for a token."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_local_experts": num_experts, "head_dim": 16}
    own = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256}
    config = getattr(transformers, f"{kind}Config")(**shape | experts | own | {"num_experts": num_experts} | overrides)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0", chat_template="{{ messages }}").save_pretrained(
        path
    )


def make_turn(rng: np.random.Generator, *, version: int = 0, fresh: bool = False, reward: float = 0.0, temperature: float = 1.0) -> Turn:
    sampled = int(rng.integers(1, 7))
    return Turn(
        prompt_ids=ints(rng.integers(2, VOCABULARY, int(rng.integers(1, 9))).tolist()),
        token_ids=ints(rng.integers(2, VOCABULARY, sampled).tolist()),
        logprobs=floats((-rng.random(sampled) * 3.0 - 2.5).tolist()),
        versions=ints([version] * sampled),
        finish_reason=FinishReason.STOP,
        fresh=fresh,
        reward=reward,
        temperature=temperature,
    )


def make_trajectory(rng: np.random.Generator, group: int, member: int, *, version: int = 0, status: Status = Status.FINISHED) -> Trajectory:
    """One to three turns; the last context may be rewritten."""
    turns = tuple(
        make_turn(
            rng,
            version=version,
            fresh=number > 0 and bool(rng.random() < 0.3),
            reward=float(rng.integers(0, 2)),
            temperature=0.8 + 0.4 * float(rng.random()),
        )
        for number in range(int(rng.integers(1, 4)))
    )
    name = f"{group}-{member}"
    reward = float(rng.normal()) if status.trainable else None
    return Trajectory(trajectory_id=name, episode_id=name, group_id=group, turns=turns, status=status, reward=reward)


def make_groups(count: int = 4, members: int = 3, *, seed: int = 0, version: int = 0) -> tuple[Group, ...]:
    """Groups whose members begin with the same prompt."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(count):
        first, *others = (make_trajectory(rng, g, m, version=version) for m in range(members))
        prompt = first.turns[0].prompt_ids
        same = [replace(t, turns=(replace(t.turns[0], prompt_ids=prompt), *t.turns[1:])) for t in others]
        groups.append(Group(group_id=g, task=Task("x"), trajectories=(first, *same)))
    return tuple(groups)


def make_trees(count: int = 2, *, branches: int = 8, depth: int = 6, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[Group, ...]:
    """Groups whose rows branch off each other, as contexts that are rewritten (rows of one episode) and as forks (episodes) do.

    The first `depth` rows of a group branch off one another, so that its tree is as deep; the others branch off any row before them.
    """
    rng = np.random.default_rng(seed)
    return tuple(_tree_of(rng, number, branches, depth, vocabulary) for number in range(count))


def _tree_of(rng: np.random.Generator, group: int, branches: int, depth: int, vocabulary: int) -> Group:
    episodes = [[[_sampled(rng, 6, vocabulary), _sampled(rng, 3, vocabulary)]]]  # episodes of rows of turns
    latest = 0, 0
    for number in range(1, branches):
        source = latest
        if number >= depth:
            episode = int(rng.integers(len(episodes)))
            source = episode, int(rng.integers(len(episodes[episode])))
        row = episodes[source[0]][source[1]]
        whole = np.concatenate([part for turn in row for part in (turn.prompt_ids, turn.token_ids)])
        # Those that make the tree deep part from the end of the row before, the others anywhere.
        cut = int(rng.integers(len(whole) - 2 if number < depth else 1, len(whole)))
        if rng.random() < 0.5:
            turn = _sampled(rng, 2, vocabulary)
            rewritten = replace(turn, prompt_ids=ints([*whole[:cut].tolist(), *turn.prompt_ids.tolist()]), fresh=True)
            episodes[source[0]].append([rewritten])
            latest = source[0], len(episodes[source[0]]) - 1
        else:
            episodes.append([_forked(rng, row, cut, vocabulary)])
            latest = len(episodes) - 1, 0
    members = []
    for number, rows in enumerate(episodes):
        name, turns = f"{group}-{number}", tuple(turn for row in rows for turn in row)
        reward = float(rng.normal())
        members.append(Trajectory(trajectory_id=name, episode_id=name, group_id=group, turns=turns, status=Status.FINISHED, reward=reward))
    return Group(group_id=group, task=Task("x"), trajectories=tuple(members))


def _sampled(rng: np.random.Generator, prompt: int, vocabulary: int) -> Turn:
    sampled = int(rng.integers(3, 9))
    logprobs = (-rng.random(sampled) * 3.0 - 2.5).tolist()
    return _told(make_turn(rng), rng.integers(2, vocabulary, prompt).tolist(), rng.integers(2, vocabulary, sampled).tolist(), logprobs)


def _told(turn: Turn, prompt: list[int], sampled: list[int], logprobs: list[float]) -> Turn:
    versions = ints([0] * len(sampled))
    return replace(turn, prompt_ids=ints(prompt), token_ids=ints(sampled), logprobs=floats(logprobs), versions=versions)


def _forked(rng: np.random.Generator, row: list[Turn], cut: int, vocabulary: int) -> list[Turn]:
    """Turns that begin with the first `cut` tokens of a row, as they were given or sampled, and go on otherwise."""
    turns: list[Turn] = []
    own = _sampled(rng, 2, vocabulary)
    for turn in row:
        prompt = len(turn.prompt_ids)
        if cut < prompt + len(turn.token_ids):
            kept = max(0, cut - prompt)
            given = turn.prompt_ids[:cut].tolist() + ([] if kept else own.prompt_ids.tolist())
            sampled = [*turn.token_ids[:kept].tolist(), *own.token_ids.tolist()]
            return [*turns, _told(turn, given, sampled, [*turn.logprobs[:kept].tolist(), *own.logprobs.tolist()])]
        turns.append(turn)
        cut -= prompt + len(turn.token_ids)
    return [*turns, own]


def cut_short(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups with the first episode of each cut by a limit with an observation unread, and the second cut without one."""
    nothing = ints([])
    unread = Turn(prompt_ids=ints([5, 6, 7]), token_ids=nothing, logprobs=floats([]), versions=nothing, finish_reason=FinishReason.ABORTED)

    def changed(group: Group) -> Group:
        first, second, *others = group.trajectories
        cut = [replace(first, status=Status.TRUNCATED, unread=unread), replace(second, status=Status.TRUNCATED)]
        return replace(group, trajectories=(*cut, *others))

    return tuple(map(changed, groups))


def with_experts(groups: tuple[Group, ...], *, layers: int, experts: int, seed: int = 0) -> tuple[Group, ...]:
    """The groups with two random experts for each token and layer, as an engine would record them; shared prompts have the same."""
    rng = np.random.default_rng(seed)

    def some(tokens: int) -> Any:
        return rng.random((tokens, layers, experts)).argsort(-1)[..., :2].astype(np.uint8)

    def recorded(trajectory: Trajectory, prompt: Any) -> Trajectory:
        turns = []
        for number, turn in enumerate(trajectory.turns):
            first = number == 0 or turn.fresh
            chosen = some(len(turn.prompt_ids) + len(turn.token_ids) - first)
            if number == 0:
                chosen[: len(prompt)] = prompt
            turns.append(replace(turn, experts=chosen))
        return replace(trajectory, turns=tuple(turns))

    done = []
    for group in groups:
        prompt = some(len(group.trajectories[0].turns[0].prompt_ids))
        done.append(replace(group, trajectories=tuple(recorded(trajectory, prompt) for trajectory in group.trajectories)))
    return tuple(done)


def action_targets(batch: Any) -> Any:
    """The action tokens of a batch. # [A] int64."""
    import torch

    return torch.from_numpy(np.concatenate([row.tokens[row.action_positions] for row in batch.rows]).astype(np.int64))


def row_scores(model: Any, row: Any) -> Any:
    """Log-probabilities of a plain model for all tokens at the places of a row's action tokens, tempered. # [a, vocabulary]."""
    import torch

    logits = model(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
    predicted = torch.from_numpy(row.action_positions - 1)
    return torch.log_softmax(logits[predicted] / torch.from_numpy(row.temperatures.copy())[:, None], -1)


def algorithm(**settings: Any) -> AlgoConfig:
    """The algorithm with settings and options by name."""
    own = {item.name for item in fields(AlgoSettings)}
    algo = AlgoConfig(**{name: value for name, value in settings.items() if name in own})
    return algo.with_options(**{name: value for name, value in settings.items() if name not in own})


def make_settings(
    model: str, *, learner: dict[str, Any] | None = None, algo: dict[str, Any] | None = None, lora: dict[str, Any] | None = None
) -> LearnerSettings:
    return LearnerSettings(
        model=model,
        learner=LearnerConfig(**{"learning_rate": 1e-2, "zero_stage": 0, "max_grad_norm": 1e9} | (learner or {})),
        algo=algorithm(**algo or {}),
        lora=LoraConfig(**lora or {}),
        num_steps=10,
        max_new_tokens=8,
    )


class CollectingSender:
    """Keeps a copy of what would be published."""

    every_rank = False

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}

    def send(self, named_tensors: Any, version: int, members: Any = None) -> Any:
        from agentrl.core.protocols import WeightUpdate

        self.weights = {name: tensor.detach().clone() for name, tensor in named_tensors}
        return WeightUpdate(version=version, transport="test")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def gradients(
    settings: LearnerSettings, groups: tuple[Group, ...], *, rank: int = 0, world_size: int = 1, port: int = 0, step: int = 0
) -> dict[str, Any]:
    """Gradients of the first update of a step, whole and unclipped, by parameter name."""
    import torch

    from agentrl.learner.learner import LearnerRank

    learner = LearnerRank(settings, CollectingSender())
    learner.start(rank, world_size, port)
    from deepspeed.utils import safe_get_full_grad

    from agentrl.learner.engine import TrainEngine

    found: dict[str, torch.Tensor] = {}
    update = TrainEngine.update

    def collect(engine: TrainEngine, learning_rate: float) -> Any:
        if not found:
            found.update({n: safe_get_full_grad(p).detach().clone().float() for n, p in engine.module.named_parameters()})
        return update(engine, learning_rate)

    TrainEngine.update = collect  # type: ignore[method-assign]
    try:
        learner.train(step, *groups)
    finally:
        TrainEngine.update = update  # type: ignore[method-assign]
        learner.close()
    return found


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    assert left.keys() == right.keys()
    assert left
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics of a run on given data, without what a clock and the machine say."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "memory/", "eval/seconds"))} for row in rows]


def write_shifted(folder: Path) -> str:
    """Write the bundled model with every weight moved, and its tokenizer: a teacher, or a reference."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.assets import tiny_model_path
    from agentrl.core.tokenizers import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer(str(tiny_model_path())).save_pretrained(folder)
    return str(folder)

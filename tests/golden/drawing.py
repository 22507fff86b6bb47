"""Drawing of valid flags: ``python -m tests.golden.drawing`` writes ``data/drawn.jsonl`` anew, from the settings as they are now.

The words are drawn once and kept, so that a changed schema is compared on the same command lines.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from agentrl.algo.corrections import CORRECTIONS
from agentrl.algo.estimators import ESTIMATORS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, bare, notes_of, settings_of
from agentrl.config.words import _tuple_of
from agentrl.core.settings import flag
from tests.golden.cases import DRAWN, Case
from tests.golden.record import Recorder

SEED = 48
RESOLVED, REFUSED = 300, 100
"""Draws to keep that resolve, and draws that are refused."""
MOST = 8
"""Settings of a draw at most, besides those that others need."""
DRAWN_ON = ("cpu", "cpu", "cpu16", "bare", "gpu1", "gpu1", "gpu1-24", "gpu2", "gpu2", "gpu4", "gpu8", "cluster-gpu", "cluster-cpu")
BEGINNINGS: dict[str, tuple[str, ...]] = {
    "cluster-gpu": ("--ray-address", "HEAD:6379", "--run-dir", "runs/shared"),
    "cluster-cpu": ("--ray-address", "HEAD:6379", "--device", "cpu", "--run-dir", "runs/shared"),
}
MODELS = ("tiny-vision", "models/qwen2.5-0.5b", "models/qwen2.5-1.5b", "models/qwen2.5-7b", "Qwen/Qwen2.5-0.5B-Instruct", "models/smollm2")
LEFT_OUT = frozenset({"agent", "observe", "resume", "run_dir", "ray_address", "push_to_hub", "mcp", "prompts"})
"""Settings that are not drawn: those of other cases, and those that need a network or a package."""
VALUES: dict[str, tuple[str, ...]] = {
    "model": MODELS,
    "advantage_estimator": tuple(ESTIMATORS),
    "policy_loss": tuple(POLICY_LOSSES),
    "off_policy": tuple(CORRECTIONS),
    "engine": ("auto", "vllm", "transformers"),
    "engine_args": ("enforce_eager", "kv_cache_dtype=fp8", "pipeline_parallel_size=2", "max_num_batched_tokens=4096"),
    "group_filter": ("examples/own_algorithm.py:mixed_results",),
    "group_reward": ("majority", "ranking", "diversity"),
    "score_range": ("0.1 0.9", "0.2 1.0"),
    "reward_clip_range": ("0 1", "-1 1"),
    "off_policy_range": ("0.5 2", "0.8 4"),
    "clip_cov_range": ("1 5",),
    "gdpo_weights": ("1",),
    "keep_best": ("eval/score", "eval/reward", "eval/pass@1"),
    "eval_by": ("kind",),
    "stop": ("END", "A B"),
    "system_prompt": ("Be brief.",),
    "env_pass": ("LANG", "LANG EXTRA"),
    "train_branches": ("all", "agent", "final"),
    "tool_parser": ("auto", "json", "hermes"),
    "reasoning_parser": ("qwen3", "deepseek_r1"),
    "endpoint_host": ("0.0.0.0",),
    "endpoint_url": ("http://{host}:{port}", "https://train.example.com/{port}"),
    "partner": ("bob=past", "bob=past#every=4&pool=2", "bob=model:MODEL"),
    "teacher": ("MODEL", "engine:MODEL", "http://localhost:8000/v1#model=BIG"),
    "teacher_by": ("kind",),
    "reward_model": ("helpful", "helpful safe"),
    "reward_model_weights": ("0.5",),
    "sandbox_read": ("/usr/share",),
    "sandbox_image": ("python:3.12",),
    "callback": ("examples/callback.py:StopWhenSolved",),
    "sink": ("examples/callback.py:RewardsCsv",),
    "chat_template_kwargs": ('{"effort":"low"}',),
    "lora_target_modules": ("q_proj,v_proj", "all-linear"),
    "allow_image_urls": ("images.example.com",),
    "checkpoint_upload": ("runs/copies",),
    "eval_prompts": ("hard.jsonl",),
    "remote_rm_url": ("sums.py",),
    "branch_at": ("1", "2", "entropy", "entropy:0.5"),
    "task_sampling": ("curriculum", "failures", "learnability"),
    "offload": ("optimizer", "reference", "optimizer ema", "activations"),
    "lora_variant": ("rslora", "dora", "rslora dora"),
    "adam_betas": ("0.8 0.95", "0.9 0.99"),
    "deepspeed_args": ("communication_data_type=fp32", "zero_hpz_partition_size=2", "zero_quantized_weights", "deepcompile"),
    "env_limits": ("memory_mib=512", "cpu_s=2 processes=4"),
    "record": ("none", "sample", "all", "8"),
    "max_staleness": ("0", "1", "2", "5"),
    "max_mismatch": ("none", "0.2", "auto"),
    "num_engines": ("2", "3", "4"),
    "num_learners": ("2", "4"),
    "tensor_parallel_size": ("2", "4"),
    "n_samples_per_prompt": ("2", "4", "16", "128"),
    "groups_per_step": ("4", "8", "64"),
    "num_steps": ("3", "20", "200"),
    "max_new_tokens": ("16", "64", "256"),
}
"""Values of settings that no type says, or that are to be small, as the words after their flag."""
CHOOSING, CHOSEN_SHARE = ("advantage_estimator", "policy_loss", "off_policy"), 0.15
"""Settings that choose algorithms, and the share of the draws in which each is drawn, besides where it is one of the others."""
NEEDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("lora_", ("--lora-rank", "8")),
    ("publish", ("--lora-rank", "8")),
    ("eval_", ("--eval-every", "10", "--eval-size", "4")),
    ("keep_best", ("--eval-every", "10", "--eval-size", "4")),
    ("env_", ("--env-isolation", "process")),
    ("sandbox_image", ("--sandbox", "container")),
    ("kl_", ("--init-kl-coef", "0.01")),
    ("use_kl_loss", ("--init-kl-coef", "0.01", "--kl-estimator", "k3")),
    ("ref_reset_every", ("--init-kl-coef", "0.01")),
    ("offload", ("--init-kl-coef", "0.01", "--ema-decay", "0.9", "--gradient-checkpointing")),
    ("deepspeed_args", ("--zero-stage", "3", "--num-learners", "2")),
    ("sequence_parallel", ("--num-learners", "2")),
    ("learner_tensor_parallel", ("--num-learners", "2")),
    ("sleep_level", ("--colocate",)),
    ("learner_memory_gib", ("--colocate",)),
    ("branches", ("--branch-at", "1", "--env-isolation", "process")),
    ("branch_at", ("--env-isolation", "process")),
    ("group_reward_", ("--group-reward", "diversity")),
    ("score_range", ("--flat-groups", "resample")),
    ("truncated_in_baseline", ("--mask-truncated",)),
    ("overlong_penalty", ("--overlong-buffer", "16")),
    ("teacher_", ("--teacher", "MODEL")),
    ("reward_model_", ("--reward-model", "helpful")),
    ("normalize_reward", ("--reward-model", "helpful")),
    ("environment_reward_weight", ("--reward-model", "helpful")),
    ("checkpoint_upload", ("--save-every", "5")),
    ("critic_", ("--advantage-estimator", "gae")),
    ("old_logprobs", ("--mini-batches", "2")),
    ("allow_uncorrected", ("--async", "--off-policy", "none")),
    ("colocate", ("--num-engines", "2")),
)
"""Beginnings of names of settings, and the words without which they are refused."""


class Draws:
    """Draws of command lines, of which each has a setting that was seldom tried."""

    def __init__(self, seed: int) -> None:
        self._random, self._tried = random.Random(seed), Counter[str]()
        self.kept = Counter[str]()

    def draw(self) -> tuple[str, tuple[str, ...], set[str]]:
        """Return a machine, the words of a command line, and the names of their settings."""
        machine = self._random.choice(DRAWN_ON)
        chosen = {name: self._random.choice(VALUES[name]) for name in CHOOSING if self._random.random() < CHOSEN_SHARE}
        table = settings_of(TrainConfig.schema(chosen))
        drawable = [name for name, setting in table.items() if name in VALUES or _has_values(setting)]
        names = [name for name in drawable if name not in LEFT_OUT and name not in chosen]
        seldom = min(names, key=lambda name: (2 * self.kept[name] + self._tried[name], self._random.random()))
        self._tried[seldom] += 1
        picked = dict.fromkeys([seldom, *self._random.sample(names, self._random.randint(0, MOST - 1))])
        agent = "envs/negotiation.py" if any(name.startswith("partner") for name in picked) else "envs/calculator.py"
        words = ["train", *(() if "remote_rm_url" in picked else ("--agent", agent)), *BEGINNINGS.get(machine, ())]
        words += [part for name, value in chosen.items() for part in (flag(name), value)]
        for name in picked:
            words += [*self._needed(name, words, picked), *self._words(table[name])]
        return machine, tuple(words), {*picked, *chosen}

    def _needed(self, name: str, words: Sequence[str], picked: dict[str, None]) -> Iterator[str]:
        for beginning, needed in NEEDED:
            own = needed[0][2:].replace("-", "_")
            if name.startswith(beginning) and name != own and own not in picked and needed[0] not in words:
                yield from needed

    def _words(self, setting: Setting) -> list[str]:
        if bare(setting.hint) is bool:
            return [flag(setting.name) if not setting.default else f"--no-{flag(setting.name)[2:]}"]
        values = VALUES.get(setting.name) or _values(setting)
        return [flag(setting.name), *_split(setting, self._random.choice(values))]


def _split(setting: Setting, value: str) -> list[str]:
    return value.split() if get_origin(_tuple_of(setting.hint)) is tuple else [value]


def _has_values(setting: Setting) -> bool:
    return bare(setting.hint) is bool or bool(_values(setting))


def _values(setting: Setting) -> list[str]:
    """Return a few values of a setting of a choice or of a number, within its range; of another one none."""
    kinds = [bare(part) for part in _parts(setting.hint)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return [str(value) for value in get_args(kind) if value != setting.default]
    number = next((kind for kind in kinds if kind in (int, float)), None)
    if number is None:
        return []
    return [f"{value:g}" for value in _numbers(setting, number)]


def _parts(hint: Any) -> list[Any]:
    """Return the types of which a setting may be, `None` left out."""
    kind = bare(hint)
    if get_origin(kind) in (Union, UnionType):
        return [inner for part in get_args(kind) for inner in _parts(part) if inner is not NoneType]
    return [kind]


def _numbers(setting: Setting, kind: type[Any]) -> list[float]:
    default = setting.default if isinstance(setting.default, int | float) else 1
    near: tuple[float, ...] = (default * 2, default // 2, default + 1, 1, 2, 4)
    if kind is float:
        near = (default * 2, default / 2, default + 1, default + 3, 0.5, 1, 2)
    limits = {name: getattr(note, name) for note in notes_of(setting.hint) for name in ("ge", "gt", "le", "lt") if hasattr(note, name)}
    low, above, high, below = (limits.get(name) for name in ("ge", "gt", "le", "lt"))

    def fits(value: float) -> bool:
        from_below = (low is None or value >= low) and (above is None or value > above)
        return from_below and (high is None or value <= high) and (below is None or value < below)

    return [value for value in dict.fromkeys(map(kind, near)) if fits(value) and value != setting.default]


def main() -> None:
    """Draw until enough command lines were kept, and write them."""
    draws, recorder, rows = Draws(SEED), Recorder(), []
    counts = Counter[str]()
    try:
        while counts["drawn"] < RESOLVED or counts["refused-drawn"] < REFUSED:
            machine, words, names = draws.draw()
            result = recorder.record(Case(name="draw", words=words, machine=machine))
            resolved = (result["dry_run"]["code"], result["code"]) == (0, 0)
            kind, wanted = ("drawn", RESOLVED) if resolved else ("refused-drawn", REFUSED)
            if counts[kind] >= wanted or result["code"] not in (0, 2):
                continue
            counts[kind] += 1
            if resolved:
                draws.kept.update(names)
            if not sum(counts.values()) % 20:
                sys.stderr.write(f"{dict(counts)}\n")
            rows.append({"name": f"{kind} {counts[kind]:03}", "machine": machine, "words": words})
    finally:
        recorder.close()
    rows.sort(key=lambda row: str(row["name"]))
    DRAWN.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{len(rows)} command lines; seldom drawn settings: {draws.kept.most_common()[-20:]}\n")


if __name__ == "__main__":
    main()

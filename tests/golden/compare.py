"""Comparison of a new recording with the golden one, field by field, by a table of what moved and what was removed.

A change that moves a field writes `Moved` into `MOVES`, one that removes it `Removed` with the reason, and one that records more `Added`.
Everything else has to stay as it is. The first entry that fits a path counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentrl.config.earlier import REMOVED, REPLACED, renewed
from agentrl.config.mapping import flattened
from tests.golden.storage import Fields
from tests.golden.values import without_lines

MOST = 20
"""Differences of a case that are listed."""


@dataclass(frozen=True)
class Moved:
    """Fields at paths like `old` are now at `new`, in which each ``*`` stands for what the same one of `old` stands for.

    `value` makes the new value of the old one, where that is not the same.
    """

    old: str
    new: str
    value: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Removed:
    """Fields at paths like `old` are not recorded any more."""

    old: str
    reason: str


@dataclass(frozen=True)
class Added:
    """Fields at paths like `new` were not recorded before."""

    new: str
    reason: str


@dataclass(frozen=True)
class Dropped:
    """Cases with names like `case` are not recorded any more, for example because one of their flags was removed."""

    case: str
    reason: str


class Either(tuple[Any, ...]):
    """Values of which a new field has one."""

    __slots__ = ()


def _decided(engine: Any) -> Any:
    # Commands that train nothing still leave "auto" to each process; tests/unit/resolve/test_plan.py says that training does not.
    return Either(("vllm", "transformers", "auto")) if engine == "auto" else engine


def _of_a_cluster(decided: Any) -> Any:
    # The driver of a joined cluster tried the kernels of its own device, not those of the learner.
    on_gpus = {"cpu": "cuda", "sdpa": ["varlen", "sdpa"]}.get(decided[0] if isinstance(decided, list) else decided)
    return decided if on_gpus is None else Either((decided, on_gpus))


def without_sources(lines: Any) -> Any:
    """Return the lines of ``--dry-run`` without those that name sources, which were said otherwise or not at all."""
    return [line for line in lines if not line.startswith(SOURCES)] if isinstance(lines, list) else lines


def _unless_default(clip: Any) -> Any:
    # Rewards are not clipped any more, unless that is asked for.
    return None if clip == [-10.0, 10.0] else clip


def _in_suites(place: Any) -> Any:
    if not isinstance(place, str):
        return place
    place = place.replace("agentrl/env/adapters/harbor.py", "agentrl/suites/harbor/agent.py")
    place = place.replace("agentrl/env/rewards/answers.py", "agentrl/suites/rewards.py")
    return place.replace("agentrl/env/adapters/", "agentrl/suites/")


def _errors(lines: Any) -> Any:
    lines = without_sources(lines)
    return [without_lines(line) for line in lines] if isinstance(lines, list) else lines


class SavedText(str):
    """Text of a file of settings, of release 0.3."""

    __slots__ = ()

    def says(self, text: str) -> bool:
        """Return True if a file of this version says the same."""
        before, now = flattened(json.loads(self)), flattened(json.loads(text))
        before["reward_clip_range"] = _unless_default(before.get("reward_clip_range"))
        return all(now.get(name) == value for name, value in before.items() if name not in REMOVED)


def of_this_version(fields: Fields) -> Fields:
    """Return fields with the settings of this version in place of those of release 0.3, as files of settings are read."""
    sections: dict[str, Fields] = {}
    for path, value in fields.items():
        section, _, name = path.rpartition("/")
        sections.setdefault(section, {})[name] = value
    new: Fields = {}
    replaces = fields.get(f"config/flow/{ELSEWHERE}") == "replace"
    for section, values in sections.items():
        of_sources = section.endswith("/sources")
        kept = {name: value for name, value in values.items() if name not in REMOVED and name != ELSEWHERE}
        kept = {NEW_NAMES.get(name, name): value for name, value in kept.items()} if of_sources else renewed(kept)
        if section.endswith("/reward") and replaces:
            kept["environment_reward_weight"] = 0.0
        new |= {f"{section}/{name}" if section else name: _text_of_this_version(value) for name, value in kept.items()}
    return new


TEXTS: tuple[tuple[str, str], ...] = (
    ("--activation-offload", "--activations-offload"),
    (r"--(optimizer|activations|reference|ema)-offload = True", r"--offload = '\1'"),
    (r"--(optimizer|activations|reference|ema)-offload", r"--offload \1"),
    (r"--interpolate-old-logprobs = True", r"--old-logprobs = 'interpolated'"),
    (r"--reuse-behaviour-logprobs", r"--old-logprobs behaviour"),
    (r"--zero-quantized-(\w+) = True", r"--deepspeed-args = 'zero_quantized_\1'"),
    (r"--env-memory-mib = (\d+)", r"--env-limits = ('memory_mib=\1',)"),
    (r"--no-check-env\b", "--skip-checks env"),
    (r"--no-certify\b", "--skip-checks model"),
    (r"--no-check-memory\b", "--skip-checks memory"),
    (r"with --value-head-prefix", r"as value_head_prefix in its config.json"),
)
"""Flags of release 0.3 in texts, as expressions, and what is written in their place."""


def _text_of_this_version(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_of_this_version(item) for item in value]
    if isinstance(value, str) and "--" in value:
        for old, now in TEXTS:
            value = re.sub(old, now, value)
    return value


ELSEWHERE = "group_reward_mode"
"""Setting whose successor is in another section."""
NEW_NAMES = {name: each.new for each in REPLACED for name in each.old}
SOURCES = ("agentrl: not the defaults: ", "agentrl: known once the cluster is joined: ")
PLAYED = ("worker", "joined.worker", "evaluations", "serve", "play", "replay")
"""Parts that had the sections of the environment and of the engine whole, and read a value or two of them."""
LOOPS = {
    "run/stall_timeout_s": "stall_timeout_s",
    "sampling/n_samples_per_prompt": "n_samples_per_prompt",
    "engine/num_engines": "num_engines",
    "rollout/max_concurrent_episodes": "max_concurrent_episodes",
    "reward/normalize_reward": "normalizes_rewards",
}
"""Values of other sections that the loops read."""
NOT_OF_LOOPS = (
    *("run", "data", "model", "rollout", "images", "reward", "penalty", "partner", "isolation", "sandbox", "endpoint", "engine"),
    *("sampling", "weights", "learner", "lora", "eval", "track", "record"),
)
RESOLVED = ("engine", "learner", "rollout", "weights")
MOVES: tuple[Moved | Removed | Added, ...] = (
    *(
        Removed(f"dry_run/differs/{section}.*", "--dry-run prints what the run writes")
        for section in ("engine", "learner", "rollout", "weights")
    ),
    Removed("dry_run/differs/run.run_dir", "--dry-run prints what the run writes"),
    Added("dry_run/differs", "it is empty"),
    Added("config/sources/*", "config.json names the source of each setting"),
    Removed("received/tune/*/arguments*", "given rows are trained by the learner, not by a trainer of transformers"),
    Added("received/tune/*/learner*", "the settings of that learner"),
    Added("received/learner/*/objective*", "the learner runs objectives on given rows too"),
    Added("*/algo/sft_*", "demonstrations may be imitated beside episodes"),
    Added("*/settings/demonstrations", "the folder that holds them"),
    Added("*/method/loss", "every method takes a loss of one's own"),
    Added("received/tasks/last/*", "a run that goes on says which tasks it began with"),
    Added("received/tasks/*/known*", "tasks with which a run that is resumed began"),
    Added("received/tasks/*/epoch", "the epoch in which it draws"),
    Added("received/checkpoints/*/inputs", "a checkpoint holds the manifest of inputs"),
    Added("*/source/accept_changed_inputs", "a run that is played again may be told that its inputs changed"),
    Added("received/*/agent/shows_images", "an environment says whether it shows pictures"),
    Removed("received/track.diagnosis/*/compares_groups", "the estimator says which groups are flat"),
    Added("*/settings/min_pass_rate", "no setting any more"),
    Added("*/isolation/limits*", "a property of the settings of processes"),
    Removed("received/*/head", "found in the files of a reward model alone"),
    Added("*/engine/quantizes", "a property of the settings of engines"),
    Added("*/learner/learner_backend", "the learner has several back-ends"),
    Added("*/rollout/num_front_ends", "a property of the settings of rollouts"),
    Moved("*/options/reward_clip_range", "*/options/reward_clip_range", _unless_default),
    Added("*/flow/score_range", "a range of scores is off unless it is asked for"),
    Moved("dry_run/errors", "dry_run/errors", _errors),
    Moved("errors", "errors", _errors),
    Moved("received/checkpoints/*/config", "received/checkpoints/*/config", lambda text: SavedText(text) if text.startswith("{") else text),
    Moved("config/engine/engine", "config/engine/engine", _decided),
    Moved("received/evaluations/*/settings/run/stall_timeout_s", "received/evaluations/*/settings/stall_timeout_s"),
    Moved("received/evaluations/*/settings/engine/num_engines", "received/evaluations/*/settings/num_engines"),
    *(Moved(f"received/{part}/*/settings/run/seed", f"received/{part}/*/settings/seed") for part in PLAYED),
    *(Moved(f"received/{part}/*/settings/engine/max_num_seqs", f"received/{part}/*/settings/max_num_seqs") for part in PLAYED),
    *(Removed(f"received/{part}/*/settings/{each}/*", "nothing reads it there") for part in PLAYED for each in ("run", "engine")),
    *(Moved(f"received/flow/*/settings/{old}", f"received/flow/*/settings/{new}") for old, new in LOOPS.items()),
    *(Removed(f"received/flow/*/settings/{each}/*", "no loop reads it") for each in NOT_OF_LOOPS),
    Added("*/training/evaluates", "a property of the settings of training"),
    *(Removed(f"{where}*/engine/uses_vllm", "engines are asked for what they declare") for where in ("", "*/")),
    Added("*/engine/facts/*", "what the engine declares"),
    Added("*/engine/name", "a property of the settings of engines"),
    Added("*/settings/dtype", "a property of the settings of the learner"),
    Added("*/settings/most_workers", "a property of the plan of the loops"),
    Added("*/settings/as_messages", "what a reward model is asked is a part of its settings"),
    Added("*/settings/places", "was computed for each sandbox; it stays in sandbox_choice"),
    Moved("received/proof/*/device", "received/proof/*/device", _of_a_cluster),
    Moved("received/proof/*/kernels", "received/proof/*/kernels", _of_a_cluster),
    Moved("received/*/settings/engine/engine", "received/*/settings/engine/engine", _decided),
    Added("received/*/agent/loader", "the specification of an agent carries the function that loads its class"),
    Moved("received/*/agent/source", "received/*/agent/source", _in_suites),
    Moved("received/tasks/*/origin", "received/tasks/*/origin", _in_suites),
)
"""Fields that are elsewhere now; every other one is where it was."""
DROPPED: tuple[Dropped, ...] = (
    Dropped("documented 182 docs/tune/sft.md", "--packing: a batch counts rows, where it counted packed rows"),
    Dropped("refused-drawn 001", "what was refused, a setting of partners without a partner, can be said no more"),
    Dropped("refused-drawn 035", "has two wrong settings, of which the other one is met first now"),
    Dropped("resume on a cpu", "was refused; what a machine decided is decided again"),
    Dropped("sample run", "was refused because of the setting resume, which training has too"),
)
"""Cases that are recorded no more."""


def compare(golden: Fields, new: Fields, moves: Sequence[Moved | Removed | Added] = MOVES, *, named_only: bool = False) -> list[str]:
    """Return the differences between two recordings of a case, each in a line: its path, and both values.

    Several golden fields may move to one path, if they have one value. With `named_only` a part of what a run receives is compared, such
    as one plan: only fields that `moves` has an entry for, and nothing is said of new ones.
    """
    wanted = [
        place for path, value in of_this_version(golden).items() if (place := _place(path, value, moves, named_only=named_only)) is not None
    ]
    lines = []
    for old, path, value in wanted:
        where = path if old == path else f"{path} (before {old})"
        if path not in new:
            lines.append(f"{where}: was {value!r}, now missing")
        elif not _equal(value, new[path]):
            lines.append(f"{where}: was {value!r}, now {new[path]!r}")
    if named_only:
        return lines
    known, added = {path for _, path, _ in wanted}, [move.new for move in moves if isinstance(move, Added)]
    return lines + [f"{path}: new, {new[path]!r}" for path in new if path not in known and not any(_fits(each, path) for each in added)]


def listed(name: str, differences: Sequence[str]) -> str:
    """Return the differences of a case as text."""
    more = [f"  ... and {len(differences) - MOST} more"] if len(differences) > MOST else []
    return "\n".join([f"{name}: {len(differences)} differences", *(f"  {line}" for line in differences[:MOST]), *more])


def is_dropped(name: str, dropped: Iterable[Dropped] = DROPPED) -> bool:
    """Return True for a case that is recorded no more."""
    return any(_fits(each.case, name) for each in dropped)


def _place(path: str, value: Any, moves: Sequence[Moved | Removed | Added], *, named_only: bool) -> tuple[str, str, Any] | None:
    """Return the path of a golden field, and the path and the value that it has now; `None` for one that is not compared."""
    for move in moves:
        if isinstance(move, Added) or (match := _expression(move.old).fullmatch(path)) is None:
            continue
        if isinstance(move, Removed):
            return None
        parts = iter(match.groups())
        place = "".join(next(parts) if part == "*" else part for part in re.split(r"(\*)", move.new))
        return path, place, move.value(value) if move.value else value
    return None if named_only else (path, path, value)


def _fits(pattern: str, text: str) -> bool:
    return _expression(pattern).fullmatch(text) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def _equal(one: Any, other: Any) -> bool:
    """Return True for equal values of one kind: 1, 1.0 and True differ."""
    if isinstance(one, SavedText):
        return one.says(other)
    if isinstance(one, Either):
        return any(_equal(each, other) for each in one)
    return bool(one == other) and repr(one) == repr(other)

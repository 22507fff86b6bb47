"""Data sets of reasoning-gym as an agent's environment; see https://github.com/open-thought/reasoning-gym.

``--agent 'reasoning-gym:chain_sum?min_terms=2&max_terms=2'`` needs no file.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Task
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import SEEDS, EpisodeRandom, check_known, class_name, import_suite, refused, split_spec, take_count

EXTRA = "reasoning-gym"
SCORES = ("exact", "full", "own")
ASK = "Write the final answer in <answer> tags."
CHUNK = 500

# From the last opening tag on, as a text may speak of the tags before its answer.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ReasoningGymEnv(AgentInstance):
    """One question, one answer.

    The answer is the text that `find_answer` returns. An answer is right if it equals the data set's own answer exactly.

    Attributes:
        dataset: Name that `reasoning_gym.create_dataset` knows.
        options: Fields of the data set's configuration.
        scoring: Judge of an answer that differs from the data set's: with ``exact`` it earns 0; with ``full`` it earns 1
            if the data set's scorer gives full marks, else 0; with ``own`` it earns the scorer's marks. An answer that
            holds the right one and something else always earns 0, because many scorers reward such answers.
        ask: Text after the question.
        first_seed: Seed of the first task; later tasks take the following seeds.
        num_tasks: Number of tasks; `None`: endless tasks.
    """

    dataset: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    scoring: ClassVar[str] = "exact"
    ask: ClassVar[str] = ASK
    first_seed: ClassVar[int] = 0
    num_tasks: ClassVar[int | None] = None

    _item: Mapping[str, Any]
    _seed = 0

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; all episodes of a group get the same question, which is made in `reset`."""
        seeds: Iterable[int] = itertools.count(cls.first_seed)
        if cls.num_tasks is None:
            return (cls._task(seed) for seed in seeds)
        return [cls._task(seed) for seed in itertools.islice(seeds, cls.num_tasks)]

    @classmethod
    def _task(cls, seed: int) -> Task:
        return Task(f"{cls.dataset}, seed {seed}", id=str(seed), seed=seed)

    @classmethod
    def make_item(cls, seed: int) -> Mapping[str, Any]:
        """Question, answer and metadata for a seed."""
        hashable: Any = cls
        return _item(hashable, seed)

    def reset(self, state: ResetState) -> ResetResult:
        """Make the question."""
        self._seed = state.seed % SEEDS
        self._item = self.make_item(self._seed)
        return ResetResult("\n".join(filter(None, (self._item["question"], self.ask))))

    def step(self, state: StepState) -> StepResult:
        """Judge the answer."""
        return StepResult(self.judge(find_answer(state.action_text)), terminated=True)

    def judge(self, answer: str) -> float:
        """Return the reward of an answer, 0 to 1."""
        right = self._item["answer"]
        right = None if right is None else str(right).strip()
        if answer == right:
            return 1.0
        if self.scoring == "exact" or (right and right in answer):
            return 0.0
        marks = self.own_marks(answer)
        return marks if self.scoring == "own" else float(marks >= 1.0)

    def own_marks(self, answer: str) -> float:
        """Return the score that the data set's own scorer gives to an answer."""
        dataset, _ = _dataset(type(self), self._seed)
        with EpisodeRandom(self._seed).in_force():
            # A copy, as other episodes of the group have the same item, which a scorer may change.
            return float(dataset.score_answer(answer, copy.deepcopy(self._item)))


def find_answer(text: str) -> str:
    """Return the text between the last ``<answer>`` and ``</answer>``, else all of `text`, without surrounding white space."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def load_reasoning_gym(spec: str) -> type[ReasoningGymEnv]:
    """Return the class for ``reasoning-gym:NAME[?option=value&...]``: score, ask, seed, num_tasks, or fields of its configuration."""
    name, options = split_spec(spec)
    import_suite(spec, "reasoning_gym", EXTRA)
    from reasoning_gym.factory import DATASETS

    check_known(spec, "reasoning-gym", name, DATASETS)
    own = _own_options(spec, options)
    attributes = {"dataset": name, "options": options, **own, "__module__": __name__}
    cls = type(class_name(name.title().replace("_", ""), "ReasoningGymEnv"), (ReasoningGymEnv,), attributes)
    _try(spec, cls)
    return cls


def _own_options(spec: str, options: dict[str, Any]) -> dict[str, Any]:
    """Remove agentrl's own options from `options`, check them, and return them as class attributes."""
    scoring, first_seed = options.pop("score", SCORES[0]), options.pop("seed", 0)
    if scoring not in SCORES:
        raise EnvLoadError(FLAG, spec, f"score = {scoring!r} is unknown", f"Choose one of {', '.join(SCORES)}.")
    if type(first_seed) is not int or not 0 <= first_seed < SEEDS:
        raise EnvLoadError(FLAG, spec, f"seed = {first_seed!r} is out of range", "Give a whole number from 0.")
    if "size" in options:
        raise EnvLoadError(FLAG, spec, "size is not an option here", "Give num_tasks.")
    ask, num_tasks = str(options.pop("ask", ASK)), take_count(spec, options, "num_tasks")
    return {"scoring": scoring, "first_seed": first_seed, "ask": ask, "num_tasks": num_tasks}


def _try(spec: str, cls: type[ReasoningGymEnv]) -> None:
    """Make a question, so that a wrong option fails before anything heavy starts."""
    try:
        item = cls.make_item(cls.first_seed)
    except Exception as error:  # assertions, TypeErrors and whatever else a configuration raises
        raise refused(spec, "making a question", error, f"Options are those of the configuration of {cls.dataset}.") from error
    if item["answer"] is None and cls.scoring == "exact":
        raise EnvLoadError(FLAG, spec, f"{cls.dataset} has no single right answer", "Add score=full or score=own to the options.")


@lru_cache(maxsize=64)
def _item(cls: Any, seed: int) -> Mapping[str, Any]:
    """Return the item of a seed, cached for the group's other episodes. A few data sets draw from the global generators."""
    dataset, first = _dataset(cls, seed)
    with EpisodeRandom(seed).in_force():
        item: Mapping[str, Any] = dataset[seed - first]
    return item


def _dataset(cls: Any, seed: int) -> tuple[Any, int]:
    """Return the data set that holds the item of a seed, and the seed of the set's first item.

    Most data sets seed item `i` with their own seed plus `i`, so consecutive sets of 500 items share none. Some data
    sets make all items at construction: 500 bounds that time, and sets are cached.
    """
    first = seed - seed % CHUNK
    return _chunk(cls, first), first


@lru_cache(maxsize=8)
def _chunk(cls: Any, first: int) -> Any:
    import reasoning_gym

    with EpisodeRandom(first).in_force():
        return reasoning_gym.create_dataset(cls.dataset, seed=first, size=CHUNK, **cls.options)


REASONING_GYM = Scheme(
    name="reasoning-gym",
    load=load_reasoning_gym,
    form="reasoning-gym:NAME",
    about="[reasoning-gym](https://github.com/open-thought/reasoning-gym): 106 data sets of questions that are made from seeds",
    needs="`pip install 'agentrl[reasoning-gym]'`",
)

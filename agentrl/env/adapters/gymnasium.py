"""Any scalar gymnasium environment as an agent's environment; see https://gymnasium.farama.org.

``--agent gym:FrozenLake-v1?is_slippery=False`` needs no file. A class that inherits from `GymEnv` says in its own words
how observations read and how actions are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.core.types import Task
from agentrl.env.adapters.specs import seeded_tasks
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState

if TYPE_CHECKING:
    import gymnasium

SEEDS = 2**31  # some environments hand the seed on to generators that take 32 bits


class GymEnv(AgentInstance):
    """One episode of a gymnasium environment, which is made at `reset` and closed at `close`.

    An answer that names no action is not passed to the environment: the model is told what was wrong with it and may
    try again, `max_invalid` times in a row, each time for a reward of `invalid_reward`. One more ends the episode, with
    the score 0.

    Attributes:
        env_id: Name that `gymnasium.make` knows.
        env_options: Its keyword arguments.
        actions: Words for the actions. Empty: the answer's last whole number is the action of a discrete space, and
            an answer in JSON that of any other.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: no end of them, with seeds derived from the run's.
        max_invalid: Answers in a row that may name no action.
        invalid_reward: What each of them is worth.
        env: The gymnasium environment, from `reset` on.
        info: What it said of its latest step, from `reset` on.
    """

    env_id: ClassVar[str] = ""
    env_options: ClassVar[Mapping[str, Any]] = {}
    actions: ClassVar[Mapping[str, Any]] = {}
    num_tasks: ClassVar[int | None] = None
    max_invalid: ClassVar[int] = 2
    invalid_reward: ClassVar[float] = 0.0

    env: gymnasium.Env[Any, Any] | None = None
    info: Mapping[str, Any] = {}
    _total = 0.0
    _invalid = 0

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make the environment of this episode."""
        import gymnasium

        return gymnasium.make(self.env_id, **{"disable_env_checker": True, **self.env_options})

    def instructions(self) -> str:
        """What is put before the first observation: how to play, and which actions there are."""
        return self.ask()

    def ask(self) -> str:
        """The question that an answer without an action is met with."""
        return f"Choose: {_either(list(self.actions))}?" if self.actions else _describe(self._env().action_space)

    def format_observation(self, observation: Any) -> str:
        """An observation in words; `self.env` and `self.info` may be asked for more."""
        return str(observation)

    def parse_action(self, text: str) -> Any:
        """The action that an answer names.

        Raises:
            ValueError: If it names none; the model reads the message.
        """
        space = self._env().action_space
        try:
            action = last_word(text, self.actions) if self.actions else _from_space(text, space)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, AssertionError, RecursionError):
            raise ValueError(self.ask()) from None
        if not space.contains(action):
            raise ValueError(self.ask())
        return action

    def score(self, total: float, terminated: bool) -> float | None:
        """Success in 0..1.

        Args:
            total: Sum of the environment's rewards so far.
            terminated: Whether the environment has come to its own end.

        Returns:
            The score, or `None` for the reward so far, clipped to 0..1.
        """
        return None

    @classmethod
    def preload(cls) -> None:
        """Import gymnasium."""
        import gymnasium  # noqa: F401

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; every member of a group plays the same one."""
        return seeded_tasks(cls.env_id or cls.__name__, cls.num_tasks)

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the environment."""
        self.env = self.make()
        return self._begun(self.env.reset(seed=state.seed % SEEDS))

    def _begun(self, result: tuple[Any, Mapping[str, Any]]) -> ResetResult:
        observation, self.info = result
        return ResetResult("\n".join(filter(None, (self.instructions(), self.format_observation(observation)))))

    def step(self, state: StepState) -> StepResult:
        """Act as the model said, or tell it what was wrong with what it said."""
        action = self._action(state)
        if isinstance(action, StepResult):
            return action
        return self._stepped(self._env().step(action))

    def _stepped(self, result: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> StepResult:
        """What the environment said, in words."""
        observation, reward, terminated, truncated, self.info = result
        self._total += float(reward)
        return StepResult(
            float(reward),
            self.format_observation(observation),
            terminated=bool(terminated),
            truncated=bool(truncated),
            score=self.score(self._total, bool(terminated)),
            info={"invalid_action": 0.0},
        )

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            self.env.close()

    def _action(self, state: StepState) -> Any:
        """The action, or what is answered to a text that names none."""
        try:
            action = self.parse_action(state.action_text)
        except ValueError as error:
            return self._refuse(str(error))
        self._invalid = 0
        return action

    def _refuse(self, problem: str) -> StepResult:
        self._invalid += 1
        over = self._invalid > self.max_invalid
        score = 0.0 if over else self.score(self._total, False)
        return StepResult(self.invalid_reward, problem, terminated=over, score=score, info={"invalid_action": 1.0})

    def _env(self) -> gymnasium.Env[Any, Any]:
        if self.env is None:
            raise RuntimeError(f"{type(self).__name__} is used before its reset; call super().reset(state) in yours")
        return self.env


def last_word(text: str, words: Mapping[str, Any]) -> Any:
    """The value of the last of `words` that `text` holds, in upper or lower case.

    Raises:
        ValueError: If it holds none.
    """
    longest_first = sorted(words, key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"none of {', '.join(words)}")
    return {word.lower(): value for word, value in words.items()}[found[-1].lower()]


def _from_space(text: str, space: Any) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return int(re.findall(r"-?\d+", text)[-1])
    if isinstance(space, spaces.Text):
        return text
    return _from_json(json.loads(text), space)


def _from_json(value: Any, space: Any) -> Any:
    """JSON to an element of a space; gymnasium's own conversion takes a batch, here of one."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _from_json(value[key], inner) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_json(value[index], inner) for index, inner in enumerate(space.spaces))
    return space.from_jsonable([value])[0]


def _describe(space: Any) -> str:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"Choose a number from {space.start} to {space.start + space.n - 1}."
    return "Write the action as text." if isinstance(space, spaces.Text) else f"Write the action in JSON, an element of {space}."


def _either(words: list[str]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]

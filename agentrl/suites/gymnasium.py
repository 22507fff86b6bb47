"""Any scalar gymnasium environment as an agent's environment; see https://gymnasium.farama.org.

``--agent gym:FrozenLake-v1?is_slippery=False`` needs no file. A class that inherits from `GymEnv` says in its own words
how observations read and how actions are written.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.core.types import Task
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.env.results import bad_result, number
from agentrl.env.whole_text import whole_text
from agentrl.suites.specs import seeded_tasks

if TYPE_CHECKING:
    import gymnasium

PIXELS = "pixels"
MAX_NUMBERS = 10_000
"""Numbers of an observation that are shown as text: with more it is a picture, and fills the context of most models."""
SEEDS = 2**31  # some environments hand the seed on to generators that take 32 bits


class GymEnv(AgentInstance):
    """One episode of a gymnasium environment, which is made at `reset` and closed at `close`.

    An answer that names no action is not passed to the environment. The model reads what was wrong and may try again,
    up to `max_invalid` times in a row, each time for a reward of `invalid_reward`. One further such answer ends the
    episode with the score 0.

    Attributes:
        env_id: Name that `gymnasium.make` knows.
        env_options: Keyword arguments of `gymnasium.make`.
        actions: Words for the actions. Empty: the answer's last whole number is the action of a discrete space, and
            an answer in JSON that of any other.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: endless tasks, with seeds derived from the run's.
        max_invalid: Maximum number of consecutive answers without an action.
        invalid_reward: Reward of each such answer.
        observe: ``text``, or ``pixels`` for a model that reads images: it gets the picture that `render` draws in the mode ``rgb_array``.
        env: The gymnasium environment, from `reset` on.
        info: The `info` of the latest `reset` or `step`, from `reset` on.
    """

    env_id: ClassVar[str] = ""
    env_options: ClassVar[Mapping[str, Any]] = {}
    actions: ClassVar[Mapping[str, Any]] = {}
    num_tasks: ClassVar[int | None] = None
    max_invalid: ClassVar[int] = 2
    invalid_reward: ClassVar[float] = 0.0
    observe: ClassVar[str] = "text"

    env: gymnasium.Env[Any, Any] | None = None
    info: Mapping[str, Any] = {}
    _total = 0.0
    _invalid = 0

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make the environment of this episode."""
        import gymnasium

        return gymnasium.make(self.env_id, **{"disable_env_checker": True, **self.drawing(), **self.env_options})

    @classmethod
    def drawing(cls) -> dict[str, str]:
        """Keyword arguments of `gymnasium.make` with which the environment draws itself, if the model gets pictures."""
        return {"render_mode": "rgb_array"} if cls.observe == PIXELS else {}

    def instructions(self) -> str:
        """Text before the first observation: the rules of the game and its actions."""
        return self.ask()

    def ask(self) -> str:
        """The question sent back after an answer that names no action."""
        return f"Choose: {_either(list(self.actions))}?" if self.actions else _describe(self._env().action_space)

    def format_observation(self, observation: Any) -> str:
        """Return an observation as text, with every number of its arrays; `self.env` and `self.info` hold further facts.

        Raises:
            RuntimeError: If it has more than 10,000 numbers.
        """
        if problem := too_large(self._env().observation_space):
            raise RuntimeError(f"{type(self).__name__}: {problem}. {SHORTER}")
        return whole_text(observation)

    def caption(self) -> str:
        """Text beside each picture behind the first one; the first has the instructions."""
        return self.ask()

    def frame(self) -> Any:
        """Return the picture of the environment as it is now.

        Raises:
            RuntimeError: If the environment draws none.
        """
        picture = self._env().render()
        if not hasattr(picture, "shape"):
            problem = f"{type(self).__name__}: render returned {type(picture).__name__}, no picture"
            raise RuntimeError(f"{problem}; make the environment with render_mode='rgb_array', or observe text")
        return picture

    def parse_action(self, text: str) -> Any:
        """Return the action that an answer names.

        Raises:
            ValueError: If the answer names no action; the model reads the message.
        """
        space = self._env().action_space
        try:
            action = last_word(text, self.actions) if self.actions else _from_space(text, space)
        # JSON and spaces raise any of these for a text that is no action.
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, AssertionError, RecursionError):
            raise ValueError(self.ask()) from None
        if not space.contains(action):
            raise ValueError(self.ask())
        return action

    def score(self, total: float, terminated: bool) -> float | None:
        """Return the success of the episode, 0 to 1.

        Args:
            total: Sum of the environment's rewards so far.
            terminated: True once the environment has reported `terminated`.

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
        """One task per seed; all episodes of a group use the same seed."""
        return seeded_tasks(cls.env_id or cls.__name__, cls.num_tasks)

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the environment."""
        self.env = self.make()
        return self._begun(self.env.reset(seed=state.seed % SEEDS))

    def _begun(self, result: tuple[Any, Mapping[str, Any]]) -> ResetResult:
        observation, self.info = result
        if self.observe == PIXELS:
            return ResetResult(self.instructions(), images=[self.frame()])
        return ResetResult("\n".join(filter(None, (self.instructions(), self.format_observation(observation)))))

    def step(self, state: StepState) -> StepResult:
        """Take the action that the model named, or tell the model why its answer names none."""
        action = self._action(state)
        if isinstance(action, StepResult):
            return action
        return self._stepped(self._env().step(action))

    def _stepped(self, result: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> StepResult:
        """Turn the result of `env.step` into text for the model."""
        observation, given, terminated, truncated, self.info = result
        reward = _one_number(given, type(self).__name__)
        self._total += reward
        over, seen = bool(terminated) or bool(truncated), self.observe == PIXELS
        return StepResult(
            reward,
            self.caption() if seen else self.format_observation(observation),
            images=[self.frame()] if seen and not over else [],
            terminated=bool(terminated),
            truncated=bool(truncated),
            score=self.score(self._total, bool(terminated)),
            info={"invalid_action": 0.0},
        )

    def snapshot(self) -> Any:
        """A copy of everything that an episode changes, the environment's random numbers among it."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: Any) -> None:
        """Go on with the copy."""
        vars(self).update(snapshot)

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            self.env.close()

    def _action(self, state: StepState) -> Any:
        """Return the action, or the result for an answer that names none."""
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
            raise RuntimeError(f"{type(self).__name__} was used before reset; call super().reset(state) in your own reset")
        return self.env


SHORTER = "Show pictures to a model that reads images with ?observe=pixels, or write a format_observation"


def too_large(space: Any) -> str:
    """Return what is wrong with the observations of a space if they have too many numbers to be shown as text; else ""."""
    numbers = _numbers(space)
    return f"an observation has {numbers:,} numbers, and {MAX_NUMBERS:,} are shown as text" if numbers > MAX_NUMBERS else ""


def _numbers(space: Any) -> int:
    inner = getattr(space, "spaces", ())
    if inner:
        return sum(map(_numbers, inner.values() if isinstance(inner, Mapping) else inner))
    return math.prod(getattr(space, "shape", None) or ())


def _one_number(reward: Any, where: str) -> float:
    """Return a reward; one with several parts, as those of mo-gymnasium, is refused.

    Raises:
        EnvResultError: If it is no number.
    """
    if len(shape := getattr(reward, "shape", ())) and math.prod(shape) != 1:
        problem = "is a vector, and one number is trained: weigh its parts, as mo_gymnasium.wrappers.LinearReward does in your own make()"
        raise bad_result(where, "reward", reward, problem)
    return number(reward, where, "reward")


def last_word(text: str, words: Mapping[str, Any]) -> Any:
    """Return the value of the last of `words` in `text`, ignoring case; raise `ValueError` if `text` holds none of them."""
    # In a pattern, a word would otherwise hide a longer one that begins with it.
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
    """Convert JSON to an element of a space; gymnasium's own conversion takes a batch, here of size 1."""
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


MOVE = "Move: up, down, left or right?"


class FrozenLake(GymEnv):
    """Walk over the ice to the goal; every observation is the map with the player on it, and the question."""

    actions: ClassVar = {"up": 3, "down": 1, "left": 0, "right": 2}

    def instructions(self) -> str:
        """The meaning of the map's letters."""
        return "P you, F ice, H hole, G goal."

    def ask(self) -> str:
        """The moves."""
        return MOVE

    def format_observation(self, observation: Any) -> str:
        """The map, with a P where the player is."""
        env = self._env().unwrapped
        row, column = divmod(int(observation), env.ncol)
        tiles = env.desc.copy()
        tiles[row, column] = b"P"
        return f"{_lines(tiles)}\n{self.ask()}"


class CliffWalking(GymEnv):
    """Walk along the cliff; falling leads back to the start, and only the goal ends the game."""

    actions: ClassVar = {"up": 0, "down": 2, "left": 3, "right": 1}

    def instructions(self) -> str:
        """The rules and the moves."""
        return f"Rows 1 to 4, columns 1 to 12. Go from row 4, column 1 to row 4, column 12; between them is a cliff.\n{self.ask()}"

    def ask(self) -> str:
        """The moves."""
        return MOVE

    def format_observation(self, observation: Any) -> str:
        """Row and column, from 1."""
        row, column = divmod(int(observation), 12)
        return f"At row {row + 1}, column {column + 1}."

    def score(self, total: float, terminated: bool) -> float:
        """1 at the goal."""
        return float(terminated)


class Blackjack(GymEnv):
    """Hit or stick; a reward of 1 is a win, of -1 a loss."""

    actions: ClassVar = {"hit": 1, "stick": 0}

    def instructions(self) -> str:
        """The goal of the game."""
        return "Blackjack: get close to 21, not above."

    def format_observation(self, observation: Any) -> str:
        """Both hands, and the question."""
        own, dealer, ace = (int(part) for part in observation)
        return f"You {own}{' with an ace' if ace else ''}, dealer {dealer}. Choose: hit or stick?"


class Taxi(GymEnv):
    """Fetch the passenger, bring them to their destination."""

    actions: ClassVar = {"down": 0, "up": 1, "right": 2, "left": 3, "pickup": 4, "dropoff": 5}

    def instructions(self) -> str:
        """The map and the actions."""
        streets = _lines(self._env().unwrapped.desc)
        return f"Taxi. ':' may be passed, '|' not.\n{streets}\n{self.ask()}"

    def format_observation(self, observation: Any) -> str:
        """Row and column of the taxi, from 1, and the letters of the places."""
        row, column, passenger, destination = self._env().unwrapped.decode(int(observation))
        return f"Taxi at row {row + 1}, column {column + 1}. Passenger: {(*'RGYB', 'taxi')[passenger]}. To: {'RGYB'[destination]}."

    def score(self, total: float, terminated: bool) -> float:
        """1 once the passenger is there."""
        return float(terminated)


TOY_TEXT: dict[str, type[GymEnv]] = {cls.__name__: cls for cls in (FrozenLake, CliffWalking, Blackjack, Taxi)}
"""Name of the environment without its version -> class with its wording."""


def _lines(tiles: Any) -> str:
    return "\n".join(b"".join(row).decode() for row in tiles.tolist())

"""``gym:ID?option=value&...``: the class that it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError
from agentrl.env.adapters.gymnasium import GymEnv
from agentrl.env.adapters.gymnasium_vector import GymVectorEnv
from agentrl.env.adapters.specs import split_spec

MOVE = "Move: up, down, left or right?"


class FrozenLake(GymEnv):
    """Walk over the ice to the goal; every observation is the map with the player on it, and the question."""

    actions: ClassVar = {"up": 3, "down": 1, "left": 0, "right": 2}

    def instructions(self) -> str:
        """What the letters of the map mean."""
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
        """What it is about."""
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
"""Name of the environment, without its version -> its words."""


def _lines(tiles: Any) -> str:
    return "\n".join(b"".join(row).decode() for row in tiles.tolist())


OWN_OPTIONS = ("num_tasks", "max_invalid", "invalid_reward")
VECTOR_OPTIONS = ("num_envs", "vectorization_mode", "straggler_s")


def load_gym(spec: str) -> type[GymEnv]:
    """The class for ``gym:ID`` or ``gym:ID?option=value&...``.

    Options are keyword arguments of the environment, or attributes of `GymEnv`: ``num_tasks``, ``max_invalid``,
    ``invalid_reward``; with ``num_envs``, those of `GymVectorEnv`. Values are read as Python literals, else as text.

    Raises:
        EnvLoadError: If gymnasium has no such environment, or it does not take such an option.
    """
    env_id, options = split_spec(spec)
    own: dict[str, Any] = {key: options.pop(key) for key in OWN_OPTIONS if key in options}
    name = re.sub(r"\W", "_", env_id.rpartition("/")[2].rpartition(":")[2].partition("-v")[0])
    base = TOY_TEXT.get(name, GymEnv)
    bases: tuple[type[GymEnv], ...] = (base,)
    if "num_envs" in options:
        bases = (GymVectorEnv, base) if base is not GymEnv else (GymVectorEnv,)
        own.update((key, options.pop(key)) for key in VECTOR_OPTIONS if key in options)
    cls = type(name or "GymEnv", bases, {"env_id": env_id, "env_options": options, "__module__": base.__module__, **own})
    _try(spec, cls, own)
    return cls


def _try(spec: str, cls: type[GymEnv], own: Mapping[str, Any]) -> None:
    """Make one environment, so that a wrong name or option is known before anything heavy is started."""
    for key, value in own.items():
        least = 1 if key in ("num_tasks", "num_envs") else 0
        if key == "vectorization_mode":
            if value not in ("sync", "async"):
                raise EnvLoadError("--agent", spec, f"{key} = {value!r} is unknown", "Give sync or async.")
        elif not isinstance(value, int | float) or (key != "invalid_reward" and value < least) or (key == "num_envs" and value % 1):
            raise EnvLoadError("--agent", spec, f"{key} = {value!r} is out of range", "Give a number.")
    try:
        cls().make().close()
    except Exception as error:  # gymnasium's own errors, and whatever the environment's constructor raises
        remedy = "Give gym:ID?option=value, for example gym:FrozenLake-v1?is_slippery=False."
        raise EnvLoadError("--agent", spec, f"gymnasium.make raised {type(error).__name__}: {error}", remedy) from error

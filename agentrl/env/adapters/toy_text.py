"""Words for gymnasium's toy_text environments; observations there are numbers that say nothing to a language model."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.env.adapters.gymnasium import GymEnv

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

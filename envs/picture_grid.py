"""A game of several turns whose every observation is a picture: walk to the green circle.

It teaches how pictures come in later turns: `reset` and `step` return ``images``, and each stands before the text of its
observation. The words say nothing about where the walker is. Run it with the bundled model that reads images::

    agentrl train --agent envs/picture_grid.py --model tiny-vision

The recipe ``examples/recipes/cpu/picture_game.toml`` has the settings of a run with evaluations on other beginnings.

    user       [picture] Go to green.
    assistant  left
    user       [picture] Go on.
    assistant  up
"""

from collections.abc import Iterable
from itertools import product
from random import Random

import numpy as np

from agentrl import AgentInstance, ResetResult, ResetState, StepResult, StepState, Task

CELLS, CELL = 4, 16
BACKGROUND, WALKER, GOAL = (24, 24, 24), (240, 240, 240), (40, 190, 70)
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NUM_TURNS, NUM_EVAL = 5, 40
PROMPT, GO_ON = "Go to green.", "Go on."


def draw(walker: tuple[int, int], goal: tuple[int, int]) -> np.ndarray:
    """Return a picture of the grid: the walker is a white square, the goal a green circle."""
    picture = np.full((CELLS * CELL, CELLS * CELL, 3), BACKGROUND, dtype=np.uint8)
    rows, columns = np.mgrid[: CELLS * CELL, : CELLS * CELL]
    right, down = (values - CELL * place - CELL // 2 for values, place in zip((columns, rows), goal, strict=True))
    picture[right**2 + down**2 <= (CELL // 2 - 1) ** 2] = GOAL
    x, y = (CELL * place + 3 for place in walker)
    picture[y : y + CELL - 6, x : x + CELL - 6] = WALKER
    return picture


def moved(walker: tuple[int, int], move: str) -> tuple[int, int]:
    """Return the place after a move, which ends at the edge of the grid."""
    x, y = (min(max(at + by, 0), CELLS - 1) for at, by in zip(walker, MOVES[move], strict=True))
    return x, y


def helpful(walker: tuple[int, int], goal: tuple[int, int]) -> list[str]:
    """Return the moves that lead towards the goal."""
    return [name for name, (dx, dy) in MOVES.items() if dx * (goal[0] - walker[0]) + dy * (goal[1] - walker[1]) > 0]


def beginnings() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return all places of walker and goal that are fewer moves apart than there are turns, in an order of chance."""
    cells = list(product(range(CELLS), repeat=2))
    found = [(a, b) for a, b in product(cells, cells) if 0 < abs(a[0] - b[0]) + abs(a[1] - b[1]) < NUM_TURNS]
    Random(0).shuffle(found)
    return found


class PictureGrid(AgentInstance):
    """A walk to a goal that only the pictures show."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Beginnings to train on."""
        return [Task(PROMPT, label=places) for places in beginnings()[NUM_EVAL:]]

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """Other beginnings, never trained on."""
        return [Task(PROMPT, label=places) for places in beginnings()[:NUM_EVAL]]

    def reset(self, state: ResetState) -> ResetResult:
        """Show the grid as it is at the beginning."""
        self.walker, self.goal = state.label
        self.turns = 0
        return ResetResult(PROMPT, images=[draw(self.walker, self.goal)])

    def solve(self, state: StepState) -> str:
        """Return a move towards the goal, for `agentrl check`."""
        return helpful(self.walker, self.goal)[0]

    def step(self, state: StepState) -> StepResult:
        """Move, and show the grid again."""
        move = state.action_text.strip().lower()
        if move not in MOVES:
            return StepResult(0.0, terminated=True)
        self.turns += 1
        self.walker = moved(self.walker, move)
        if self.walker == self.goal:
            return StepResult(1.0, terminated=True)
        if self.turns == NUM_TURNS:
            return StepResult(0.0, terminated=True)
        return StepResult(0.0, GO_ON, images=[draw(self.walker, self.goal)])

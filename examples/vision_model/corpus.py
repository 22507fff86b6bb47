"""Chats about drawn pictures that the bundled vision model is pretrained on, with as many mistakes as reinforcement learning needs.

Pictures and prompts are those of ``envs/shapes.py`` and ``envs/picture_grid.py``.
"""

from __future__ import annotations

from random import Random
from typing import Any

from agentrl.env.images import image_text
from envs import picture_grid, shapes

Row = dict[str, Any]
ANSWERS = {"colour": list(shapes.COLOURS), "count": list("1234"), "side": ["left", "right"]}
MISTAKES = 0.5
"""Share of the answers of the second phase that are drawn at random."""


def shapes_row(rng: Random, mistakes: float) -> Row:
    """Return a question about a picture with its answer."""
    task = shapes.make_task(rng)
    answer = rng.choice(ANSWERS[task.metadata["kind"]]) if rng.random() < mistakes else task.label
    return _row([(task.prompt, task.images[0], answer)])


def make_places(rng: Random) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return different places of walker and goal, at most as many moves apart as there are turns."""
    while True:
        walker, goal = ((rng.randrange(picture_grid.CELLS), rng.randrange(picture_grid.CELLS)) for _ in range(2))
        if 0 < abs(walker[0] - goal[0]) + abs(walker[1] - goal[1]) < picture_grid.NUM_TURNS:
            return walker, goal


def grid_row(rng: Random, mistakes: float) -> Row:
    """Return the first moves of a walk to the goal, some of them random; few, so that all rows are about as long."""
    walker, goal = make_places(rng)
    turns = []
    for turn in range(rng.randint(1, 2)):
        moves = list(picture_grid.MOVES) if rng.random() < mistakes else picture_grid.helpful(walker, goal)
        move = rng.choice(moves)
        turns.append((picture_grid.GO_ON if turn else picture_grid.PROMPT, picture_grid.draw(walker, goal), move))
        by = picture_grid.MOVES[move]
        walker = tuple(min(max(at + step, 0), picture_grid.CELLS - 1) for at, step in zip(walker, by, strict=True))
        if walker == goal:
            break
    return _row(turns)


def shapes_description(rng: Random) -> Row:
    """Return a picture with the colours in its quarters: many words about each picture, so that the vision part learns fast."""
    (picture,) = shapes.make_task(rng).images
    words = []
    for x, y in shapes.QUARTERS:
        quarter = picture[y - 16 : y + 16, x - 16 : x + 16]
        counts = {name: int((quarter == colour).all(-1).sum()) for name, colour in shapes.COLOURS.items()}
        most = max(counts, key=lambda name: counts[name])
        words.append(most if counts[most] else "no")
    return _row([("List.", picture, " ".join(words))])


def grid_description(rng: Random) -> Row:
    """Return a grid with the places of walker and goal."""
    walker, goal = make_places(rng)
    return _row([("Where?", picture_grid.draw(walker, goal), " ".join(map(str, (*walker, *goal))))])


def rows(count: int, *, seed: int, mistakes: float, descriptions: float) -> list[Row]:
    """Return rows of a data set for ``agentrl sft``; a share of them describes the whole picture, without mistakes."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        is_shapes = rng.random() < 0.7
        if rng.random() < descriptions:
            found.append((shapes_description if is_shapes else grid_description)(rng))
        else:
            found.append((shapes_row if is_shapes else grid_row)(rng, mistakes))
    return found


def _row(turns: list[tuple[str, Any, str]]) -> Row:
    messages = []
    for text, _, answer in turns:
        messages += [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        messages += [{"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [image_text(picture) for _, picture, _ in turns]}

"""Chats about drawn pictures that the bundled vision model is pretrained on, with as many mistakes as reinforcement learning needs.

Pictures and prompts are those of ``envs/shapes.py`` and ``envs/picture_grid.py``. In all phases but the last, many words are asked for
about each picture: a list of all forms with their colours, and several questions. From single answers of one word the model learns
these words long before it looks at the picture.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from agentrl.env.images import image_text
from envs import picture_grid, shapes

Row = dict[str, Any]
Turn = tuple[str, Any, str]
"""Text of the user, the picture before it or `None`, and the answer."""
Cell = tuple[int, int]
ANSWERS = {"colour": list(shapes.COLOURS), "count": list("1234"), "side": ["left", "right"]}
MISTAKES = 0.85
"""Share of the answers of the last phase that are drawn at random."""
QUESTIONS = 3
"""Questions about a picture at most, of the phases before."""
STEPS = 3
"""Pictures of a walk at most."""
SHAPES = 0.6
"""Share of the rows about shapes; the others are walks."""
LIST, WHERE = "List.", "Where?"
"""Request for a description, which the environments never make."""


def shapes_turns(rng: Random) -> list[Turn]:
    """Return a picture with questions about it, and with a list of what is in it last, so that no answer can be read in the list."""
    count = rng.randint(1, len(shapes.QUARTERS))
    is_plain = count > len(shapes.FORMS) or rng.random() < 0.3
    items = shapes.scatter(rng, rng.choices(shapes.FORMS, k=count) if is_plain else rng.sample(shapes.FORMS, count))
    once = [form for form, number in Counter(item[0] for item in items).items() if number == 1]
    asked = [shapes.ask("count", items, items[0][0]), *(shapes.ask(kind, items, form) for form in once for kind in ("colour", "side"))]
    answered = [*rng.sample(asked, min(QUESTIONS, len(asked))), (LIST, listed(items))]
    return [(text, None if place else shapes.draw(items), answer) for place, (text, answer) in enumerate(answered)]


def listed(items: list[tuple[str, str, int, int]]) -> str:
    """Return colour and form of each quarter, or ``no`` for one that is empty."""
    half = shapes.SIDE // 2
    found = {(x // half, y // half): f"{colour} {form}" for form, colour, x, y in items}
    return " ".join(found.get((x // half, y // half), "no") for x, y in shapes.QUARTERS)


def shapes_question(rng: Random, mistakes: float) -> list[Turn]:
    """Return a task of the environment with its answer."""
    task = shapes.make_task(rng)
    answer = rng.choice(ANSWERS[task.metadata["kind"]]) if rng.random() < mistakes else str(task.label)
    return [(str(task.prompt), task.images[0], answer)]


def grid_turns(rng: Random) -> list[Turn]:
    """Return some steps of a walk, half of them random, with a helpful move and the places of walker and goal for each picture."""
    walker, goal = rng.choice(picture_grid.beginnings())
    turns: list[Turn] = []
    for step in range(STEPS):
        helpful = picture_grid.helpful(walker, goal)
        described = [(picture_grid.GO_ON if step else picture_grid.PROMPT, rng.choice(helpful)), (WHERE, places(walker, goal))]
        turns += [(text, None if place else picture_grid.draw(walker, goal), answer) for place, (text, answer) in enumerate(described)]
        walker = picture_grid.moved(walker, rng.choice(list(picture_grid.MOVES) if rng.random() < 0.5 else helpful))
        if walker == goal:
            break
    return turns


def places(walker: Cell, goal: Cell) -> str:
    """Return column and row of both."""
    return " ".join(map(str, (*walker, *goal)))


def grid_walk(rng: Random, mistakes: float) -> list[Turn]:
    """Return the first moves of a walk, of which a share is random."""
    walker, goal = rng.choice(picture_grid.beginnings())
    turns: list[Turn] = []
    for step in range(rng.randint(1, STEPS)):
        move = rng.choice(list(picture_grid.MOVES) if rng.random() < mistakes else picture_grid.helpful(walker, goal))
        turns.append((picture_grid.GO_ON if step else picture_grid.PROMPT, picture_grid.draw(walker, goal), move))
        walker = picture_grid.moved(walker, move)
        if walker == goal:
            break
    return turns


def rows(count: int, *, seed: int, mistakes: float | None) -> list[Row]:
    """Return rows of a data set for ``agentrl sft``: episodes with a share of mistakes, or with `None` many words about each picture."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        is_shapes = rng.random() < SHAPES
        if mistakes is None:
            turns = (shapes_turns if is_shapes else grid_turns)(rng)
        else:
            turns = (shapes_question if is_shapes else grid_walk)(rng, mistakes)
        found.append(_row(turns))
    return found


def _row(turns: list[Turn]) -> Row:
    messages: list[dict[str, Any]] = []
    for text, picture, answer in turns:
        image = [] if picture is None else [{"type": "image"}]
        messages.append({"role": "user", "content": [*image, {"type": "text", "text": text}]})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "images": [image_text(picture) for _, picture, _ in turns if picture is not None]}

"""Questions about drawn pictures: the smallest environment for a model that reads images.

It teaches how a picture travels: a task's ``images`` may hold a NumPy array, a PIL image, a path, a data URL or the bytes of a
file. The question stands behind the picture in the prompt. Run it with the bundled model that reads images::

    agentrl train --agent envs/shapes.py --model tiny-vision

The recipe ``examples/recipes/cpu/pictures.toml`` goes on for 100 steps, with evaluations on other pictures.

    user       [picture] What colour is the circle?
    assistant  red
"""

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from agentrl import AgentInstance, StepResult, StepState, Task

SIDE, RADIUS = 64, 11
COLOURS = {"red": (225, 45, 40), "green": (40, 190, 70), "blue": (50, 90, 235), "white": (240, 240, 240)}
FORMS = ("circle", "square", "cross")
QUARTERS = ((16, 16), (48, 16), (16, 48), (48, 48))
NUM_TASKS, NUM_EVAL = 512, 128


def draw(items: Iterable[tuple[str, str, int, int]]) -> np.ndarray:
    """Return a picture of forms in their colours, each at a place given by its middle."""
    picture = np.full((SIDE, SIDE, 3), 24, dtype=np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for form, colour, x, y in items:
        right, down = np.abs(columns - x), np.abs(rows - y)
        inside = {
            "circle": right**2 + down**2 <= RADIUS**2,
            "square": np.maximum(right, down) <= RADIUS - 5,
            "cross": (np.minimum(right, down) <= 3) & (np.maximum(right, down) <= RADIUS),
        }[form]
        picture[inside] = COLOURS[colour]
    return picture


def scatter(rng: Random, forms: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Return forms in colours of chance, each in a quarter of its own."""
    places = rng.sample(QUARTERS, len(forms))
    return [
        (form, rng.choice(list(COLOURS)), x + rng.randint(-3, 3), y + rng.randint(-3, 3))
        for form, (x, y) in zip(forms, places, strict=True)
    ]


def ask(kind: str, items: Sequence[tuple[str, str, int, int]], form: str) -> tuple[str, str]:
    """Return a question with its answer: the colour or the side of a form, or the number of all."""
    _, colour, x, _ = next(item for item in items if item[0] == form)
    return {
        "colour": (f"What colour is the {form}?", colour),
        "count": ("How many?", str(len(items))),
        "side": (f"Where is the {form}?", "left" if x < SIDE // 2 else "right"),
    }[kind]


def make_task(rng: Random) -> Task:
    """Draw a picture, and ask for a colour, a number or a side."""
    kind = rng.choice(("colour", "count", "side"))
    forms = rng.choices(FORMS, k=rng.randint(1, 4)) if kind == "count" else rng.sample(FORMS, rng.randint(1, 3))
    items = scatter(rng, forms)
    prompt, label = ask(kind, items, forms[0])
    return Task(prompt, label, images=(draw(items),), metadata={"kind": kind})


def make_tasks(seed: int, count: int) -> list[Task]:
    """Return tasks, no two of them alike, with different pictures for each seed."""
    rng, found = Random(seed), dict[tuple[str, bytes], Task]()
    while len(found) < count:
        task = make_task(rng)
        found[str(task.prompt), task.images[0].tobytes()] = task
    return list(found.values())


class Shapes(AgentInstance):
    """Colour, number or side of drawn forms, asked once."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Pictures to train on."""
        return make_tasks(0, NUM_TASKS)

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """Other pictures, never trained on."""
        seen = {task.images[0].tobytes() for task in cls.tasks()}
        return [task for task in make_tasks(1, NUM_EVAL) if task.images[0].tobytes() not in seen]

    def solve(self, state: StepState) -> str:
        """Return a right answer, for `agentrl check`."""
        return str(state.label)

    def step(self, state: StepState) -> StepResult:
        """Compare the answer with the label."""
        return StepResult(float(state.action_text.strip().lower() == state.label), terminated=True)

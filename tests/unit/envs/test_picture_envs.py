"""Environments whose tasks are pictures: what is drawn is what is asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from agentrl import ResetState, StepState, Task
from envs import picture_grid, shapes
from tests import env_pictures
from tests.unit.envs.play import load


def coloured(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (picture == np.array(colour, dtype=np.uint8)).all(-1)


def test_the_answers_of_shapes_are_in_the_pictures() -> None:
    for task in shapes.make_tasks(3, 200):
        (picture,) = task.images
        kind, label = task.metadata["kind"], str(task.label)
        if kind == "colour":
            assert coloured(picture, shapes.COLOURS[label]).any()
        lit = (picture != 24).any(-1)
        if kind == "count":
            quarters = [lit[y : y + 32, x : x + 32].sum() > 60 for y in (0, 32) for x in (0, 32)]
            assert sum(quarters) == int(label)
        if kind == "side" and lit[:, 30:34].sum() == 0 and not (lit[:, :30].any() and lit[:, 34:].any()):
            assert (label == "left") == bool(lit[:, :30].any())


def test_no_picture_of_the_evaluation_is_trained_on() -> None:
    cls = load("shapes")
    train, held_out = ({np.asarray(task.images[0]).tobytes() for task in tasks()} for tasks in (cls.tasks, cls.eval_tasks))
    assert not train & held_out


@pytest.mark.parametrize(("answer", "reward"), [("red", 1.0), (" Red ", 1.0), ("blue", 0.0), ("", 0.0)])
def test_an_answer_is_compared_with_the_label(answer: str, reward: float) -> None:
    task = Task("What colour is the circle?", "red")
    state = StepState(task=task, label=task.label, action_text=answer, turn=0, finish_reason="stop")
    result = shapes.Shapes().step(state)
    assert (result.reward, result.terminated) == (reward, True)


def test_a_solver_reaches_the_goal_in_every_grid() -> None:
    for task in picture_grid.PictureGrid.tasks():
        env = picture_grid.PictureGrid()
        first = env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
        shown = np.asarray(first.images[0])
        assert coloured(shown, picture_grid.WALKER).any()
        assert coloured(shown, picture_grid.GOAL).any()
        for turn in range(picture_grid.NUM_TURNS):
            state = StepState(task=task, label=task.label, action_text="", turn=turn, finish_reason="stop")
            state = StepState(task=task, label=task.label, action_text=env.solve(state), turn=turn, finish_reason="stop")
            result = env.step(state)
            if result.terminated:
                break
            assert not np.array_equal(np.asarray(result.images[0]), shown)
            shown = np.asarray(result.images[0])
        assert (result.reward, result.terminated) == (1.0, True)


def test_the_gallery_shows_what_the_environments_show() -> None:
    pictures = env_pictures.drawn()
    page = (env_pictures.OUT.parent / "gallery.md").read_text(encoding="utf-8")
    assert {path.stem for path in env_pictures.OUT.glob("*.png")} == set(pictures)
    for name, picture in pictures.items():
        assert np.array_equal(np.asarray(Image.open(env_pictures.OUT / f"{name}.png").convert("RGB")), np.asarray(picture))
        assert f"](gallery/{name}.png)" in page
    frames = np.split(np.asarray(pictures["picture_grid"])[:, : 4 * (128 + 8)], 4, axis=1)
    assert all(not np.array_equal(one, other) for one, other in itertools.pairwise(frames))


def test_another_word_ends_a_walk_and_so_does_the_last_turn() -> None:
    task = Task(picture_grid.PROMPT, label=((0, 0), (3, 1)))
    env = picture_grid.PictureGrid()
    env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=0))
    words = ["up"] * picture_grid.NUM_TURNS
    results = [
        env.step(StepState(task=task, label=task.label, action_text=word, turn=turn, finish_reason="stop"))
        for turn, word in enumerate(words)
    ]
    assert [result.terminated for result in results] == [False] * (picture_grid.NUM_TURNS - 1) + [True]
    assert sum(result.reward for result in results) == 0
    other = env.step(StepState(task=task, label=task.label, action_text="north", turn=0, finish_reason="stop"))
    assert (other.reward, other.terminated) == (0.0, True)

"""The parts of a picture that the tokens of an image stand for, as records have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.core.images import ImageInput, ImageTensor, PlacedImage
from agentrl.core.types import FinishReason, GroupRequest, Status, Task, Trajectory, Turn, floats, ints
from agentrl.env.images import data_url
from agentrl.rollout.records import blocks_of, trajectory_record
from tests.image_support import read, reader_of

MARK, FAKE, LINE, PLACE = 7, 1, 2, 3
WHOLE = [0, 0, 1, 1]


def image(ids: list[int], grid: tuple[int, int, int] | None = None, data: bytes = b"\x89PNG") -> ImageInput:
    tensors: dict[str, Any] = {"pixel_values": ImageTensor(np.zeros((1, 3)), 0)}
    if grid is not None:
        tensors["image_grid_thw"] = ImageTensor(np.array([grid]), 0)
    return ImageInput(key="k", data=data, token_ids=ints(ids), placeholder=MARK, tensors=tensors)


def tiles(rows: int, columns: int, size: int) -> list[int]:
    """Tokens of tiles, as Idefics3 writes them: a line ends each row, and the whole picture stands at the end."""
    row = [*([FAKE, PLACE, *[MARK] * size] * columns), LINE]
    return [*row * rows, LINE, FAKE, PLACE, *[MARK] * size, FAKE]


@pytest.mark.parametrize(
    ("ids", "grid", "blocks"),
    [
        ([FAKE, PLACE, *[MARK] * 4, FAKE], None, [[2, 2, 2, *WHOLE]]),
        ([MARK], None, [[0, 1, 1, *WHOLE]]),
        ([FAKE, MARK, LINE], None, [[1, 1, 1, *WHOLE]]),
        ([FAKE, *[9] * 9, FAKE], None, [[1, 3, 3, *WHOLE]]),  # a family whose placeholder is not what pixels replace
        ([MARK] * 6, (1, 4, 6), [[0, 2, 3, *WHOLE]]),
        ([MARK] * 6, (1, 2, 3), [[0, 2, 3, *WHOLE]]),
        ([MARK] * 6, (1, 5, 5), []),
        ([MARK] * 6, None, []),
        ([*[MARK] * 4, LINE, *[MARK] * 4, LINE], None, []),  # rows of another form
        ([*[MARK] * 4, LINE, FAKE, *[MARK] * 9], None, []),
        ([FAKE, LINE], None, []),
    ],
)
def test_a_block_covers_the_picture_row_by_row(ids: list[int], grid: tuple[int, int, int] | None, blocks: list[Any]) -> None:
    assert blocks_of(image(ids, grid)) == blocks


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_tiles_cover_their_parts_and_the_last_block_all(rows: int, columns: int) -> None:
    found = blocks_of(image(tiles(rows, columns, 4)))
    parts = [[x / columns, y / rows, (x + 1) / columns, (y + 1) / rows] for y in range(rows) for x in range(columns)]
    assert [block[3:] for block in found] == [*parts, WHOLE]
    assert {tuple(block[1:3]) for block in found} == {(2, 2)}
    assert all(tiles(rows, columns, 4)[int(block[0]) : int(block[0]) + 4] == [MARK] * 4 for block in found)


def test_the_bundled_form_of_processor_makes_four_patches(vision_model: str) -> None:
    (found,) = read(reader_of(vision_model), 1)
    [[begin, *rest]] = blocks_of(found)
    assert rest == [2, 2, *WHOLE]
    assert found.token_ids[int(begin) : int(begin) + 4].tolist() == [found.placeholder] * 4


def turn(number: int, *images: ImageInput) -> Turn:
    placed = tuple(PlacedImage(5 * place + 1, each) for place, each in enumerate(images))
    return Turn(
        prompt_ids=ints([0] * 20),
        token_ids=ints([1]),
        logprobs=floats([0]),
        versions=ints([0]),
        finish_reason=FinishReason.STOP,
        number=number,
        images=placed,
    )


def recorded(task: Task, *turns: Turn, images: tuple[tuple[int, str], ...] = ()) -> dict[str, Any]:
    played = Trajectory(trajectory_id="0-0", episode_id="0-0", group_id=0, turns=turns, status=Status.FINISHED, reward=1.0, images=images)
    return trajectory_record(GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0), played)


def test_a_record_has_the_blocks_of_each_turn_and_images_that_an_agent_sent() -> None:
    own, sent = image([FAKE, *[MARK] * 4], data=b"\x89PNG1"), image([*[MARK] * 3], data=b"\x89PNG2")
    record = recorded(Task("x", images=(data_url(own.data),)), turn(0, own), turn(1), turn(2, sent, own))
    assert [row.get("pictures") for row in record["turns"]] == [[[[2, 2, 2, *WHOLE]]], None, [[], [[7, 2, 2, *WHOLE]]]]
    assert record["images"] == [[2, data_url(sent.data)]]
    assert "images" not in recorded(Task("x", images=("a.png",)), turn(0, own))  # it may be that file
    assert recorded(Task("x"), turn(0, own), images=((0, "b.png"),))["images"] == [[0, "b.png"]]

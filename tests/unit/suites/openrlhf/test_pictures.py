"""Files written for OpenRLHF that give pictures in the prompt and in later turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.core.images import check_places
from agentrl.core.protocols import GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.env.boundary import EnvSession
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.threads import Threads
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode import Episode
from agentrl.suites.load import load_agent
from tests.image_support import picture, reader_of
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import SETTINGS

pytestmark = pytest.mark.anyio
FILE = Path(__file__).parents[3] / "openrlhf_files" / "pictures.py"


@pytest.fixture(scope="module")
def codec(vision_model: str) -> ChatCodec:
    made = ChatCodec(load_tokenizer(vision_model))
    made.images = reader_of(vision_model)
    return made


async def play(codec: ChatCodec, task: Task, file: Path = FILE) -> tuple[Trajectory, list[GenerationRequest]]:
    spec, engine = load_agent(str(file)), ScriptedEngine(lambda request: [*codec.encode_text("red"), *codec.turn_end_ids])
    cls = spec.load()
    await engine.start()
    settings = replace(SETTINGS, is_training=False)
    session = EnvSession(cls, str(FILE), Threads(2), settings.env)
    request = GroupRequest(group_id=0, task=task, n_samples_per_prompt=1, version=0)
    agents = multi_agent_spec(cls, str(FILE))
    (trajectory,) = await Episode(request, 0, engine=engine, codec=codec, env=session, settings=settings, agents_spec=agents).run()
    return trajectory, engine.requests


@pytest.mark.parametrize("parts", [False, True])
async def test_pictures_stand_in_the_rendered_prompt_and_in_feedback(codec: ChatCodec, parts: bool) -> None:
    own: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    task = Task(own if parts else "Which colour?", label="Red", id="one", images=(picture(1),))  # type: ignore[arg-type]
    trajectory, requests = await play(codec, task)
    assert (trajectory.error, trajectory.status, trajectory.reward) == (None, Status.FINISHED, 1.0)
    texts = [turn.prompt_text for turn in trajectory.turns]
    assert texts == [
        "<|user|><image>Which colour?<|end|><|assistant|>",
        "\n<|user|>Look again.<|end|><|assistant|>",
        "\n<|user|><image>\nThe screen has changed. And now?<|end|><|assistant|>",
    ]
    assert [len(turn.images) for turn in trajectory.turns] == [1, 0, 1]
    assert [len(request.placed) for request in requests] == [1, 1, 2]
    for request in requests:
        check_places("r", request.prompt_ids, request.placed, [codec.images.placeholder if codec.images else -1])
    pixels = np.asarray(trajectory.turns[2].images[0].image.tensors["pixel_values"].array) * 127.5 + 127.5
    assert np.abs(pixels - 80).max() < 1


async def test_a_prompt_that_reset_changes_has_its_places_already(codec: ChatCodec, tmp_path: Path) -> None:
    code = FILE.read_text().replace(
        '{"observation": states["observation"]}', '{"observation": states["observation"].replace("W", "Say w")}'
    )
    (tmp_path / "changed.py").write_text(code)
    task = Task("Which colour?", label="Red", id="one", images=(picture(1),))  # type: ignore[arg-type]
    trajectory, _ = await play(codec, task, tmp_path / "changed.py")
    assert (trajectory.error, trajectory.status) == (None, Status.FINISHED)
    assert trajectory.turns[0].prompt_text == "<|user|><image>Say which colour?<|end|><|assistant|>"


async def test_pictures_without_a_place_are_an_error_with_the_task(codec: ChatCodec) -> None:
    two: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    trajectory, requests = await play(codec, Task(two, label="red", id="odd", images=(picture(1),)))  # type: ignore[arg-type]
    assert (trajectory.status, trajectory.reward, requests) == (Status.ENV_ERROR, None, [])
    assert "task 'odd': the messages have 2 parts for images and there are 1 images" in str(trajectory.error)

"""Pictures that matter, that change nothing, and that nobody can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.assets import CHOSEN_VISION, VISION_MODEL
from agentrl.check.findings import Report, Severity
from agentrl.check.pictures import check_pictures
from agentrl.suites.load import load_agent
from tests.unit.check.support import BROKEN, checked, ids, played

pytestmark = pytest.mark.anyio
ENVS = BROKEN.parents[3] / "envs"

COMMON = """
import io
from random import Random

import numpy as np
from PIL import Image

from agentrl import AgentInstance, Message, ResetResult, StepResult, Task

COLOURS = {"red": (220, 40, 40), "blue": (40, 40, 220), "green": (40, 220, 40)}

def picture(colour, seed):
    drawn = np.random.default_rng(seed).integers(0, 40, (16, 16, 3), dtype=np.uint8)
    drawn[4:12, 4:12] = COLOURS[colour]
    return drawn

class Colours(AgentInstance):
    @classmethod
    def tasks(cls):
        names = list(COLOURS)
        return [Task("Which colour?", label=names[n % 3], images=[picture(names[n % 3], n)], id=str(n)) for n in range(12)]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.label), terminated=True)

class Decorated(Colours):
    @classmethod
    def tasks(cls):
        sums = [(f"{a}+{b}=", str(a + b)) for a, b in ((1, 2), (2, 5), (4, 4))]
        return [Task(sums[n % 3][0], label=sums[n % 3][1], images=[picture("red", n)], id=str(n)) for n in range(12)]

class Logo(Colours):
    @classmethod
    def tasks(cls):
        return [Task(f"{n}+{n}=", label=str(2 * n), images=[picture("red", 0)]) for n in range(12)]

class Unpaid(Colours):
    def step(self, state):
        return StepResult(float(state.action_text.strip() in COLOURS), terminated=True)

class Unknown(Colours):
    @classmethod
    def tasks(cls):
        return [Task(task.prompt, images=task.images, metadata={"colour": task.label}) for task in super().tasks()]

    def step(self, state):
        return StepResult(float(state.action_text.strip() == state.task.metadata["colour"]), terminated=True)

class Start(Colours):
    @classmethod
    def tasks(cls):
        return [Task("Go on.", metadata={"n": n}) for n in range(12)]

    def reset(self, state):
        return ResetResult("Go on.", images=[picture("red", 0)])

    def step(self, state):
        return StepResult(0.0, terminated=True)  # nobody knows the word that leads to the next picture

class Alone(Colours):
    @classmethod
    def tasks(cls):
        names = list(COLOURS)
        return [Task(f"Which colour is in picture {n}?", label=names[n % 3], images=[picture(names[n % 3], n)]) for n in range(12)]

class Parts(Colours):
    @classmethod
    def tasks(cls):
        return [Task("?", label=task.label, id=task.id, metadata={"n": task.id}) for task in super().tasks()]

    def reset(self, state):
        own = {"type": "image", "image": Image.fromarray(picture(state.label, int(state.task.id)))}
        return ResetResult([Message(role="user", content=[own, {"type": "text", "text": "Which colour?"}])])

def png(image, **options):
    file = io.BytesIO()
    image.save(file, **{"format": "PNG", **options})
    return file.getvalue()

class Shown(Colours):
    def reset(self, state):
        return ResetResult("Which colour?", images=self.shown)

class Cut(Shown):
    shown = [png(Image.new("RGB", (64, 64)))[:60]]

class Bomb(Shown):
    shown = [png(Image.new("1", (6000, 6000)))]

class Animated(Shown):
    shown = [png(Image.new("L", (4, 4)), format="GIF", save_all=True, append_images=[Image.new("L", (4, 4), 9)])]

class Printed(Shown):
    shown = [png(Image.new("CMYK", (4, 4)), format="JPEG")]

class Missing(Shown):
    shown = ["nowhere.png"]

class Many(Shown):
    shown = [picture("red", 1)] * 17

class Placeless(Colours):
    def reset(self, state):
        return ResetResult([Message(role="user", content=[{"type": "image"}, {"type": "image"}])])
"""


async def found(tmp_path: Path, name: str) -> Report:
    """What is found in an environment by the standard policies, and by looking at its pictures."""
    (tmp_path / "pictures.py").write_text(COMMON)
    context = await played(f"{tmp_path}/pictures.py:{name}", model=VISION_MODEL)
    await check_pictures(context)
    return context.report


@pytest.mark.parametrize("name", ["Colours", "Parts"])
async def test_pictures_that_decide_are_not_idle(tmp_path: Path, name: str) -> None:
    report = await found(tmp_path, name)
    assert (ids(report, *Severity), report.skipped) == (set(), [])


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("Decorated", "the right answer to another picture earned as much in each of 12 tasks"),
        ("Logo", "the same pictures in each of"),
        ("Unpaid", "the right answer to another picture earned as much in each of 12 tasks"),
    ],
)
async def test_pictures_that_change_nothing_are_found(tmp_path: Path, name: str, seen: str) -> None:
    findings = {finding.id: finding for finding in (await found(tmp_path, name)).findings}
    assert findings["images-idle"].where.startswith("pictures.py: ")
    assert findings["images-idle"].seen.startswith(seen)


async def test_texts_of_their_own_leave_it_open(tmp_path: Path) -> None:
    report = await found(tmp_path, "Alone")
    assert ids(report) == set()
    assert report.skipped == ["whether pictures matter: 0 tasks have the text of another one and other pictures"]


@pytest.mark.parametrize("name", ["Unknown", "Start"])
async def test_without_right_answers_it_stays_open(tmp_path: Path, name: str) -> None:
    report = await found(tmp_path, name)
    assert "images-idle" not in ids(report)
    assert report.skipped == ["whether pictures matter: no right answer is known, by a label or solve"]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("Cut", "damaged"),
        ("Bomb", "6000 x 6000 pixels, more than 8,388,608 (--max-image-pixels)"),
        ("Animated", "animated: it has 2 frames"),
        ("Printed", "mode CMYK; convert it to RGB"),
        ("Missing", "No such file"),
        ("Many", "18 images are more than 16 (--max-images)"),
        ("Placeless", "2 parts for images and there are 1 images"),
    ],
)
async def test_pictures_that_cannot_be_read_are_found_with_their_task(tmp_path: Path, name: str, seen: str) -> None:
    findings = {finding.id: finding for finding in (await found(tmp_path, name)).findings}
    assert seen in findings["images-broken"].seen
    assert "task '0'" in findings["images-broken"].seen


@pytest.mark.parametrize(("name", "shows"), [("Colours", True), ("Parts", True), ("Shown", True), ("Words", False)])
def test_the_code_of_an_environment_says_whether_it_shows_pictures(tmp_path: Path, name: str, shows: bool) -> None:
    plain = 'class Words(AgentInstance):\n    def step(self, state):\n        return StepResult(float("image" in state.action_text))\n'
    (tmp_path / "shown.py").write_text(COMMON + plain)
    assert load_agent(f"{tmp_path}/shown.py:{name}").shows_images is shows


@pytest.mark.parametrize("name", ["shapes", "picture_grid"])
def test_without_a_named_model_pictures_choose_the_one_that_reads_them(name: str) -> None:
    env = str(ENVS / f"{name}.py")
    report = checked(env, chooses_model=True)
    assert (ids(report), report.env["model"]) == (set(), CHOSEN_VISION)
    assert ids(checked(env, episodes=1)) == {"images-unread"}  # the text model was named


@pytest.mark.slow
def test_the_command_looks_at_pictures(tmp_path: Path) -> None:
    (tmp_path / "pictures.py").write_text(COMMON)
    assert "images-idle" in ids(checked(f"{tmp_path}/pictures.py:Decorated", model=VISION_MODEL))

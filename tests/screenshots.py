"""Takes the pictures of docs/viewer.md in a real browser, of real runs.

python -m tests.screenshots

The runs are made in runs/viewer, which takes about three minutes on 2 cores; those that are there are kept. Run it in the repository's
folder, so that the pictures name files as a reader would. Chromium is needed: apt-get install chromium.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from tests.browser import record
from tests.browser.conftest import launched
from tests.browser.serving import serve
from tests.forks import end_all

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OUT = Path(__file__).parent.parent / "docs" / "viewer"
MOST_BYTES = 150_000
COLOURS = 200  # of the palette; fewer make the file smaller
LONG = 30  # steps of the run of the pictures


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: its name, the place of the page, what to wait for, and what to do before."""

    name: str
    place: str
    wait_for: str
    size: tuple[int, int] = (1280, 760)
    dark: bool = False
    scroll_to: str = ""
    hover: str = ""
    choose: tuple[str, ...] = ()  # boxes to tick


def make_runs(folder: Path) -> None:
    """The runs that the pictures show; those that are there are kept."""
    record.calculator(folder, steps=LONG)
    record.calculator(folder, steps=LONG, name="calculator-slow", rate="3e-5")
    record.negotiation(folder)
    record.branching(folder)
    record.unreachable(folder, steps=12)
    record.masked(folder, steps=12)
    record.tuned(folder, steps=40)


def episodes(folder: Path, name: str) -> list[dict[str, Any]]:
    """Recorded training episodes of a run, in the order of writing."""
    lines = (folder / name / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "eval_sampling" not in row]


def mixed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """An episode whose group has good and bad members, and whose least likely token is the least likely of all such."""
    rewards: dict[int, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["group_id"], set()).add(row["reward"])
    several = [row for row in rows if len(rewards[row["group_id"]]) > 2 and len(row["turns"]) > 1] or rows
    return min(several, key=lambda row: min(row["turns"][0]["logprobs"]))


def most_improved(folder: Path, name: str) -> str:
    """The task that gained most from the first evaluation to the last."""
    lines = [json.loads(line) for line in (folder / name / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    before, after = ({task: row["reward"] for task, row in lines[place]["by_task"].items()} for place in (0, -1))
    return max(before, key=lambda task: after[task] - before[task])


def pictures(folder: Path) -> list[Picture]:
    """What to take, with places found in the runs."""
    row = mixed(episodes(folder, "calculator")[: 8 * 4 * LONG // 2])
    episode, group = row["episode_id"], row["group_id"]
    values = row["turns"][0]["logprobs"]
    unlikely = values.index(min(values))
    branches = max(episodes(folder, "branching"), key=lambda one: len(one["turns"]))["episode_id"]
    agents = max((one for one in episodes(folder, "negotiation") if one["agent"] == "bob"), key=lambda one: len(one["turns"]))["episode_id"]
    sums, masked = episodes(folder, "sums")[-1], episodes(folder, "masked")[-1]
    step = LONG // 2
    return [
        Picture(
            name="runs", place="#/", wait_for="tr[data-run]", size=(1280, 330), choose=("compare calculator", "compare calculator-slow")
        ),
        Picture(name="compare", place="#/compare?runs=calculator,calculator-slow&smooth=0.7", wait_for=".chart canvas", size=(1280, 720)),
        Picture(name="curves", place="#/run/calculator?smooth=0.6", wait_for=".note", size=(1280, 640)),
        Picture(name="step", place=f"#/run/calculator/step/{step}", wait_for="tr[data-group]"),
        Picture(name="lanes", place=f"#/run/calculator/step/{step}", wait_for=".lanes", scroll_to=".lanes", size=(1280, 560)),
        Picture(
            name="spike", place=f"#/run/calculator/step/{step}?metric=entropy", wait_for=".spike tr", scroll_to="#spike", size=(1280, 560)
        ),
        Picture(
            name="episode", place=f"#/run/calculator/episode/{episode}?turn=0&token={unlikely}", wait_for=".token.chosen", scroll_to="main"
        ),
        Picture(
            name="tokens",
            place=f"#/run/calculator/episode/{episode}?form=tokens&colour=entropy",
            wait_for=".token.cell",
            dark=True,
            hover=".sampled .token",
        ),
        Picture(name="branches", place=f"#/run/branching/episode/{branches}?colour=mask", wait_for=".branches"),
        Picture(name="agents", place=f"#/run/negotiation/episode/{agents}", wait_for=".agents .turn", size=(1280, 620)),
        Picture(name="group", place=f"#/run/calculator/group/{group}?colour=logprob", wait_for=".member", size=(1280, 480)),
        Picture(name="episodes", place="#/run/calculator/episodes", wait_for="tr[data-episode]", size=(1280, 480)),
        Picture(name="tuned", place="#/run/sft", wait_for=".chart canvas", size=(1280, 620)),
        Picture(name="rows", place="#/run/dpo/samples", wait_for="tr[data-sample]", size=(1280, 560)),
        Picture(name="row", place="#/run/sft/sample/1", wait_for=".token", size=(1280, 300), hover=".token:not(.same)"),
        Picture(name="tasks", place="#/run/calculator/tasks?sort=improved", wait_for="tr[data-task]", size=(1280, 420)),
        Picture(name="evaluations", place="#/run/calculator/evaluations", wait_for=".before-after tr", size=(1280, 720)),
        Picture(
            name="before-after",
            place=f"#/run/calculator/evaluated/{most_improved(folder, 'calculator')}",
            wait_for=".pair .member .token",
            size=(1280, 480),
        ),
        Picture(name="question-1", place="#/run/sums", wait_for=".sign", size=(1280, 560)),
        Picture(name="question-2", place="#/run/sums/step/12", wait_for="tr[data-group]", size=(1280, 560)),
        Picture(name="question-3", place=f"#/run/sums/group/{sums['group_id']}", wait_for=".member", size=(1280, 400)),
        Picture(
            name="question-4",
            place=f"#/run/masked/episode/{masked['episode_id']}?colour=mask&turn=0&token=1",
            wait_for=".token.chosen",
            scroll_to="main",
            size=(1280, 560),
        ),
    ]


def take(browser: Browser, address: str, picture: Picture) -> bytes:
    """One picture as PNG with a palette."""
    width, height = picture.size
    scheme: Any = "dark" if picture.dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address + picture.place)
    page.wait_for_selector(picture.wait_for)
    for label in picture.choose:
        page.get_by_label(label, exact=True).check()
    page.wait_for_load_state("networkidle") if "run" not in picture.place else page.wait_for_timeout(700)
    if picture.scroll_to:
        page.eval_on_selector(picture.scroll_to, "(element) => scrollTo(0, element.getBoundingClientRect().top + scrollY - 90)")
    if picture.hover:
        page.locator(picture.hover).nth(2).hover()
    page.wait_for_timeout(300)
    raw = page.screenshot()
    context.close()
    image = Image.open(io.BytesIO(raw)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small = io.BytesIO()
    image.save(small, format="PNG", optimize=True)
    return small.getvalue()


def main(folder: Path) -> int:
    """Make the runs and take the pictures; returns 1 if one of them is too large."""
    make_runs(folder)
    OUT.mkdir(exist_ok=True)
    large = 0
    with serve(folder) as served, launched() as browser:
        for picture in pictures(folder):
            data = take(browser, served.address, picture)
            (OUT / f"{picture.name}.png").write_bytes(data)
            large += len(data) > MOST_BYTES
            print(f"{len(data) / 1000:6.1f} kB  {picture.name}.png{'  TOO LARGE' if len(data) > MOST_BYTES else ''}", flush=True)
    return int(large > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(Path("runs/viewer")))
    finally:
        end_all()

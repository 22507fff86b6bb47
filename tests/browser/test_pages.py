"""Every view on a wide and on a narrow screen: nothing is cut off, axe finds nothing serious, and a picture is taken for people to look at.

The pictures go to the folder in the variable ``BROWSER_PICTURES``, else to a temporary one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.test_views import an_episode

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.browser.serving import Served

ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("AXE", "") or ROOT / ".venv-browser" / "node_modules" / "axe-core" / "axe.min.js")
SIZES = {1440: 900, 420: 860}
LEAST_BYTES = 5000
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("BROWSER_PICTURES", "") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def places(runs: Path) -> dict[str, tuple[str, str]]:
    """Name of a view -> its place, and what is there once it is drawn."""
    row, branching, tools = (an_episode(runs, name, turns=1) for name in ("calculator", "branching", "tools"))
    return {
        "runs": ("#/", "tr[data-run]"),
        "compare": ("#/compare?runs=calculator,negotiation", ".chart canvas"),
        "run": ("#/run/calculator", ".verdict, .sign"),
        "steps": ("#/run/calculator/steps", "tr[data-step]"),
        "step": ("#/run/calculator/step/5?metric=entropy", ".spike tr"),
        "episodes": ("#/run/calculator/episodes", "tr[data-episode]"),
        "episode": (f"#/run/calculator/episode/{row['episode_id']}?turn=0&token=1", ".token.chosen"),
        "tokens": (f"#/run/calculator/episode/{row['episode_id']}?form=tokens&colour=entropy", ".token.cell"),
        "mask": (f"#/run/calculator/episode/{row['episode_id']}?colour=mask", ".token"),
        "tools": (f"#/run/tools/episode/{tools['episode_id']}", ".lanes"),
        "branches": (f"#/run/branching/episode/{branching['episode_id']}", ".branches"),
        "group": (f"#/run/calculator/group/{row['group_id']}?colour=advantage", ".member"),
        "tasks": ("#/run/calculator/tasks", "tr[data-task]"),
        "task": (f"#/run/calculator/task/{row['task']['id']}", "tr[data-group]"),
        "evaluations": ("#/run/calculator/evaluations", ".before-after tr"),
        "evaluated": ("#/run/calculator/evaluations", ".before-after tr"),
        "settings": ("#/run/calculator/settings", "tbody tr"),
        "search": ("#/run/calculator/search?text=is", "tr[data-match]"),
        "sft": ("#/run/sft", ".chart canvas"),
        "samples": ("#/run/dpo/samples", "tr[data-sample]"),
        "sample": ("#/run/sft/sample/0", ".token"),
        "pair": ("#/run/dpo/sample/0?colour=logprob_after", ".token"),
        "judged-steps": ("#/run/process-reward-model/sample/0", ".token"),
        "missing": ("#/nothing", "h1"),
    }


def findings(page: Page) -> list[str]:
    """What axe has to say against the page, if it is serious."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate("axe.run(document, { resultTypes: ['violations'] }).then((found) => found.violations)")
    return [f"{each['id']}: {node['html'][:200]}" for each in found if each["impact"] in SERIOUS for node in each["nodes"][:3]]


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_whole_and_has_no_serious_finding(
    browser: Browser, served: Served, runs: Path, pictures: Path, width: int, scheme: Any
) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core: make test-browser installs it where there is npm")
    size: Any = {"width": width, "height": SIZES[width]}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)  # for axe
    page = context.new_page()
    wrong: list[str] = []
    for name, (place, wait_for) in places(runs).items():
        page.goto("about:blank")
        page.goto(served.address + place)
        page.wait_for_selector(wait_for)
        if name == "evaluated":
            page.locator(".before-after tbody tr td:first-child a").first.click()
            page.wait_for_selector(".pair .member")
        page.wait_for_timeout(200)
        beyond = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        wrong += [f"{name}: {beyond} pixels wider than the screen"] if beyond > 0 else []
        wrong += [f"{name}: {finding}" for finding in findings(page)]
        picture = page.screenshot(path=pictures / f"{name}-{width}-{scheme}.png")
        assert len(picture) > LEAST_BYTES, name
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    wrong += [f"keys: {finding}" for finding in findings(page)]
    context.close()
    assert not wrong, "\n".join(wrong)


def test_a_dialog_holds_the_focus_and_gives_it_back(page: Page) -> None:
    button = page.get_by_role("button", name="keys")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    for _ in range(6):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || document.querySelector('dialog').contains(document.activeElement)"
        assert page.evaluate(inside)
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert button.evaluate("(button) => button === document.activeElement")

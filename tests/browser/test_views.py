"""Each view on real recorded runs, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from agentrl.core.annotations import unpack
from tests.browser.conftest import RUNS, STEPS
from tests.browser.serving import serve
from tests.run_files import MadeRun

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Watched
    from tests.browser.serving import Served


def go(page: Page, place: str, wait_for: str) -> None:
    page.evaluate("(place) => { location.hash = place; }", place)
    page.wait_for_selector(wait_for)


def an_episode(runs: Path, name: str = "calculator", *, turns: int = 2) -> dict:
    """The last recorded training episode with so many turns."""
    lines = (runs / name / "trajectories.jsonl").read_text().splitlines()
    found = [
        row for row in map(json.loads, lines) if len(row["turns"]) >= turns and "eval_sampling" not in row and row["status"] == "finished"
    ]
    return found[-1]


def test_the_list_shows_each_run_and_leads_to_a_comparison(page: Page) -> None:
    rows = page.locator("tr[data-run]")
    assert rows.count() == RUNS
    first = page.locator("tr[data-run=calculator]")
    assert "finished" in first.inner_text()
    assert "envs/calculator.py" in first.inner_text()
    assert first.locator("svg.spark polyline").count() == 1
    page.get_by_label("Filter runs").fill("negotiation")
    assert rows.count() == 1
    page.get_by_label("Filter runs").fill("")
    page.get_by_label("compare calculator").check()
    page.get_by_label("compare negotiation").check()
    page.click("#compare")
    page.wait_for_selector(".differences")
    assert "--agent" in page.locator(".differences").inner_text()
    page.wait_for_selector(".chart[data-metric='reward/mean'] canvas")
    assert page.locator(".chart[data-metric='reward/mean'] .values .swatch").count() == 2


def test_curves_over_other_axes_and_a_point_that_leads_to_its_step(page: Page) -> None:
    go(page, "#/run/calculator", ".chart canvas")
    assert page.locator(".chart").count() == 6
    assert page.locator(".chart").first.get_attribute("data-metric") == "reward/mean"
    for axis in ("time", "tokens", "episodes", "steps"):
        page.get_by_label("axis").select_option(axis)
        page.wait_for_selector(".chart[data-metric='reward/mean'] canvas")
    page.get_by_label("Find a metric").fill("idle/learner")
    page.wait_for_selector(".chart[data-metric='idle/learner'] canvas")
    assert page.locator(".chart").count() == 1
    page.get_by_label("log y").check()
    page.get_by_label("log y").uncheck()
    area = page.locator(".chart[data-metric='idle/learner'] .u-over")
    area.hover()  # waits until the chart is drawn again
    box = area.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("h1:has-text('Step')")
    assert page.locator("h1").inner_text().startswith(f"Step {STEPS}")
    assert "metric=idle" in page.url


def test_a_step_shows_its_groups_rewards_times_and_tokens(page: Page) -> None:
    go(page, f"#/run/calculator/step/{STEPS - 1}", "tr[data-group]")
    groups = page.locator("table.groups").first.locator("tr[data-group]")
    assert groups.count() == 8
    assert groups.first.locator(".strip > *").count() == 4
    page.locator(".histogram button").first.click()
    page.wait_for_selector(".histogram button.on")
    assert 1 <= groups.count() <= 8
    page.locator(".histogram button.on").click()
    page.wait_for_selector("table.spike tr[data-token]")
    page.get_by_label("order of tokens").select_option("entropy")
    page.wait_for_selector("table.spike tr[data-token]")
    page.locator("table.spike tr[data-token] a").first.click()
    page.wait_for_selector(".token.chosen")
    assert page.locator("#figures [data-figure='logprob']").count() == 1
    assert page.locator("#figures [data-figure='advantage']").count() == 1
    go(page, "#/run/calculator/step/1", ".lane")
    lanes = {lane.splitlines()[0].split(" all")[0] for lane in page.locator(".lane").all_inner_texts()}
    assert {"learner", "train loop", "groups", "engine", "environment"} <= lanes


def test_an_episode_shows_every_figure_of_a_token(page: Page, runs: Path) -> None:
    row = an_episode(runs)
    go(page, f"#/run/calculator/episode/{row['episode_id']}", ".turn .token")
    assert page.locator(".turn").count() == len(row["turns"])
    assert "".join(page.locator(".turn").first.locator(".sampled .token").all_text_contents()) == row["turns"][0]["text"]
    place = page.locator(".turn").first.locator(".sampled .token").nth(1)
    place.hover()
    shown = dict(zip(page.locator("#figures tr").evaluate_all("(rows) => rows.map((row) => row.dataset.figure || 'probability')"),
                     page.locator("#figures tr td:last-child").all_inner_texts(), strict=True))  # fmt: skip
    assert float(shown["logprob"]) == pytest.approx(row["turns"][0]["logprobs"][1], rel=1e-3, abs=1e-6)
    assert {"learner", "difference", "ratio", "advantage", "entropy", "version", "staleness", "mask"} <= set(shown)
    place.click()
    page.wait_for_selector(".token.chosen")
    link = page.url
    assert "turn=0" in link
    assert "token=1" in link
    names = page.get_by_label("colour by").locator("option").evaluate_all("(options) => options.map((option) => option.value)")
    assert {"logprob", "ratio", "advantage", "entropy", "mask", "version", "staleness", "difference", "none"} <= set(names)
    for name in names:
        page.get_by_label("colour by").select_option(name)
        page.wait_for_function("(name) => location.hash.includes('colour=' + name)", arg=name)
        assert page.locator(".legend").count() == (name != "none")
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.wait_for_selector(".token.cell")
    assert page.locator(".given .token.cell").count() >= len(row["turns"][0]["prompt_ids"])
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(".token.chosen")
    assert page.locator(".token.chosen").get_attribute("data-token") == "1"
    commands = page.locator(".command-line code").all_inner_texts()
    assert any(text.startswith("agentrl replay ") and text.endswith(row["episode_id"]) for text in commands)
    assert any(text.endswith(f"envs/calculator.py --task {row['task']['id']}") for text in commands)


def test_tools_and_the_reset_are_beside_their_turn(page: Page, runs: Path) -> None:
    lines = (runs / "tools" / "trajectories.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if any("tool:" in span[0] for span in row["spans"]))
    go(page, f"#/run/tools/episode/{row['episode_id']}", ".turn .span.tool")
    name, turn, _, seconds = next(span for span in row["spans"] if span[0].startswith("tool:"))
    assert turn == 0
    words = page.locator(".turn").first.locator(".span").all_inner_texts()
    kinds = [text.split()[0] for text in words]
    assert kinds[:4] == ["reset", "generate", "step", name.removeprefix("tool:")]
    assert words[3].endswith(f"{1000 * seconds:.2g} ms")
    assert "reset" not in page.locator(".turn").nth(1).locator("footer").inner_text()
    assert "tools" in page.locator(".lanes").inner_text()
    go(page, "#/run/tools/step/1", ".lane")
    assert "tools" in page.locator(".lanes").inner_text()


def test_figures_that_are_coloured_differ_in_colour(page: Page, runs: Path) -> None:
    row = an_episode(runs)
    unlikely = min(range(len(row["turns"][0]["logprobs"])), key=row["turns"][0]["logprobs"].__getitem__)
    go(page, f"#/run/calculator/episode/{row['episode_id']}?colour=entropy", ".turn .token")
    colour = "(token) => getComputedStyle(token).backgroundColor"
    colours = page.locator(".turn").first.locator(".sampled .token").evaluate_all(f"(tokens) => tokens.map({colour})")
    assert len(set(colours)) > 1
    go(page, f"#/run/calculator/episode/{row['episode_id']}?colour=logprob&turn=0&token={unlikely}", ".token.chosen")
    assert page.locator(".token.chosen").evaluate(colour) != page.locator("body").evaluate(colour)


def test_an_episode_is_copied_as_json_with_its_command(page: Page, runs: Path) -> None:
    row = an_episode(runs)
    go(page, f"#/run/calculator/episode/{row['episode_id']}", ".turn")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy as JSON").click()
    page.get_by_role("button", name="copied").wait_for()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert [record["turns"][0]["token_ids"] for record in copied["records"]] == [row["turns"][0]["token_ids"]]


def test_agents_of_one_episode_are_side_by_side(page: Page, runs: Path) -> None:
    lines = (runs / "negotiation" / "trajectories.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if row["agent"] == "bob" and row["turns"])  # ann spoke before
    go(page, f"#/run/negotiation/episode/{row['episode_id']}", ".turn")
    places = page.locator(".turn").evaluate_all("(turns) => turns.map((turn) => turn.getBoundingClientRect().left)")
    assert len(set(places)) == 2
    assert {"ann", "bob"} <= set(page.locator(".message .role").all_inner_texts())
    page.get_by_role("button", name="agents side by side").click()
    page.wait_for_function("new Set([...document.querySelectorAll('.turn')].map((turn) => turn.getBoundingClientRect().left)).size === 1")


def test_branches_are_a_tree_with_reasons_and_what_is_trained(page: Page, runs: Path) -> None:
    row = an_episode(runs, "branching", turns=4)
    go(page, f"#/run/branching/episode/{row['episode_id']}", ".branches")
    text = page.locator(".branches").first.inner_text()
    for reason in ("forked", "sub-agent", "not selected", "trained here"):
        assert reason in text
    everything = page.locator(".turn").count()
    page.locator(".branches button").last.click()
    page.wait_for_selector(".branches button.on")
    assert 1 <= page.locator(".turn").count() < everything


def test_a_group_shows_its_members_from_where_they_differ(page: Page, runs: Path) -> None:
    row = an_episode(runs)
    go(page, f"#/run/calculator/group/{row['group_id']}", ".member")
    assert page.locator(".member").count() == 4
    assert re.search(r"differ from turn \d+, token \d+|do not differ", page.locator("#difference").inner_text())
    page.locator(".member header a").first.click()
    page.wait_for_selector("h1:has-text('Episode')")


def test_tasks_are_ranked_and_a_task_shows_its_groups(page: Page) -> None:
    go(page, "#/run/calculator/tasks", "tr[data-task]")
    page.get_by_role("button", name="most improved").click()
    page.wait_for_function("location.hash.includes('sort=improved')")
    page.locator("tr[data-task] a").first.click()
    page.wait_for_selector("tr[data-group]")
    assert page.locator("h1").inner_text().startswith("Task")


def test_evaluations_show_each_task_before_and_after(page: Page) -> None:
    go(page, "#/run/calculator/evaluations", ".before-after tbody tr")
    assert page.locator(".before-after tbody tr").count() == 12
    assert next(text for text in page.locator(".before-after th").all_inner_texts() if text.startswith("step")) == "step 0"
    page.wait_for_selector(".chart canvas")


def test_a_task_is_read_before_and_after_the_training(page: Page, runs: Path) -> None:
    go(page, "#/run/calculator/evaluations", ".before-after tbody tr")
    page.locator(".before-after tbody tr td:first-child a").first.click()
    page.wait_for_selector(".pair .member .token")
    lines = (runs / "calculator" / "eval_trajectories.jsonl").read_text().splitlines()
    task = page.locator("h1 .mono").inner_text()
    rows = [row for row in map(json.loads, lines) if row["task"]["id"] == task]
    for side, step in ((0, 0), (1, STEPS)):
        members = page.locator(".pair > section").nth(side)
        texts = [row["turns"][0]["text"] for row in rows if row["eval_sampling"]["name"] == f"eval-{step}"]
        assert members.locator(".member").count() == len(texts) == 4
        assert members.locator(".member").first.locator(".sampled").first.inner_text() == texts[0]
    page.get_by_label("after").select_option(str(STEPS // 2))
    page.wait_for_function("(step) => location.hash.includes(`after=${step}`)", arg=STEPS // 2)
    page.wait_for_selector(f".pair h2:has-text('step {STEPS // 2}')")
    page.keyboard.press("n")
    page.wait_for_function("(task) => ![null, undefined, task].includes(document.querySelector('h1 .mono')?.innerText)", arg=task)
    page.locator(".pair .member header a").first.click()
    page.wait_for_selector("h1:has-text('Episode eval-')")
    assert "agentrl replay" in page.locator(".command-line").nth(1).inner_text()
    go(page, "#/run/calculator/episodes", "tr[data-episode]")
    assert "eval-" not in page.locator("table.episodes").inner_text()
    page.get_by_label("source").select_option("eval-0")
    page.wait_for_selector("tr[data-episode] .tag:has-text('eval-0')")


def test_settings_show_what_differs_from_the_defaults(page: Page) -> None:
    go(page, "#/run/calculator/settings", "tbody tr")
    text = page.locator("main").inner_text()
    assert "--flat-groups resample" in text
    assert "trajectories.jsonl" in text


def test_episodes_are_filtered_sorted_and_searched(page: Page, runs: Path) -> None:
    go(page, "#/run/calculator/episodes", "tr[data-episode]")
    page.get_by_role("button", name="reward").click()
    page.wait_for_function("location.hash.includes('sort=')")
    page.wait_for_selector("tr[data-episode]")
    task = an_episode(runs)["task"]["id"]
    go(page, f"#/run/calculator/episodes?task={task}", f"tr[data-episode] td[title='task {task}']")
    page.fill("#search", '"tool"')
    page.press("#search", "Enter")
    page.wait_for_selector("tr[data-match] mark")
    assert page.locator("tr[data-match] mark").first.inner_text() == '"tool"'
    page.locator("tr[data-match] a").first.click()
    page.wait_for_selector(".turn .found")


def test_the_page_is_used_by_keyboard(page: Page) -> None:
    page.keyboard.press("?")
    page.wait_for_selector(".dialog")
    assert "next row" in page.locator(".dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector(".dialog", state="detached")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".command")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("t")
    go(page, "#/run/calculator", "#search")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_nothing_is_cut_off_at_150_percent(page: Page, runs: Path) -> None:
    page.set_viewport_size({"width": 853, "height": 533})  # what 1280 by 800 leaves at 150 %
    places = ("#/", "#/run/calculator", f"#/run/calculator/step/{STEPS}", f"#/run/calculator/episode/{an_episode(runs)['episode_id']}")
    for place in (*places, "#/run/calculator/tasks", "#/run/calculator/evaluations", "#/run/calculator/episodes"):
        go(page, place, "main > *")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place


def test_every_route_wants_the_token_and_a_name_of_this_machine(served: Served) -> None:
    root, _, token = served.address.rstrip("/").rpartition("/")
    routes = ("", "static/main.js", "api/runs", "api/run/calculator", "api/run/calculator/record/0-0-0", "nothing")
    for route in routes:
        assert httpx.get(f"{root}/{route}").status_code == 401
        assert httpx.get(f"{root}/{token[:-1]}x/{route}").status_code == 401
        assert httpx.get(f"{root}/{token}/{route}", headers={"Host": "example.org"}).status_code == 403
        assert httpx.post(f"{root}/{token}/{route}").status_code == 405
    assert httpx.get(f"{root}/{token}/api/runs").status_code == 200


def test_a_run_on_given_data_shows_its_losses_and_the_tokens_of_its_rows(page: Page, runs: Path) -> None:
    first = page.locator("tr[data-run=sft]")
    assert "sft" in first.locator(".tag").all_inner_texts()
    assert "loss" in first.inner_text()
    go(page, "#/run/sft", ".chart[data-metric='loss'] canvas")
    assert page.locator(".chart[data-metric='loss'] .values .swatch").count() == 2  # training and held-out rows
    assert page.locator(".top nav a").all_inner_texts() == ["Curves", "Rows", "Settings"]
    page.get_by_role("link", name="16 recorded rows").click()
    page.wait_for_selector("tr[data-sample]")
    assert page.locator("tr[data-sample]").count() == 16
    page.locator("tr[data-sample] a").first.click()
    page.wait_for_selector(".token")
    lines = [json.loads(line) for line in (runs / "sft" / "rows.jsonl").read_text().splitlines()]
    row, before, after = (line for line in lines if line["row"] == 0)
    trained = page.locator(".token:not(.same)")
    assert trained.count() == len(row["sequences"][0]["trained"])
    trained.first.hover()
    page.wait_for_selector("#figures [data-figure='loss_change']")
    shown = [float(page.locator(f"#figures [data-figure='loss_{when}'] td").last.inner_text()) for when in ("before", "after")]
    losses = [unpack(line["sequences"][0]["loss"], trained.count())[0] for line in (before, after)]
    assert shown == pytest.approx(losses, rel=1e-3)
    page.keyboard.press("n")
    page.wait_for_selector("h1:has-text('Row 2')")
    go(page, "#/run/dpo/sample/0", ".pair .token")
    assert page.locator(".turn header b").first.inner_text() == "chosen"
    assert page.locator(".turn header").nth(1).inner_text().startswith("rejected")


def test_the_list_of_episodes_shows_prompt_label_and_answer(page: Page, runs: Path) -> None:
    row = an_episode(runs, "tools", turns=1)
    go(page, f"#/run/tools/episodes?text={row['episode_id']}", f"tr[data-episode='{row['episode_id']}']")
    cells = page.locator("tr[data-episode]").first
    prompt = row["task"]["prompt"]
    assert (prompt if isinstance(prompt, str) else prompt[-1]["content"])[:40].strip() in cells.inner_text()
    assert row["turns"][-1]["text"][:20].strip() in cells.inner_text()
    assert cells.locator("td.label").inner_text() == f"{row['task']['literals']['label']} tuple"  # which JSON does not know


def test_an_episode_shows_one_role_and_folds_long_observations(watched: Watched, tmp_path: Path) -> None:
    page = watched.page
    run = MadeRun(tmp_path / "runs" / "long")
    run.group(1, members=1, text="short")
    run.close()
    path = run.folder / "trajectories.jsonl"
    record = json.loads(path.read_text())
    observed = "\n".join(f"line {number}" for number in range(400))
    record["turns"][1]["prompt_text"] = f"<|tool|>{observed}<|end|><|user|>Go on.<|end|><|assistant|>"
    path.write_text(json.dumps(record) + "\n")
    (run.folder / "trajectories.index.jsonl").unlink()
    with serve(tmp_path / "runs") as served:
        page.goto(f"{served.address}#/run/long/episode/0-0-0")
        page.wait_for_selector(".fold")
        assert "line 300" not in page.locator("main").inner_text()
        page.locator(".fold").first.click()
        assert "line 399" in page.locator("main").inner_text()
        page.get_by_label("role").select_option("tool")
        page.wait_for_function("location.hash.includes('role=tool')")
        assert page.locator(".message.given .role").all_inner_texts() == ["tool"]
        assert page.locator(".sampled").count() == 0
        assert page.locator("pre.text").first.get_attribute("dir") == "auto"  # as its own letters are written


def test_a_healthy_run_has_a_verdict_and_an_unknown_page_says_so(page: Page, served: Served) -> None:
    go(page, "#/run/calculator", ".note.verdict")
    assert page.locator(".note.verdict").inner_text().startswith(("This run learns.", "No fault was found."))
    go(page, "#/nothing/here", "h1:has-text('Not found')")
    assert "#/nothing/here" in page.locator("main").inner_text()
    go(page, "#/run/calculator/nothing", "h1:has-text('Not found')")
    answer = httpx.get(f"{served.address}nothing", headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "Not found" in answer.text


SEEN = """() => {
  const fill = CanvasRenderingContext2D.prototype.fillText;
  window.marks = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.marks.push(text);
    return fill.call(this, text, ...rest);
  };
}"""


def test_steps_are_whole_numbers_and_tables_fill_the_width(page: Page) -> None:
    go(page, "#/run/negotiation", ".chart canvas")
    page.evaluate(SEEN)
    go(page, "#/run/negotiation?find=episode/count", ".chart[data-metric='episode/count'] canvas")
    page.wait_for_function("window.marks.includes('1')")
    page.wait_for_timeout(300)
    assert [text for text in page.evaluate("window.marks") if text in ("1.2", "1.25", "1.5")] == []
    for place, table in (("#/", "table"), ("#/run/calculator/episodes", "table.episodes"), ("#/run/calculator/steps", "table")):
        go(page, place, f"main {table} tbody tr")
        wide = "(table) => table.offsetWidth >= 0.95 * document.querySelector('main').clientWidth - 30"
        assert page.locator(f"main {table}").first.evaluate(wide), place

"""The pages of the documentation as a whole: links, flags, commands, paths, and the way there from the README."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.algo.plan import built_in_options
from agentrl.cli.main import COMMANDS, GROUPS
from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.load import aliases
from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.config.translate import systems
from agentrl.core.settings import flag
from tests import migration_tables

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tune").glob("*.md")])
NAMES = [page.name for page in PAGES]
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)
FOREIGN = {
    "--train.async_enable",  # of OpenRLHF, on the page that compares
    "--sample",  # phases of `iterate`, before a dot
    "--train",
    "--my-tau",  # an option of a loss of the page, and a flag that CONTRIBUTING adds as an example
    "--max-patience",
    "--network",
    "--rm",
    "--head",
    "--address",
    "--num-cpus",
    "--kill-after",
    "--nodes",
    "--shm-size",
    "--stop-timeout",
    "--part",  # of `python -m tests.mutants`
    "--help",
    "--logdir",
    "--no-deps",
    "--version",
    "--dry-run",
    "--accept-changed-inputs",
    "--config",
}
"""Flags of other programs, and those of the command line itself."""


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", text(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for target in LINK.findall(CODE.sub("", text(page))):
        path, _, anchor = target.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {path.name}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        waiting += [path for path, _ in links(page) if path.suffix == ".md" and path not in reached]
    assert set(PAGES) <= reached


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of every command: the fields of the settings, and of the arguments of the modules behind the commands."""
    known = (
        {flag(name) for name in settings_of(TrainConfig.schema({}))}
        | {flag(name) for name in built_in_options()}
        | set(aliases(EvaluateConfig, "eval"))
        | {alias for method in METHODS.values() for alias in aliases(method.config, method.command)}
        | FOREIGN
        | {"--completion"}
        | {word for system in systems().values() if system.flags for word in (*system.words, *system.tune, *system.renamed)}
        | {word for system in systems().values() if system.flags for words in system.quantities.values() for word in words}
        | set(aliases(TrainConfig.schema({})))
    )
    for module in {name.partition(":")[0] for name, _ in COMMANDS.values()} | {
        "agentrl.check.context",
        "agentrl.config.tune",
        "agentrl.config.evaluate",
        "agentrl.check.findings",
        "agentrl.cli.certify",
        "agentrl.config.iterate",
    }:
        for value in vars(importlib.import_module(module)).values():
            if dataclasses.is_dataclass(value):
                known |= {flag(field.name) for field in dataclasses.fields(value)}
            if isinstance(value, argparse.ArgumentParser):
                known |= set(value._option_string_actions)
    known.add("--focus")  # of examples/own_loss.py
    return known | {name.replace("--", "--no-", 1) for name in known}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "configuration.md"], ids=lambda page: page.name)
def test_flags_exist(page: Path, flags: set[str]) -> None:
    of_others = page.stem in migration_tables.PAGES
    theirs = re.sub(r"^\|[^|]*\|", "", text(page), flags=re.MULTILINE) if of_others else text(page)
    theirs = re.sub(r"`--[a-z]+_[a-z_]+`|--[a-z_]+\.[a-z_.]+", "", theirs) if of_others else theirs
    theirs = re.sub(r"-m tests\.[^`\n]*", "", theirs)  # the benchmarks have flags of their own
    used = {word.replace("_", "-") for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", theirs)}
    assert used <= flags, f"{page.name}: {sorted(used - flags)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_paths_exist(page: Path) -> None:
    content = text(page)
    lines = "\n".join(re.findall(r"^(?: {4}|\$ |agentrl|\.venv).*", content, re.MULTILINE))
    for command in re.findall(r"(?:^|[`$/ ])agentrl ([a-z]+(?:-[a-z]+)*)(?= |`|$)", lines):
        assert command in COMMANDS, f"{page.name}: agentrl {command}"
    for path in re.findall(r"\b((?:agentrl|tests|envs|examples|requirements)/[\w/.-]+\.\w+)", content):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize(("title", "fewest", "most"), [("From task to gradient", 20, 27), ("From row to gradient", 10, 14)])
def test_the_way_to_a_gradient_is_listed_whole_and_is_short(title: str, fewest: int, most: int) -> None:
    page = text(ROOT / "docs" / "architecture.md")
    section = page[page.index(f"## {title}") :].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| \[`([\w/.]+)`\]\(\.\./(agentrl/[\w/]+\.py)\) \| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert fewest <= len({path for _, _, path, _, _ in rows}) == len(rows) <= most
    assert f"the {len(rows)} files" in section
    for _, shown, path, name, _ in rows:
        assert path == f"agentrl/{shown}"
        assert re.search(rf"(?:def|class) {name}\b", text(ROOT / path)), f"{path} has no {name}"
    for path in re.findall(r"`([a-z]+/[\w/]+\.py)`", section):
        assert (ROOT / "agentrl" / path).is_file(), path


def test_every_package_is_on_the_map() -> None:
    packages = {path.parent.name for path in (ROOT / "agentrl").glob("*/__init__.py")} - {"assets"}
    for page, form in (("docs/architecture.md", r"^ +(\w+)/ "), ("CONTRIBUTING.md", r"(\w+)(?=[,;\n])")):
        assert packages <= set(re.findall(form, text(ROOT / page), re.MULTILINE)), page


def test_the_readme_lists_the_commands() -> None:
    assert set(re.findall(r"^\| `agentrl ([\w-]+)[^|]*\|", text(ROOT / "README.md"), re.MULTILINE)) == set(COMMANDS)


def test_ready_made_environments_are_in_the_table() -> None:
    table = text(ROOT / "docs" / "environments.md").split("## Ways to bring an environment")[1]
    assert {path.name for path in (ROOT / "envs").glob("*.py")} <= set(re.findall(r"envs/(\w+\.py)", table))


def test_the_first_screen_of_the_readme_is_short_and_has_what_it_promises() -> None:
    first = text(ROOT / "README.md").split("\n## Contents")[0]
    assert len(first.splitlines()) <= 60
    for part in ("make demo", "docs/reward.png", "agentrl check examples/broken.py", "docs/viewer/", "(AgentInstance)", "Status:"):
        assert part in first, part


def test_the_readme_groups_the_commands_as_the_help_does() -> None:
    section = text(ROOT / "README.md").split("## Commands")[1].split("\n## ")[0]
    tables = re.findall(r"^\| (\w+) \| purpose \|\n\|---\|---\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    shown = {title.capitalize(): tuple(re.findall(r"^\| `agentrl ([\w-]+)", rows, re.MULTILINE)) for title, rows in tables}
    assert shown == GROUPS


def test_every_fact_about_another_system_has_its_page() -> None:
    rows = [line for line in text(ROOT / "docs" / "comparison.md").splitlines() if line.startswith("| ")]
    others = [row for row in rows if not row.startswith(("| agentrl ", "| system "))]
    assert len(others) == 13
    for row in others:
        name, *cells = row.strip("| ").split(" | ")
        assert all("](https://" in cell or cell == "not found in its pages" for cell in cells), name
    assert "so no row claims a speed there" in " ".join(text(ROOT / "docs" / "comparison.md").split())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    first = re.sub(r"<!--.*?-->", "", text(page), flags=re.DOTALL).split("\n\n")[1].strip()
    assert not first.startswith(("```", "    ", "|", "#", "!")), first

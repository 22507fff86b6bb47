"""A list of all metrics with their meaning: for the documentation, the groups of TensorBoard and W&B, and tools that show a run."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

ELSEWHERE = "other"
"""Section of metrics that the list does not have, such as those of a user's callback."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or a family of metrics whose names have ``<...>`` where they differ."""

    name: str
    section: str
    text: str

    def matches(self, name: str) -> bool:
        """Return True if `name` is this metric, or one of this family; ``<k>`` stands for a number."""
        parts = [r"\d+" if part == "<k>" else ".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.name)]
        return re.fullmatch("".join(parts), name) is not None

    @property
    def certainty(self) -> int:
        """Characters of the name that are the same in the whole family."""
        return len(re.sub(r"<\w+>", "", self.name))


@dataclass(frozen=True, slots=True)
class Glossary:
    """Every metric by section, and those that tell whether a run learns."""

    titles: dict[str, str]  # section -> heading, in the order of the page
    metrics: tuple[Metric, ...]
    watch: tuple[str, ...]  # the six to look at first
    _found: dict[str, Metric | None] = field(default_factory=dict, repr=False, compare=False)  # by name: every step asks for the same

    def find(self, name: str) -> Metric | None:
        """Return the metric called `name`, else the closest family that it belongs to, else None."""
        if name not in self._found:
            matching = (metric for metric in self.metrics if metric.matches(name))
            self._found[name] = max(matching, key=lambda metric: metric.certainty, default=None)
        return self._found[name]

    def grouped(self, name: str) -> str:
        """Return the name under which services group the metric: as it is if it has a group, else with its section before it."""
        if "/" in name:
            return name
        found = self.find(name)
        return f"{found.section if found else ELSEWHERE}/{name}"


@cache
def glossary() -> Glossary:
    """Read the list that ships with the package."""
    content = tomllib.loads((files("agentrl.track") / "metrics.toml").read_text(encoding="utf-8"))
    watch = tuple(content.pop("watch"))
    titles = {section: entries.pop("title") for section, entries in content.items()}
    metrics = tuple(Metric(name, section, text) for section, entries in content.items() for name, text in entries.items())
    return Glossary(titles, metrics, watch)

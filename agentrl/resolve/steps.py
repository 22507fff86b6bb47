"""Settings on their way to a plan, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from agentrl.config.sections import changed

P = TypeVar("P")

GIVEN = ("flag", "python", "file")
"""Sources that are somebody's word; all others are decisions."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[P]):
    """Settings after some steps of a plan.

    Attributes:
        settings: The settings now.
        sources: Where each setting that does not have its plain default comes from, by name: ``"flag"``, ``"python"``, ``"file"``, or what
            a step took it from: ``"model"``, ``"optimizer"``, ``"machine"``, ``"run"`` (the run that goes on), ``"settings"`` (others).
    """

    settings: P
    sources: Mapping[str, str]

    def follow(self, source: str, settings: P) -> Steps[P]:
        """Return the state after a step that made these settings of what `source` says."""
        return Steps(settings, {**self.sources, **dict.fromkeys(names_that_differ(self.settings, settings), source)})

    def fill(self, source: str, **values: Any) -> Steps[P]:
        """Return the state after a step that filled in settings which nobody gave."""
        return self.follow(source, changed(self.settings, **{name: value for name, value in values.items() if name not in self.sources}))

    def rewrite(self, settings: P) -> Steps[P]:
        """Return the state after a step that says the same otherwise, as an absolute path does; sources stay."""
        return Steps(settings, self.sources)


def names_that_differ(before: Any, after: Any) -> Iterator[str]:
    """Yield the names of the settings, and of the options of algorithms, in which two settings of a command differ."""
    for section in fields(before):
        first, second = getattr(before, section.name), getattr(after, section.name)
        if first is second or not is_dataclass(first):
            continue
        for item in fields(first):
            old, new = getattr(first, item.name), getattr(second, item.name)
            if isinstance(old, Mapping):
                yield from (name for name in {*old, *new} if old.get(name) != new.get(name))
            elif old != new:
                yield item.name

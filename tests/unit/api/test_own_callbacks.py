"""Callbacks given to ``agentrl.train`` as classes and objects."""

from __future__ import annotations

import pytest

from agentrl import Callback, ConfigError, StepEnd
from agentrl.api.settings import own_callbacks


class Follows(Callback):
    def __init__(self, name: str = "") -> None:
        self.name = name

    def on_step_end(self, event: StepEnd) -> None:
        return None


class Needs(Follows):
    def __init__(self, name: str) -> None:
        super().__init__(name)


def test_classes_and_objects_are_told_apart_from_files() -> None:
    made = Needs("a")
    settings, own = own_callbacks({"num_steps": 2, "callback": [Follows, "file.py:Name", made]})
    assert (settings, own) == ({"num_steps": 2, "callback": ("file.py:Name",)}, [Follows, made])
    assert own_callbacks({"callback": made}) == ({"callback": ()}, [made])
    assert own_callbacks({"num_steps": 2}) == ({"num_steps": 2}, [])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Needs, "Needs.__init__ must work without arguments"),
        (3, "int has no method of a callback"),
        (lambda event: None, "is a function, not a class"),
    ],
)
def test_what_cannot_follow_a_run_is_refused(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        own_callbacks({"callback": [value]})

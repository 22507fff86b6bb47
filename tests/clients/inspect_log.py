"""Writes a log of the real Inspect, without a model and without the network: ``python inspect_log.py FOLDER eval|json``.

Two samples: one is asked with an image and calls a tool, the other is answered at once, and wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
QUESTION = "What is 2+3? <script>alert(1)</script>"


@tool
def add() -> Any:
    async def execute(a: int, b: int) -> str:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return str(a + b)

    return execute


@modelapi(name="written")
class Written(ModelAPI):
    """Answers that were written before."""

    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name)
        self._answers: Iterator[ModelOutput] = iter(
            [
                ModelOutput.for_tool_call("written", "add", {"a": 2, "b": 3}),
                ModelOutput.from_content("written", "5"),
                ModelOutput.from_content("written", "3"),
            ]
        )

    async def generate(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return next(self._answers)

    async def count_tokens(self, *args: Any, **kwargs: Any) -> int:
        return 1


def main(folder: str, form: str) -> None:
    picture = [ChatMessageUser(content=[ContentText(text=QUESTION), ContentImage(image=IMAGE)])]
    samples = [Sample(id="a", input=picture, target="5"), Sample(id="b", input="What is 1+1?", target="2")]
    solver = [system_message("Be brief."), use_tools(add()), generate()]
    task = Task(name="sums", dataset=samples, solver=solver, scorer=match())
    eval(task, model="written/model", log_dir=folder, log_format=form, max_samples=1, display="none")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs on given data that are killed at chosen moments, forked from a process that has the libraries loaded."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.forks import Forks, serve

FORKS = Forks(__name__)

MOMENTS: dict[str, tuple[str, str, str, int]] = {
    # module, function, before it, halfway through the line that it writes or after it, and the number of the call
    "its directory is there": ("agentrl.tune.run", "open_directory", "after", 1),
    "rows are encoded": ("agentrl.tune.prepare", "Encoder.encode", "after", 1),
    "it writes the model before training as the best": ("agentrl.learner.export", "copy_processor", "after", 1),
    "it records rows": ("agentrl.tune.learner_rows", "encode", "after", 3),
    "it trains the first step": ("agentrl.learner.plain.backend", "PlainEngine.accumulate", "after", 1),
    "it writes a line of metrics": ("agentrl.track.jsonl", "JsonLines.write", "halfway", 3),
    "it evaluates": ("agentrl.learner.step", "TrainingStep.evaluate", "after", 3),
    "it begins a checkpoint": ("agentrl.tune.loop", "save_checkpoint", "before", 1),
    "it writes a checkpoint": ("agentrl.learner.checkpoint", "generator_states", "before", 1),
    "a checkpoint is written, and has no manifest": ("agentrl.tune.loop", "save_checkpoint", "after", 1),
    "a checkpoint is complete": ("agentrl.tune.loop", "commit_directory", "after", 1),
    "it puts a better model in the place of the best": ("agentrl.core.files", "shutil.rmtree", "before", 1),
    "it removes an older checkpoint": ("agentrl.tune.loop", "remove_directory", "before", 1),
    "it writes the last figures of rows": ("agentrl.tune.learner_rows", "RowRecorder.end", "before", 1),
    "it writes the model": ("agentrl.learner.export", "copy_processor", "after", 1),
    "the model is written": ("agentrl.learner.plain.backend", "PlainEngine.close", "before", 1),
    "it writes its summary": ("agentrl.track.summary", "encode_indented", "after", 1),
}
"""Moments of a run in their order, so that one that is resumed after each kill comes to the next one."""


def run(words: Sequence[str], moment: str, limit_s: float) -> tuple[int | None, str]:
    """Run ``agentrl`` with these words, and kill it at a moment of `MOMENTS`; at none if it is empty.

    Returns:
        Its exit code, negative if a signal ended it; what it wrote.
    """
    with tempfile.NamedTemporaryFile() as output:
        order = {"words": list(words), "moment": moment, "input": os.devnull, "output": output.name}
        code = FORKS.run(order, limit_s)
        return code, Path(output.name).read_text(encoding="utf-8", errors="replace")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(module: str, path: str, when: str, number: int) -> None:
    """Have this process killed at a call of a function."""
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    act: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def armed(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < number:
            return act(*args, **named)
        if when == "halfway":
            lines, line = args
            lines._file.write(line[: len(line) // 2])
            lines._file.flush()
        elif when == "after":
            act(*args, **named)
        return _kill()

    setattr(owner, name, armed)


def _work(order: dict[str, Any]) -> int:
    from agentrl.cli.main import main

    if order["moment"]:
        _arm(*MOMENTS[order["moment"]])
    sys.argv[:] = ["agentrl", *order["words"]]
    return main(order["words"])


def _load() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    import torch._dynamo

    import agentrl.learner.learner
    import agentrl.learner.plain.backend
    import agentrl.tune.loop
    import agentrl.tune.run  # noqa: F401
    from agentrl.assets import tiny_model_path
    from agentrl.core.tokenizers import load_tokenizer

    # Loading also imports what the libraries import at first use. Nothing is differentiated, for which torch would start threads.
    AutoModelForCausalLM.from_pretrained(tiny_model_path())
    load_tokenizer(str(tiny_model_path()))


if __name__ == "__main__":
    serve(_load, _work)

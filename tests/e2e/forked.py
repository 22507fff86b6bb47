"""The process that runs of tests are forked from: it has loaded PyTorch, DeepSpeed and any vLLM, which takes longer than most runs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forks import Forks, serve

FORKS = Forks(__name__)


def run(words: Sequence[str], env: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run ``agentrl`` with these words.

    Returns:
        Its exit code, None if it was killed after `limit_s` seconds; what it wrote.
    """
    with tempfile.NamedTemporaryFile() as output:
        order = {"words": list(words), "env": {**os.environ, **env}, "input": os.devnull, "output": output.name}
        code = FORKS.run(order, limit_s)
        return code, Path(output.name).read_text(encoding="utf-8", errors="replace")


def _work(order: dict[str, Any]) -> int:
    from agentrl.cli.main import main

    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv[:] = ["agentrl", *order["words"]]
    return main(order["words"])


def _load() -> None:
    from agentrl.engine.settings import prepare_environment, without_gc

    prepare_environment("cpu")
    with without_gc():
        import deepspeed  # noqa: F401

        with contextlib.suppress(ModuleNotFoundError):  # where it is not installed, runs take the engine of transformers
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

        import agentrl.api.training
        import agentrl.engine.vllm_engine
        import agentrl.learner.learner  # noqa: F401


if __name__ == "__main__":
    serve(_load, _work)

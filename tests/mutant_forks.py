"""Runs tests of a copy of the project in processes that are forked from one that has the libraries loaded, which saves their import."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.forks import Forks, kill_group, serve

LIBRARIES = (
    *("deepspeed", "hypothesis.strategies", "numpy", "peft", "psutil"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "verl.trainer.ppo.core_algos"),
    *("vllm.distributed.weight_transfer.factory", "vllm.model_executor.layers.utils", "vllm.model_executor.model_loader.reload"),
)


def run_tests(forks: Forks, copy: Path, tests: tuple[str, ...], limit_s: float) -> tuple[int | None, str]:
    """Return the exit code of pytest, `None` if it was killed after `limit_s` seconds, and the end of its output."""
    with tempfile.NamedTemporaryFile() as output:
        order = {"input": os.devnull, "output": output.name, "copy": str(copy), "tests": tests}
        return forks.run(order, limit_s), Path(output.name).read_text(errors="replace")[-4000:]


def _load() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _work(order: dict[str, Any]) -> int:
    import pytest

    copy, project = order["copy"], os.getcwd()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agentrl", "tests")]:
        del sys.modules[name]
    sys.path[:] = [copy, *(path for path in sys.path if os.path.abspath(path or ".") != project)]
    os.chdir(copy)
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *order["tests"]])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(_load, _work, after=kill_group)

"""Recording of cases: each is run with its parts stood in for, and what they received is written down."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agentrl.cli.main import main as run_command
from agentrl.engine.settings import without_gc
from tests.golden.cases import Case
from tests.golden.compare import without_sources
from tests.golden.edges import METHODS, recorded_edges, tool_edges
from tests.golden.machines import MACHINES, simulated
from tests.golden.recording import Recorded, Recording
from tests.golden.values import Masks, flat, plain
from tests.golden.world import ROOT, TINY, build_world, clear_runs

DRY = "--dry-run"
WITH_DRY_RUN = {"train", "eval", "sample", "iterate", *METHODS}
"""Commands with ``--dry-run``."""
DRY_ONLY = {"iterate"}
"""Commands of which nothing but ``--dry-run`` is recorded, because they start others."""
OF_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK"}
"""Environment variables that other packages set when they are first imported."""
SHOWING = {"plan"}
"""Commands of which the output is the result."""


class Recorder:
    """Records cases, one after the other, in a folder of its own that `close` removes."""

    def __init__(self) -> None:
        with without_gc():  # what is imported here stays
            import agentrl.cluster.ray_actors
            import agentrl.learner.attention
            import agentrl.weights.cuda  # noqa: F401
        self._root = Path(tempfile.mkdtemp(prefix="golden-"))
        self.work = build_world(self._root)
        places = {str(self.work): "WORK", str(self._root): "SIMULATED", str(ROOT): "ROOT", sys.prefix: "VENV"}
        self._masks = Masks(places | {str(Path(path).resolve()): name for path, name in places.items()})

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._root, ignore_errors=True)

    def record(self, case: Case) -> dict[str, Any]:
        """Return what a case received, said and wrote, in JSON's own types."""
        clear_runs(self.work)
        with self._prepared(case):
            return self._looped(case) if case.words[0] == "loop" else self._command(case)

    def _command(self, case: Case) -> dict[str, Any]:
        """Return what ``--dry-run`` of a command says, if it has one, and what the command does."""
        result: dict[str, Any] = {}
        shown: Any = None
        if case.words[0] in WITH_DRY_RUN and "--help" not in case.words:
            result["dry_run"], shown = self._dry_run(case)
        if case.words[0] not in DRY_ONLY:
            ran, written = self._run(case.words, case.machine, case.deaths)
            result |= ran
            if shown is not None and written is not None:
                result["dry_run"]["differs"] = differences(shown, written)
            shown = shown if written is None else written
        return result if shown is None else {**result, "config": shown}

    @contextmanager
    def _prepared(self, case: Case) -> Iterator[None]:
        """Write the files of a case, run the commands before it, and simulate its machine within the block."""
        here = Path.cwd()
        for name, text in case.files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text(text, encoding="utf-8")
        os.chdir(self.work)
        try:
            for words in case.before:
                begun_on = case.begun_on or case.machine
                with self._machine(begun_on):
                    self._run(words, begun_on)
                self._interrupt_runs()
            with self._machine(case.machine):
                yield
        finally:
            os.chdir(here)
            for name in case.files:
                (self.work / name).unlink()

    @contextmanager
    def _machine(self, name: str) -> Iterator[None]:
        with simulated(MACHINES[name], self._root), patch.dict("agentrl.core.paths._typed", {}, clear=True):
            yield

    def _dry_run(self, case: Case) -> tuple[dict[str, Any], Any]:
        """Return what ``--dry-run`` says, and the settings that it prints."""
        words = case.words if DRY in case.words else (*case.words, DRY)
        with recorded_edges(Recording(self._masks), MACHINES[case.machine]):
            code, output, errors = captured(lambda: run_command(words))
        try:
            settings = plain(json.loads(output), self._masks)
        except ValueError:
            settings = None
        result: dict[str, Any] = {"code": code, "errors": without_sources(self._lines(errors))}
        if settings is None:
            result["output"] = self._lines(output)
        return result, settings

    def _run(self, words: Sequence[str], machine: str, deaths: int = 0) -> tuple[dict[str, Any], Any]:
        """Run a command; return what its parts received, and the settings that it wrote."""
        recording, before, known = Recording(self._masks), dict(os.environ), self._written()
        with recorded_edges(recording, MACHINES[machine], deaths), tool_edges(recording, words[0]):
            code, output, errors = captured(lambda: run_command([word for word in words if word != DRY]))
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value and name not in OF_IMPORTS}
        os.environ.clear()
        os.environ.update(before)
        new = [path for path, text in self._written().items() if known.get(path) != text]
        settings = plain(json.loads(new[0].read_text(encoding="utf-8")), self._masks) if len(new) == 1 else None
        received = recording.result()
        if (saved := received.get("checkpoints", {}).get("first")) and settings is not None:
            saved["config"] = "as config.json" if json.loads(saved["config"]) == settings else saved["config"]
        result: dict[str, Any] = {"received": received, "code": code}
        if changed:
            result["environment"] = plain(changed | {name: "TOKEN" for name in changed if "TOKEN" in name}, self._masks)
        if errors and code != "recorded":
            result["errors"] = self._lines(errors)
        if words[0] in SHOWING:
            result["output"] = self._lines(output)
        return result, settings

    def _written(self) -> dict[Path, str]:
        """Return the files with the settings of runs, each with its text."""
        return {path: path.read_text(encoding="utf-8") for path in sorted((self.work / "runs").glob("*/config.json"))}

    def _interrupt_runs(self) -> None:
        """Make runs that ended look as if they had been interrupted after their checkpoint, and give them a model."""
        for path in self._written():
            (path.parent / "summary.json").unlink(missing_ok=True)
            shutil.copytree(TINY, path.parent / "model", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)

    def _looped(self, case: Case) -> dict[str, Any]:
        """Open a runtime for a loop of one's own, and play one group."""
        import agentrl

        recording = Recording(self._masks)
        given = dict(word.split("=", 1) for word in case.words[2:])
        settings = agentrl.settings(case.words[1], **{name: _value(text) for name, text in given.items()})

        async def loop() -> None:
            async with agentrl.open_runtime(settings) as runtime:
                recording.add("task", runtime.engines._ticket.keywords)
                await runtime.engines.play(next(runtime.tasks))

        with recorded_edges(recording, MACHINES[case.machine]):
            code, _, errors = captured(lambda: asyncio.run(loop()) or 0)
        from agentrl.config.mapping import to_json

        shown = plain(json.loads(to_json(settings)), self._masks)
        return {"received": recording.result(), "code": code, "errors": self._lines(errors), "config": shown}

    def _lines(self, text: str) -> list[str]:
        return self._masks.text(text).splitlines()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def captured(command: Callable[[], int]) -> tuple[int | str, str, str]:
    """Run a command; return its exit code, and what it wrote to standard output and standard error, its log included."""
    output, errors = io.StringIO(), io.StringIO()
    code: int | str
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), _log_to(errors):
        try:
            code = command()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Recorded:
            code = "recorded"
    return code, output.getvalue(), errors.getvalue()


@contextmanager
def _log_to(stream: io.StringIO) -> Iterator[None]:
    """Write messages of the log to a stream, whoever else listens; tasks of actors that were killed, and so never end, are no message."""
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    quiet = patch.object(logging.getLogger("asyncio"), "disabled", True)
    with patch.object(logging.root, "handlers", [handler]), quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def differences(before: Any, after: Any) -> dict[str, Any]:
    """Return the settings that differ between two files of settings, each with both values."""
    old, new = flat(before), flat(after)
    return {name.replace("/", "."): [old.get(name), new.get(name)] for name in sorted({*old, *new}) if old.get(name) != new.get(name)}

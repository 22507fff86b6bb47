"""The commands as functions of Python: `train`, `evaluate`, `sample`, `iterate`, `check`, `load_run`, and asynchronous twins.

Nothing heavy is imported before one of them is called.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.api.background import Background
    from agentrl.api.checking import CheckResult
    from agentrl.api.evaluation import Evaluation
    from agentrl.api.iterating import Iterated
    from agentrl.api.run import Run
    from agentrl.api.sampling import Sampled


def train(env: object = "", **settings: Any) -> Run:
    """Train a model in an environment, as ``agentrl train`` does.

    It may be called in a script, in a notebook and from any thread. Ctrl-C ends the step under way, saves a checkpoint and raises
    `KeyboardInterrupt`; a second one ends at once.

    Args:
        env: A class with ``reset`` and ``step``, a gymnasium environment class, an `Executor` or a reward; or what ``--agent`` takes,
            such as ``"env.py"`` or ``"gym:FrozenLake-v1"``. It may be left out with ``resume``.
        **settings: The flags of ``agentrl train`` in the form of Python: ``model="org/name"``, ``num_steps=100``, ``max_staleness=1``,
            ``async_=True``; ``config="settings.toml"`` takes the others from a file. ``callback`` is a list that may hold classes and
            objects as well as ``"file.py:Name"``; the run knows them, its ``config.json`` does not.

    Returns:
        The run.

    Raises:
        ConfigError: If a setting, the environment, its tasks or the model cannot be used; then nothing has been started.
        AgentRLError: If the run failed; nothing is left running, and what was measured until then is in its directory.
    """
    return _started(env, settings).wait()


async def train_async(env: object = "", **settings: Any) -> Run:
    """Train as `train` does, while the caller's event loop goes on; cancelling it is a Ctrl-C."""
    return await _started(env, settings).wait_async()


def evaluate(env: object = "", **settings: Any) -> Evaluation:
    """Measure a model in an environment, or compare two on the same tasks, as ``agentrl eval`` does.

    Args:
        env: As for `train`; it may be left out with ``run``.
        **settings: The flags of ``agentrl eval``: ``run=`` a run or its directory, ``model=``, ``baseline=``, ``eval_samples=8``.

    Returns:
        The figures with their intervals.

    Raises:
        ConfigError: If a setting, the environment, its tasks or a model cannot be used; then nothing has been started.
        AgentRLError: If nothing could be measured.
    """
    return _measuring(env, settings).wait()


async def evaluate_async(env: object = "", **settings: Any) -> Evaluation:
    """Evaluate as `evaluate` does, while the caller's event loop goes on; cancelling it saves the figures of the tasks that are done."""
    return await _measuring(env, settings).wait_async()


def sample(env: object = "", **settings: Any) -> Sampled:
    """Sample episodes of a model, score them and write a data set, as ``agentrl sample`` does.

    Args:
        env: As for `train`; it may be left out with ``prompts`` and ``reward_model``, or with ``run``.
        **settings: The flags of ``agentrl sample``: ``model=``, ``n_samples_per_prompt=8``, ``select="pairs"``, ``output="data/pairs"``.

    Returns:
        The data set: its file, and the counts.

    Raises:
        ConfigError: If a setting, the environment, its tasks or the model cannot be used; then nothing has been started.
        AgentRLError: If every episode failed.
    """
    return _sampling(env, settings).wait()


async def sample_async(env: object = "", **settings: Any) -> Sampled:
    """Sample as `sample` does, while the caller's event loop goes on; cancelling it keeps the tasks that are done, for ``resume=True``."""
    return await _sampling(env, settings).wait_async()


def iterate(method: str, env: str | os.PathLike[str] = "", **settings: Any) -> Iterated:
    """Sample, score, train, evaluate, and again, as ``agentrl iterate`` does; each phase is a process of its own.

    Args:
        method: ``dpo`` (pairs of the best and the worst answers) or ``sft`` (the best answers).
        env: File of an environment or a reward, or what else ``--agent`` takes as text.
        **settings: ``model=``, ``rounds=3``, ``run_dir=``, ``resume=True``, ``seed=``, and what the phases are told: ``sample={...}``,
            ``train={...}``, ``eval={...}``, with the flags of ``agentrl sample``, ``dpo`` or ``sft``, and ``eval``.

    Returns:
        The rounds with their figures, and the last model.

    Raises:
        ConfigError: If a setting is wrong; then nothing has been started.
        AgentRLError: If a phase failed.
    """
    from agentrl.api.iterating import iterate as run_rounds
    from agentrl.config.iterate import given_iterate

    return run_rounds(given_iterate(method, os.fspath(env), settings))


def check(env: object, **settings: Any) -> CheckResult:
    """Play an environment without a model and report what is wrong with it, as ``agentrl check`` does.

    Args:
        env: As for `train`.
        **settings: The flags of ``agentrl check``: ``episodes=16``, ``budget_s=60``.

    Returns:
        The findings: ``ok``, ``errors``, ``warnings``, ``findings``.

    Raises:
        ConfigError: If the request itself is wrong.
    """
    from agentrl.api.checking import run_check
    from agentrl.api.settings import with_environment
    from agentrl.check.findings import CHECK
    from agentrl.config.load import load_given

    return run_check(load_given(CHECK, with_environment(env, settings)))


async def check_async(env: object, **settings: Any) -> CheckResult:
    """Check as `check` does, while the caller's event loop goes on."""
    return await asyncio.to_thread(check, env, **settings)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return a training run from its directory: one that has ended, goes on, or was killed.

    Raises:
        ConfigError: If the directory holds no run.
    """
    from agentrl.api.run import Run

    return Run(Path(path))


def _started(env: object, settings: dict[str, Any]) -> Background[Run]:
    from agentrl.api.background import Background
    from agentrl.api.run import Run
    from agentrl.api.settings import own_callbacks, read_settings
    from agentrl.api.training import train as run_training
    from agentrl.core.paths import shown_path
    from agentrl.core.process import on_thread
    from agentrl.flow.state import StopRequest
    from agentrl.resolve.plan import RunPlan, checked_steps

    settings, callbacks = own_callbacks(settings)
    loaded = read_settings(env, settings)
    checked_steps(loaded)  # a wrong setting is refused in the call itself

    async def work(stop: StopRequest) -> Run:
        plan = await on_thread(RunPlan.of, loaded)  # an address may take its time
        with plan.in_directory() as held:
            result = await run_training(held, stop, callbacks)
        run_dir = str(held.settings.training.run_dir)
        if result.stopped:
            sys.stderr.write(f"agentrl: {result.ended}; continue with resume={shown_path(run_dir)!r}\n")
        return Run(run_dir)

    return Background(work, loaded.settings.training.stop_timeout_s)


def _measuring(env: object, settings: dict[str, Any]) -> Background[Evaluation]:
    from agentrl.api.background import Background
    from agentrl.api.evaluation import measure
    from agentrl.api.settings import eval_settings

    config = eval_settings(env, settings)
    return Background(lambda stop: measure(config))


def _sampling(env: object, settings: dict[str, Any]) -> Background[Sampled]:
    from agentrl.api.background import Background
    from agentrl.api.sampling import sample as run_sampling
    from agentrl.api.settings import sample_settings

    config = sample_settings(env, settings)
    return Background(lambda stop: run_sampling(config))


class _CheckPackage(ModuleType):
    """The package ``agentrl.check``, which can be called as well."""

    def __call__(self, env: object, **settings: Any) -> CheckResult:
        """As `check`."""
        return check(env, **settings)


def make_callable(name: str) -> None:
    """Let a package be called like the function `check`, so that ``agentrl.check`` may be either, whatever was imported before."""
    module = importlib.import_module(name)
    module.__class__ = _CheckPackage
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)

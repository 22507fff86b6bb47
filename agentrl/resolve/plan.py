"""The plan of a training run, decided from what a user said, this machine and the model: one function, read from top to bottom.

Nothing after it rewrites or completes a setting. ``--dry-run`` prints the plan, the run writes it into ``config.json``, and
`agentrl.settings` returns its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from agentrl.assets import CHOSEN_VISION
from agentrl.cluster.processes import ClusterPlan
from agentrl.config.engine_rules import share_only_gpu
from agentrl.config.load import Loaded
from agentrl.config.mapping import to_json
from agentrl.config.model_defaults import defaults_of
from agentrl.config.places import with_absolute_paths
from agentrl.config.plugins import resolve_plugins
from agentrl.config.rules import PLAY_RULES, RULES, judged_agent, penalties_of_the_run_fit
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed
from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.operating_system import usable_cores
from agentrl.core.paths import absolute_path
from agentrl.core.plugins import is_plugin, resolve_plugin
from agentrl.core.types import Task
from agentrl.engine.settings import Device
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.tasks import TaskSource
from agentrl.evaluation.evaluations import EvalPlan
from agentrl.flow.sizes import FlowPlan
from agentrl.learner.backends import facts_of_backend
from agentrl.learner.optimizer_table import OPTIMIZERS
from agentrl.resolve.demonstrations import check_demonstrations
from agentrl.resolve.directories import agent_name, check_free, default_directory
from agentrl.resolve.inputs import InputPlan, Inputs
from agentrl.resolve.memory import gpu_bytes, savings, with_shares
from agentrl.resolve.parts import (
    cluster_plan,
    device_of,
    environment,
    eval_plan,
    evaluation_tasks,
    fitting_model,
    flow_plan,
    input_plan,
    track_plan,
    training_tasks,
)
from agentrl.resolve.saved import AUTO, chosen_engine, resumed_run_dir
from agentrl.resolve.steps import Steps
from agentrl.resolve.unused import refuse_unused, unused_notes
from agentrl.track.plan import TrackPlan

P = TypeVar("P", bound=PlaySettings)


class Host:
    """The machine of a plan; each question is asked once, and only if a plan depends on the answer."""

    @cached_property
    def cores(self) -> int:
        """Cores that this process may use."""
        return usable_cores()

    @cached_property
    def gpu_bytes(self) -> float:
        """Memory of the smallest GPU; 0 without one."""
        return gpu_bytes("auto")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A training run, decided.

    Attributes:
        settings: Every setting as the run has it.
        sources: Where each setting that does not have its plain default comes from; see `Steps`.
        agent: The environment, loaded.
        device: Kind of device that engines and learner compute on.
        notes: Decisions that a person would want to know, a line each.
        accepts_changes: True if the run goes on although tasks, models or templates are not what they were.
    """

    settings: TrainConfig
    sources: Mapping[str, str]
    agent: AgentSpec
    device: Device
    notes: tuple[str, ...] = ()
    accepts_changes: bool = False

    @classmethod
    def of(cls, loaded: Loaded[TrainConfig], host: Host | None = None, *, named: bool = True, accepts_changes: bool = False) -> RunPlan:
        """Decide everything about a run that can be known before its processes start.

        Args:
            loaded: What a user said.
            host: This machine.
            named: True if the run has a directory, which is chosen here and not yet made.
            accepts_changes: The field of this name.

        Raises:
            ConfigError: If settings contradict each other, this machine or the run to resume, or a file is missing.
            EnvLoadError: If the environment cannot be loaded.
            CheckpointError: If the checkpoint of the run to resume cannot be read.
        """
        host = host or Host()
        steps = checked_steps(loaded)
        # After the rules, so that a mistake in a flag is answered before any folder or address is looked at.
        if named:
            steps = steps.rewrite(with_directory(steps.settings))
        agent = environment(steps.settings)
        fitting = fitting_model(steps.settings, agent)
        model_note = "" if fitting is steps.settings else f"model {CHOSEN_VISION}"
        steps = steps.follow("settings", fitting)
        # The run that goes on and the environment both have a say in the engine, so it comes after them.
        steps, engine_note = _with_engine(steps, agent)
        # Memory is shared by what is known now: engine, model, optimizer.
        gpu = host.gpu_bytes if steps.settings.run.device != "cpu" else 0.0
        asked, steps = steps.settings, steps.follow("machine", with_shares(steps.settings, gpu))
        # A cluster's cores are known once it is joined; its plan keeps "auto" until then.
        if not steps.settings.run.ray_address:
            steps = steps.follow("machine", with_front_ends(steps.settings, host.cores))
        saved = savings(asked, steps.settings)
        notes = tuple(filter(None, (model_note, engine_note, f"to fit into the GPU: {saved}" if saved else "")))
        decided, device = steps.settings, device_of(steps.settings)
        notes = (*notes, *unused_notes(decided, steps.sources))
        return cls(settings=decided, sources=steps.sources, agent=agent, device=device, notes=notes, accepts_changes=accepts_changes)

    @cached_property
    def cluster(self) -> ClusterPlan:
        """The plan of its processes."""
        return cluster_plan(self.settings, self.device)

    @cached_property
    def flow(self) -> FlowPlan:
        """The plan of its loops."""
        return flow_plan(self.settings)

    @cached_property
    def evaluation(self) -> EvalPlan:
        """The plan of its evaluations."""
        return eval_plan(self.settings)

    @cached_property
    def inputs(self) -> InputPlan:
        """The plan of what it reads besides its tasks."""
        return input_plan(self.settings)

    @cached_property
    def track(self) -> TrackPlan:
        """The plan of what it shows and keeps."""
        return track_plan(self.settings)

    def tasks(self, before: Inputs | None = None, epoch: int = 0) -> tuple[TaskSource, list[Task]]:
        """Return the tasks to train on, and those that it is evaluated on.

        Args:
            before: What a run that is resumed has read before.
            epoch: Epoch in which it draws.

        Raises:
            ConfigError: If there are none, or they cannot be used, or those of `before` are gone or changed.
        """
        before = None if self.accepts_changes else before
        source = training_tasks(self.settings, self.agent, before.tasks if before else None, epoch)
        return source, evaluation_tasks(self.settings, self.agent, before)

    def to_json(self) -> str:
        """Return the plan as ``--dry-run`` prints it and ``config.json`` holds it."""
        return to_json(self.settings, sources=self.sources)

    @contextmanager
    def in_directory(self) -> Iterator[RunPlan]:
        """Make the run's directory and keep others from writing to it; yields the plan, which names it.

        Raises:
            ConfigError: If the directory is taken, or another process writes to it.
        """
        run = self.settings.training
        path = absolute_path(run.run_dir or "")
        resumed = resumed_run_dir(self.settings) is not None
        flag = "--resume" if run.resume not in ("", AUTO) else "--run-dir"
        # A directory that nobody named gets a number where another run has taken its name meanwhile.
        with held_directory(path, flag) if resumed or "run_dir" in self.sources else held_new_directory(path) as path:
            if not resumed:
                check_free(path)  # another run may have ended there since
            yield replace(self, settings=changed(self.settings, run_dir=path))

    def resuming(self) -> RunPlan:
        """Return the plan of the same run, going on from its last checkpoint."""
        return replace(self, settings=changed(self.settings, resume=str(self.settings.training.run_dir)))


def _with_engine(steps: Steps[TrainConfig], agent: AgentSpec) -> tuple[Steps[TrainConfig], str]:
    """Decide ``--engine auto``, and return a line about it where the engine is not the usual one."""
    if steps.settings.engine.engine != "auto":
        return steps, ""
    engine, note = chosen_engine(steps.settings, agent)
    source = "run" if steps.settings.training.resume and not note else "machine"
    return steps.follow(source, changed(steps.settings, engine=engine)), note


def checked_steps(loaded: Loaded[TrainConfig]) -> Steps[TrainConfig]:
    """Decide what follows from settings and the model's ``config.json`` alone, and apply every rule; within a second.

    Raises:
        ConfigError: For the first rule that does not hold.
    """
    steps = with_defaults(loaded)
    steps = explicit(steps)
    steps = steps.rewrite(resolve_plugins(steps.settings))
    # Before the rules, since two processes on one GPU are refused without it.
    steps = steps.follow("machine", share_only_gpu(steps.settings))
    for rule in RULES:
        rule(steps.settings)
    check_demonstrations(steps.settings)
    if not (loaded.saved and steps.settings.training.resume):  # what began goes on
        refuse_unused(steps.settings, steps.sources)
    # After the rules, whose messages name --async or --max-staleness, whichever was given.
    staleness = steps.settings.flow.staleness
    return steps.follow("settings", changed(steps.settings, max_staleness=staleness, asynchronous=staleness > 0))


def with_defaults(loaded: Loaded[TrainConfig]) -> Steps[TrainConfig]:
    """Fill in the defaults that depend on the model, the optimizer and shared GPUs."""
    steps = Steps(loaded.settings, loaded.sources)
    steps = steps.fill("model", **defaults_of(steps.settings))
    if OPTIMIZERS[steps.settings.learner.optimizer].whole:
        steps = steps.fill("optimizer", zero_stage=0)
    steps = steps.fill("settings", **facts_of_backend(steps.settings.learner.learner_backend).defaults)
    if steps.settings.weights.colocate:
        engine = steps.settings.engine
        steps = steps.fill("settings", num_learners=engine.num_engines * engine.gpus_per_engine)
    return steps


def explicit(steps: Steps[P]) -> Steps[P]:
    """Decide the environment and the runtime, and make names of files absolute, so that every process finds them."""
    settings = steps.settings
    steps = steps.follow("settings", changed(settings, agent=judged_agent(settings), runtime=_runtime(settings)))
    engine = settings.engine.engine
    if is_plugin(engine):
        steps = steps.rewrite(changed(steps.settings, engine=resolve_plugin("--engine", engine)))
    return steps.rewrite(with_absolute_paths(steps.settings))


def with_directory(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the absolute path of its run's directory: the resumed one, or a new one; nothing is made.

    Raises:
        ConfigError: If the directory is taken, or there is no run to resume.
    """
    resumed = resumed_run_dir(config)
    path = absolute_path(resumed or config.training.run_dir or default_directory(agent_name(config.run.agent)))
    if resumed is None:
        check_free(path)
    return changed(config, run_dir=path)


def with_front_ends(settings: P, cores: int) -> P:
    """Return the settings with a number in place of ``--rollout-workers-per-engine auto`` on a machine with so many cores."""
    workers = cluster_plan(settings).placed(cores).episodes.rollout.rollout_workers_per_engine
    return changed(settings, rollout_workers_per_engine=workers)


def _runtime(settings: PlaySettings) -> str:
    if settings.run.runtime != "auto":
        return settings.run.runtime
    several = settings.engine.num_engines > 1 or settings.rollout.num_front_ends > 1
    return "ray" if isinstance(settings, TrainConfig) or several or settings.run.ray_address else "local"


def checked_play(settings: P) -> P:
    """Apply the rules of a command that plays episodes and trains nothing, and fill in what follows from other settings.

    Raises:
        ConfigError: For the first rule that does not hold.
    """
    settings = explicit(Steps(settings, {})).settings
    for rule in (*PLAY_RULES, penalties_of_the_run_fit):
        rule(settings)
    return settings

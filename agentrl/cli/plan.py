"""``agentrl plan``: memory and time of a run on given GPUs, from the model's ``config.json`` and the settings alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.cli.words import Common
from agentrl.config.load import Command, load, read_flags
from agentrl.config.sections import settings_of
from agentrl.config.words import others
from agentrl.core.model_shape import find_shape
from agentrl.core.settings import Count, NonNegative
from agentrl.inspect.directory import RunDirectory
from agentrl.profile.measured import compared_lines, read_measured
from agentrl.profile.plan_text import plan_lines
from agentrl.resolve.commands import TRAIN, run_settings
from agentrl.resolve.plan import with_defaults
from agentrl.resolve.sizing.memory import GIB
from agentrl.resolve.sizing.plan import Hardware, Workload, divide, make_plan
from agentrl.resolve.sizing.speed import card_named

UNFIT = 1
DIVISION = ("num_engines", "num_learners", "tensor_parallel_size")
MEMORY_GIB = 80.0
"""Memory of a GPU of which nothing is said."""


@dataclass(frozen=True, kw_only=True)
class PlanHardware:
    """The GPUs."""

    gpus: Count = 8
    """GPUs in all."""
    gpu: str = ""
    """Kind of GPU: a100, h100, h200, b200, 4090, 5090 or l40s, with memory and speed of their data sheets; or part of the name of a device
    whose rates ``agentrl doctor`` measured, which count more. Empty: a GPU of ``--gpu-memory`` and unknown speed."""
    gpu_memory: NonNegative = 0.0
    """Memory of a GPU, GiB. 0: that of ``--gpu``, else 80."""
    gpus_per_node: Count = 8
    """GPUs of one machine, which an engine cannot exceed."""
    host_memory: NonNegative = 0.0
    """CPU memory of a machine, GiB. 0: any."""
    measured: Path | None = None
    """Directory of a run to compare the plan with; its settings, model and lengths of episodes are taken."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Sections of ``agentrl plan``, which reads the settings of training as well."""

    hardware: PlanHardware = field(default_factory=PlanHardware)
    work: Workload = field(default_factory=Workload)
    common: Common = field(default_factory=Common)


PLAN = Command(
    "plan",
    PlanConfig,
    "Compute what fits into given GPUs, and how long a step takes, from the model's config.json and the settings alone. Takes the flags "
    "of agentrl train as well, --model first of all. Exit code: 0 it fits, 1 it does not fit, 2 bad request.",
    words=(),
    also=(),
)


def main(words: list[str]) -> int:
    """Print the plan for the words after ``plan``; the code is 1 if it does not fit."""
    own, rest = others(words, settings_of(PlanConfig))
    # Help is that of this command, and not that of training, which reads the other words.
    asking = [word for word in rest if word in ("-h", "--help", "--completion")]
    args = load(PLAN, [*own, *asking])
    asked, run = args.hardware, args.hardware.measured
    loaded = read_flags(TRAIN, rest, run_settings(run))
    config, given = with_defaults(loaded).settings, loaded.sources
    shape = find_shape(config.model.model)
    card = card_named(asked.gpu) if asked.gpu else None
    memory = asked.gpu_memory or (card.memory_gib if card else 0.0) or MEMORY_GIB
    hardware = Hardware(
        gpus=asked.gpus, gpu_bytes=memory * GIB, gpus_per_node=asked.gpus_per_node, host_bytes=asked.host_memory * GIB, card=card
    )
    if not all(name in given for name in DIVISION):
        config = divide(config, shape, hardware, given)
    measured = read_measured(RunDirectory(str(run)).metrics(), max_staleness=config.flow.staleness) if run else None
    work = replace(args.work, **measured.workload()) if measured else args.work
    plan = make_plan(config, shape, hardware, work)
    lines = plan_lines(plan, work)
    if measured is not None:
        lines += ["", *compared_lines(measured, plan, work)]
    sys.stdout.write("\n".join(lines) + "\n")
    return UNFIT if plan.problems else 0

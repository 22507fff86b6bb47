"""``agentrl plan``: memory and time of a run on given GPUs, from the model's ``config.json`` and the settings alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from agentrl.cli.words import Common
from agentrl.config.commands import TRAIN
from agentrl.config.load import Command, load, read_flags
from agentrl.config.model_shape import find_shape
from agentrl.config.sections import settings_of
from agentrl.config.words import others
from agentrl.core.settings import Count, Positive
from agentrl.profile.memory import GIB
from agentrl.profile.plan import Hardware, Workload, divide, make_plan, plan_lines

UNFIT = 1
DIVISION = ("--num-engines", "--num-learners", "--tensor-parallel-size")


@dataclass(frozen=True, kw_only=True)
class PlanHardware:
    """The GPUs."""

    gpus: Count = 8
    """GPUs in all."""
    gpu_memory: Positive = 80.0
    """Memory of a GPU, GiB."""
    gpus_per_node: Count = 8
    """GPUs of one machine, which an engine cannot exceed."""


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
    asking = [word for word in rest if word in ("-h", "--help", "--completion")]
    args = load(PLAN, [*own, *asking])
    config = read_flags(TRAIN, rest)[0]
    shape = find_shape(config.model.model)
    hardware = Hardware(gpus=args.hardware.gpus, gpu_bytes=args.hardware.gpu_memory * GIB, gpus_per_node=args.hardware.gpus_per_node)
    named = any(word.partition("=")[0].replace("_", "-") in DIVISION for word in rest)
    if not named and (config.engine.num_engines, config.learner.num_learners, config.engine.tensor_parallel_size) == (1, 1, 1):
        config = divide(config, shape, hardware)
    plan = make_plan(config, shape, hardware, args.work)
    sys.stdout.write("\n".join(plan_lines(plan, args.work)) + "\n")
    return UNFIT if plan.problems else 0

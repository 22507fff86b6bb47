"""What a run trains on and what it is evaluated on, as the configuration says."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence

from agentrl.config.schema import DataConfig, TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.seeding import derive_seed
from agentrl.core.types import Task
from agentrl.env.data.prompts import PromptFormat, read_prompts
from agentrl.env.data.source import PEEK, TaskSource, checked, own_tasks, unique
from agentrl.env.load import AgentSpec


def open_tasks(config: TrainConfig, agent: AgentSpec) -> TaskSource:
    """The tasks to train on: those that ``--prompts`` names, else the environment's own, less those held out.

    Raises:
        ConfigError: If there are none, or they cannot be used.
    """
    data, seed = config.data, config.run.seed
    holdout = data.eval_size if _is_held_out(config, agent) else 0
    if not data.prompts:
        return TaskSource.from_agent(agent, seed=seed, shuffle=data.shuffle, holdout=holdout)
    parts = read_prompts(data.prompt_sources, _form(data))
    return TaskSource.from_prompts(parts, weights=data.prompt_weights, seed=seed, shuffle=data.shuffle, holdout=holdout)


def eval_tasks(config: TrainConfig, agent: AgentSpec) -> list[Task]:
    """The tasks to evaluate on, none of which `open_tasks` gives; the same ones in the same order each time.

    They come from ``--eval-prompts``, else from the environment's ``eval_tasks``, of each at most ``--eval-size``; else
    ``--eval-size`` training tasks are held out.

    Raises:
        ConfigError: If there are none, or they cannot be used.
    """
    if _is_held_out(config, agent):
        if not config.data.eval_size:
            remedy = "Give --eval-size N to hold out N training tasks, or --eval-prompts, or write a classmethod eval_tasks()."
            raise ConfigError("--eval-size", 0, "there are no tasks to evaluate on", remedy)
        tasks = open_tasks(config, agent).held_out
    else:
        tasks = _separate(config, agent)
    return [dataclasses.replace(task, position=index) for index, task in enumerate(tasks)]


def _is_held_out(config: TrainConfig, agent: AgentSpec) -> bool:
    return not config.data.eval_prompts and own_tasks(agent, "eval_tasks") is None


def _form(data: DataConfig) -> PromptFormat:
    return PromptFormat(split=data.prompt_split, input_key=data.input_key, label_key=data.label_key, input_template=data.input_template)


def _separate(config: TrainConfig, agent: AgentSpec) -> list[Task]:
    """Tasks that have nothing to do with those trained on."""
    data = config.data
    loaded: Iterable[Task]
    if data.eval_prompts:
        origin = data.eval_prompts
        form = dataclasses.replace(_form(data), flag="--eval-prompts", split=data.eval_split, split_flag="--eval-split")
        loaded = [task for part in read_prompts(data.eval_sources, form) for task in part.tasks]
    else:
        origin = f"{agent.source}: {agent.name}.eval_tasks"
        loaded = own_tasks(agent, "eval_tasks") or ()
    limit = None if isinstance(loaded, Sequence) else max(PEEK, data.eval_size)
    tasks = unique(list(itertools.islice(checked(loaded, origin), limit)), origin)
    if not tasks:
        raise ConfigError("--eval-prompts", data.eval_prompts, f"{origin} holds no task", "Give at least one.")
    if len(tasks) == limit and not data.eval_size:
        raise ConfigError("--eval-size", 0, f"{origin} seems to have no end", "Say how many of its tasks to evaluate on.")
    if not data.eval_size or len(tasks) <= data.eval_size:
        return tasks
    if len(tasks) == limit:
        return tasks[: data.eval_size]
    chosen = random.Random(derive_seed(config.run.seed, "eval")).sample(range(len(tasks)), data.eval_size)
    return [tasks[index] for index in sorted(chosen)]

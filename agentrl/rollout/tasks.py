"""Training tasks and evaluation tasks of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import max_positions
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Task, derive_seed
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.known_tasks import KnownTasks
from agentrl.env.plan import DataConfig
from agentrl.env.prompts import PromptFormat, column_paths, read_prompts
from agentrl.env.rewards.function import judging_reward
from agentrl.env.sampling import Sampling
from agentrl.env.tasks import PEEK, TaskSource, checked, own_tasks, unique
from agentrl.rollout.codecs import encode_prompt, make_codec
from agentrl.rollout.episode_plan import EpisodePlan


def open_tasks(
    data: DataConfig, agent: AgentSpec, *, seed: int = 0, sampling: Sampling | None = None, known: KnownTasks | None = None, epoch: int = 0
) -> TaskSource:
    """The tasks to train on: those that ``--prompts`` names, else the environment's own, less those held out.

    Args:
        data: Where tasks are, and how many of them are held out.
        agent: The environment.
        seed: Seed of their order.
        sampling: The rule by which they are drawn; `None` draws in epochs.
        known: Tasks with which a run that is resumed began, see `TaskSource`.
        epoch: Epoch in which such a run draws.

    Raises:
        ConfigError: If there are none, or they cannot be used.
    """
    holdout = data.eval_size if _is_held_out(data, agent) else 0
    options: dict[str, Any] = {"seed": seed, "shuffle": data.shuffle, "holdout": holdout, "sampling": sampling}
    options |= {"known": known, "epoch": epoch}
    if not data.prompts:
        return TaskSource.from_agent(agent, **options)
    return TaskSource.from_prompts(read_prompts(data.prompt_sources, prompt_format(data)), weights=data.prompt_weights, **options)


LABEL_COLUMNS = ("answer", "solution", "ground_truth", "target", "final_answer", "expected", "output", "reference", "gold")
"""Columns that often hold the label."""


def missing_labels(data: DataConfig, agent: AgentSpec, tasks: Sequence[Task]) -> tuple[str, str] | None:
    """Return what to say if not one of the first tasks has a label although the reward is given one, and the remedy; else `None`."""
    if not tasks or any(task.label is not None for task in tasks):
        return None
    columns = list(dict.fromkeys(name for task in tasks for name in task.metadata if name != "source"))
    likely = _likely_label(tasks[0].metadata, columns)
    reward = judging_reward(agent.load())
    if not (reward.reads_label(columns) if reward else likely and data.prompts):
        return None  # an environment with a step of its own may need no labels, and a function may read its columns by name
    beside = f"column beside the prompt is {columns[0]}" if len(columns) == 1 else f"columns beside the prompt are {', '.join(columns)}"
    there = f"the {beside}" if columns else "there is no column beside the prompt"
    text = f"no task has a label (--label-key {data.label_key}); {there if data.prompts else 'Task(prompt, label) sets it'}"
    return text, f"Write --label-key {likely}." if likely else "Name the column with --label-key, if the reward needs labels."


def _likely_label(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The column that probably holds the label, or the path to it in a column that has keys of its own; "" if none does."""
    paths = [*columns, *column_paths(row)]
    return next((path for name in LABEL_COLUMNS for path in paths if path == name or path.endswith(f".{name}")), "")


def eval_tasks(
    data: DataConfig, agent: AgentSpec, *, seed: int = 0, known: KnownTasks | None = None, asked: KnownTasks | None = None
) -> list[Task]:
    """The tasks to evaluate on, none of which `open_tasks` gives; the same ones in the same order each time.

    They come from ``--eval-prompts``, else from the environment's ``eval_tasks``, of each at most ``--eval-size``; else
    ``--eval-size`` training tasks are held out. A run that is resumed is evaluated on the tasks that `known` holds out of its training
    tasks, or on those of `asked`, and no others.

    Raises:
        ConfigError: If there are none, or they cannot be used, or one of a resumed run's is gone or changed.
    """
    if _is_held_out(data, agent):
        if not data.eval_size:
            remedy = "Give --eval-size N to hold out N training tasks, or --eval-prompts, or write a classmethod eval_tasks()."
            raise ConfigError("--eval-size", 0, "there are no tasks to evaluate on", remedy)
        tasks = open_tasks(data, agent, seed=seed, known=known).held_out
    else:
        tasks = _separate(data, agent, seed, asked)
    return [dataclasses.replace(task, position=index) for index, task in enumerate(tasks)]


def _is_held_out(data: DataConfig, agent: AgentSpec) -> bool:
    return not data.eval_prompts and own_tasks(agent, "eval_tasks") is None


def prompt_format(data: DataConfig) -> PromptFormat:
    """Return how the rows of ``--prompts`` become tasks."""
    return PromptFormat(
        split=data.prompt_split,
        input_key=data.input_key,
        label_key=data.label_key,
        image_key=data.image_key,
        marks=data.apply_chat_template,
        input_template=data.input_template,
    )


def _separate(data: DataConfig, agent: AgentSpec, seed: int, known: KnownTasks | None) -> list[Task]:
    """Tasks that have nothing to do with those trained on; those that are `known`, if there are such."""
    loaded: Iterable[Task]
    if data.eval_prompts:
        origin = data.eval_prompts
        form = dataclasses.replace(prompt_format(data), flag="--eval-prompts", split=data.eval_split, split_flag="--eval-split")
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
    if len(tasks) == limit:
        # It may have no end, so there is no whole from which tasks could be chosen.
        tasks = tasks[: data.eval_size]
    if known is not None:
        return known.ordered(tasks, origin)[: len(known.digests)]
    if not data.eval_size or len(tasks) <= data.eval_size:
        return tasks
    chosen = random.Random(derive_seed(seed, "eval")).sample(range(len(tasks)), data.eval_size)
    return [tasks[index] for index in sorted(chosen)]


TEMPLATE_TOKENS, MESSAGE_TOKENS = 128, 32


def check_prompts(settings: EpisodePlan, tasks: Sequence[Task], max_model_len: int) -> None:
    """Check that the tasks' own prompts leave room to answer; what an environment's `reset` returns is not known yet.

    A token stands for one byte at least, so prompts with fewer bytes than the context has tokens need no tokenizer; it is loaded, and with
    it transformers, only if a prompt is longer than that. A `max_model_len` of 0 is not known, which leaves only ``--max-episode-tokens``.

    Raises:
        ConfigError: For the first prompt that is too long, or that the chat template refuses; or if an answer alone may fill the context.
    """
    if 0 < max_model_len <= (answer := settings.rollout.max_new_tokens):
        problem = f"leaves no room for a prompt in a context of {max_model_len} tokens"
        raise ConfigError("--max-new-tokens", answer, problem, "Lower it, or raise --max-model-len as far as the model allows.")
    limit = min((length for length in (max_model_len, settings.rollout.max_episode_tokens) if length), default=0)
    doubtful = [task for task in tasks if _most_tokens(task, settings) >= limit] if limit else []
    if not doubtful:
        return
    tokenizer = load_tokenizer(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
    codec = make_codec(tokenizer, settings)
    for task in doubtful:
        length = len(encode_prompt(codec, task.prompt, apply_chat_template=settings.data.apply_chat_template))
        if length >= limit:
            flag = "--max-model-len" if limit == max_model_len else "--max-episode-tokens"
            problem = f"the prompt of task {task.id!r} has {length} tokens and leaves no room to answer"
            raise ConfigError(flag, limit, problem, "Raise it as far as the model allows, or shorten or remove the prompt.")


HUB_TIMEOUT_S = 5


def check_model(model: str, flag: str = "--model") -> None:
    """Check that the model which `flag` names can be found: a directory, in the cache of the hub, or on the hub, which is asked once.

    "" is the bundled model.

    Raises:
        ConfigError: If it cannot, or its directory lacks the weights or the tokenizer.
    """
    path, remedy = Path(model).expanduser(), "Give the directory of a Hugging Face model, or a name of the hub such as Qwen/Qwen3-0.6B."
    if not model:
        return
    if (path / "config.json").is_file():
        _check_listing(path, model, flag)
        return
    if path.exists():
        raise ConfigError(flag, model, "holds no config.json" if path.is_dir() else "is a file", remedy)
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigError(flag, model, "there is no such directory", remedy)
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            HfApi().model_info(model, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, HFValidationError) as error:
        problem = "is no directory, and the hub has no such model, or shows it only after `hf auth login`"
        raise ConfigError(flag, model, problem, remedy) from error
    except Exception as error:  # the hub's client raises those of its transport, which differ between its versions
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problem = f"is neither a directory nor in the cache of the hub, and the hub cannot be asked: {reason}"
        raise ConfigError(flag, model, problem, "Download it where there is a network, and give its directory.") from error


WEIGHTS, TOKENIZERS = ("*.safetensors", "*.bin", "*.pt"), ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*", "*.py")
"""Names of files of which a model's directory has one at least."""


def _check_listing(folder: Path, model: str, flag: str) -> None:
    """Check that a model's directory holds weights, and a tokenizer where it has to have one of its own."""
    own = {"weights": WEIGHTS, **({"tokenizer": TOKENIZERS} if flag == "--model" else {})}
    for part, patterns in own.items():
        if not any(fnmatch(path.name, pattern) for path in folder.iterdir() for pattern in patterns):
            problem = f"is a directory without {part}: no file is named like {', '.join(patterns)}"
            raise ConfigError(flag, model, problem, "Copy all files of the model into it, or give another directory.")


def context_length(model: str) -> int:
    """The context length that a local model directory states; 0 if it is not known without a download."""
    path = Path(model) / "config.json"
    return max_positions(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else 0


def _most_tokens(task: Task, settings: EpisodePlan) -> int:
    messages = 1 if isinstance(task.prompt, str) else len(task.prompt)
    return _num_bytes(task.prompt) + _num_bytes(settings.data.system_prompt) + MESSAGE_TOKENS * messages + TEMPLATE_TOKENS


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0

"""One episode of a task set of verifiers 0.4 and later, or the list of its tasks, in a process of its own; needs verifiers, not agentrl.

``python verifiers_program.py list SPEC OUT`` writes the tasks to a file, or the error if they cannot be listed. ``python
verifiers_program.py run SPEC INDEX SANDBOX`` prints the outcome of an episode as its last line. SPEC is a JSON object with ``env``, the
configuration of the environment, and ``num_tasks``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

UNWALLED = (
    "the harness {0!r} of {1!r} runs commands of the model on this machine, outside of a sandbox. Choose "
    "env.{1}.harness.id=null or env.{1}.runtime.type=podman, or allow it with --sandbox none"
)


def load(spec: dict[str, Any]) -> Any:
    """Return the environment; agents run on this machine and only talk, unless the configuration says otherwise."""
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

    config = spec["env"]
    kind = env_config_type(config["taskset"]["id"], config.get("id", ""))
    if "agent" in kind.model_fields:
        own = config.get("agent", {})
        harness = (
            own.get("harness", {}) if kind.model_fields["agent"].default.harness is not None else {"id": "null", **own.get("harness", {})}
        )
        config = {**config, "agent": {**own, "harness": harness, "runtime": {"type": "subprocess", **own.get("runtime", {})}}}
    return load_environment(resolve_env_config(config))


def listed(made: Any, num_tasks: int | None) -> list[Any]:
    """Return the tasks."""
    if not made.taskset.bounded and num_tasks is None:
        raise ValueError("the task set is endless; say how many tasks there are, as in ?num_tasks=1000")
    return list(itertools.islice(made.taskset, num_tasks))


def list_tasks(spec: dict[str, Any], out: str) -> None:
    """Write id, prompt and answer of each task."""
    tasks = []
    for task in listed(load(spec), spec["num_tasks"]):
        told = task.data.prompt
        if told is not None and not isinstance(told, str):
            told = [{"role": message.role, "content": message.content} for message in told]
        if isinstance(told, list) and not all(isinstance(message["content"], str) for message in told):
            told = task.data.prompt_text
        tasks.append({"id": task.data.idx, "input": told or task.data.name or f"task {task.data.idx}", "target": answer(task.data)})
    Path(out).write_text(json.dumps(tasks), encoding="utf-8")


def answer(data: Any) -> Any:
    """Return the answer of a task, if it has one that can be written down."""
    value = getattr(data, "answer", None)
    return value if isinstance(value, str | int | float) else None


async def run_episode(spec: dict[str, Any], index: int, sandbox: str) -> dict[str, Any]:
    """Play and score a task with the model at the address in the environment; a failure ends the process."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.configs.agent import agent_config_fields

    made = load(spec)
    for name, agent in agent_config_fields(made.config).items():
        harness = made._harnesses[name]
        if sandbox != "none" and harness.EXECUTES_CODE and agent.runtime.type == "subprocess":
            raise SystemExit(UNWALLED.format(harness.config.id, name))
    task = next(task for task in listed(made, spec["num_tasks"]) if task.data.idx == index)
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with made.serving():
        episode = await made.run_episode(task, ModelContext(model=os.environ["OPENAI_MODEL"], client=client))
    return outcome(episode)


def outcome(episode: Any) -> dict[str, Any]:
    """Return the reward of an episode and its figures; the whole text of errors, if there are any, ends the process."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or errors:
        raise SystemExit(
            "\n".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not complete, and says no error"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise SystemExit(f"{len(trained)} agents of the episode are to be trained; there must be one")
    (trace,) = trained
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "info": {**rewards, **metrics}, "truncated": bool(trace.is_truncated)}


def main(words: list[str]) -> None:
    """Run a command."""
    what, text, target = words[:3]
    sys.path.pop(0)  # this file's folder, which has another module called verifiers
    spec = json.loads(text)
    folder = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join((folder, os.environ.get("PATH", "")))  # uv, which installs what agents need, may be there
    if what == "list":
        try:
            list_tasks(spec, target)
        except Exception as error:
            Path(target).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            raise
    else:
        result = asyncio.run(run_episode(spec, json.loads(target), words[3]))
        # On a line of its own, also behind output that ends without a line break.
        sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

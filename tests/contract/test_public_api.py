"""What users may rely on: exported names, their signatures, and that importing them is cheap."""

import dataclasses
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import agentrl
from agentrl.core.protocols import Learner

NAMES = [
    "AdvantageInputs",
    "AdvantageOptions",
    "Advantages",
    "AgentInstance",
    "AgentRLError",
    "BestModelSaved",
    "BlackBoxAgent",
    "Callback",
    "CallbackError",
    "CheckpointWritten",
    "Completion",
    "ConfigError",
    "CorrectionInputs",
    "DataError",
    "Engine",
    "EngineError",
    "Engines",
    "EnvError",
    "EnvLoadError",
    "EnvResultError",
    "EnvTimeoutError",
    "EvaluationEnd",
    "ExecResult",
    "Executor",
    "GroupAnswer",
    "GroupAnswers",
    "GroupJudged",
    "GroupSummary",
    "GymEnv",
    "GymVectorEnv",
    "LearnerError",
    "LossInputs",
    "LossOptions",
    "McpServer",
    "MemberSummary",
    "Message",
    "MetricsRow",
    "ModelEndpoint",
    "NemoGymEnv",
    "OpenEnvEnv",
    "OpenRuntime",
    "PlayedGroup",
    "PluginError",
    "Policy",
    "ResetResult",
    "ResetState",
    "RewardError",
    "RowLosses",
    "RowScores",
    "RunBegin",
    "RunEnd",
    "SamplingParams",
    "Sandbox",
    "SandboxError",
    "SandboxSpec",
    "StepEnd",
    "StepResult",
    "StepRows",
    "StepState",
    "Task",
    "TokenLosses",
    "TokenWeights",
    "ToolEnv",
    "advantage_estimator",
    "advantages",
    "check",
    "check_async",
    "combine_rewards",
    "evaluate",
    "evaluate_async",
    "group_filter",
    "group_reward",
    "iterate",
    "judge",
    "load_run",
    "objective",
    "off_policy_correction",
    "open_runtime",
    "policy_loss",
    "remote_reward",
    "run_python",
    "sample",
    "sample_async",
    "settings",
    "timed",
    "train",
    "train_async",
    "verifiers",
]
FIELDS = {
    "ResetResult": ["observation", "info", "sampling", "images", "agent", "observations", "state_key"],
    "StepResult": [
        *("reward", "observation", "terminated", "truncated", "score", "info", "sampling", "reward_parts", "images"),
        *("agent", "rewards", "scores", "state_key", "step_rewards"),
    ],
    "Task": ["prompt", "label", "id", "images", "seed", "metadata", "position", "epoch"],
}
POSITIONAL = {"ResetResult": ["observation"], "StepResult": ["reward", "observation"], "Task": ["prompt", "label"]}
STATES = {
    "ResetState": {"task", "observation", "label", "seed"},
    "StepState": {"task", "label", "action_text", "observation_text", "agent", "turn", "turns_left", "finish_reason", "sampling_params"},
}
HEAVY = ["torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "pyarrow", "pandas", "gymnasium"]
DRIVER_MODULES = [
    "agentrl",
    "agentrl.api.commands",
    "agentrl.api.loop",
    "agentrl.env.tasks",
    "agentrl.env.boundary",
    "agentrl.rollout.worker",
    "agentrl.rollout.tasks",
]


def test_exported_names() -> None:
    assert agentrl.__all__ == NAMES == sorted(NAMES)
    assert all(hasattr(agentrl, name) for name in NAMES)


def test_fields_of_results() -> None:
    for name, fields in FIELDS.items():
        cls = getattr(agentrl, name)
        assert [field.name for field in dataclasses.fields(cls)] == fields
        positional = [p.name for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == POSITIONAL[name]


def test_entries_of_states_are_properties_too() -> None:
    for name, entries in STATES.items():
        cls = getattr(agentrl, name)
        assert {key for key, value in vars(cls).items() if isinstance(value, property)} == entries
        state = cls({entry: entry for entry in entries})
        assert all(getattr(state, entry) == state[entry] == state.get(entry) == entry for entry in entries)


def test_methods_of_an_agent() -> None:
    signatures = {name: str(inspect.signature(getattr(agentrl.AgentInstance, name))) for name in ("tasks", "reset", "step", "close")}
    assert signatures == {
        "tasks": "() -> 'Iterable[Task] | None'",
        "reset": "(self, state: 'ResetState', /) -> 'ResetReturn | Awaitable[ResetReturn]'",
        "step": "(self, state: 'StepState', /) -> 'StepReturn | Awaitable[StepReturn]'",
        "close": "(self) -> 'Awaitable[None] | None'",
    }


def test_signatures_of_algorithms() -> None:
    signatures = {
        "advantage_estimator": [
            *("options", "compares_group", "flat", "needs_critic", "whitens", "discounts", "charges_kl", "length_neutral"),
            *("needs_teacher", "token_baseline", "greedy_baseline"),
        ],
        "policy_loss": ["options", "single_update", "several_updates", "clip", "selects"],
        "off_policy_correction": ["options", "whole_batch"],
        "group_filter": ["compares_group"],
        "group_reward": ["compares_group"],
    }
    assert {name: list(inspect.signature(getattr(agentrl, name)).parameters)[1:] for name in signatures} == signatures
    stated = ["unit", "options", "reads", "figures", "reference", "prepare", "first_pass"]
    assert list(inspect.signature(agentrl.objective).parameters) == stated
    fields = {
        "AdvantageInputs": ["token_rewards", "episode", "group", "rewards", "values", "kl", "turn", "parts", "baseline", "state", "at_cut"],
        "AdvantageOptions": ["advantage_std_norm", "reward_clip_range"],
        "Advantages": ["advantages", "returns"],
        "LossInputs": ["new", "old", "advantages", "sequence", "selected", "seed"],
        "LossOptions": ["eps_clip_low", "eps_clip_high"],
        "CorrectionInputs": ["old", "behaviour", "sequence", "same_version", "advantages"],
        "TokenWeights": ["weights", "keep", "bounded"],
        "TokenLosses": ["per_token", "ratio", "clipped", "metrics"],
        "RowScores": ["num_rows", "row", "outputs", "reference", "figures", "columns", "labels"],
        "RowLosses": ["losses", "metrics", "rewards"],
        "StepRows": ["lengths", "sums", "reference"],
        "GroupSummary": ["group_id", "members", "versions", "seconds", "records", "requests", "greedy", "worker"],
    }
    assert {name: [field.name for field in dataclasses.fields(getattr(agentrl, name))] for name in fields} == fields


def test_signatures_of_reward_helpers() -> None:
    assert list(inspect.signature(agentrl.combine_rewards).parameters) == ["parts"]
    assert list(inspect.signature(agentrl.remote_reward).parameters) == ["urls", "timeout_s", "batch_size"]
    for name in ("exact_match", "math_equal", "json_equal"):
        assert list(inspect.signature(getattr(agentrl.verifiers, name)).parameters) == ["completion", "label"]
    assert list(inspect.signature(agentrl.verifiers.matches).parameters) == ["pattern"]
    assert list(inspect.signature(agentrl.verifiers.extract).parameters) == ["pattern", "verifier"]


def test_signatures_of_the_commands() -> None:
    for name, first in (("train", "env"), ("evaluate", "env"), ("check", "env")):
        for function in (getattr(agentrl, name), getattr(agentrl, f"{name}_async")):
            parameters = inspect.signature(function).parameters
            assert list(parameters) == [first, "settings"]
            assert parameters["settings"].kind is inspect.Parameter.VAR_KEYWORD
        assert inspect.iscoroutinefunction(getattr(agentrl, f"{name}_async"))
    assert list(inspect.signature(agentrl.load_run).parameters) == ["path"]


def test_signatures_of_the_parts_of_a_loop() -> None:
    functions = {
        "settings": ["env", "settings"],
        "open_runtime": ["settings"],
        "advantages": ["groups", "settings"],
    }
    assert {name: list(inspect.signature(getattr(agentrl, name)).parameters) for name in functions} == functions
    assert [field.name for field in dataclasses.fields(agentrl.OpenRuntime)] == ["tasks", "engines", "learner"]
    assert [field.name for field in dataclasses.fields(agentrl.PlayedGroup)] == ["summary", "episodes", "kept"]
    assert str(inspect.signature(agentrl.Engines.play)) == "(self, task: 'Task') -> 'PlayedGroup'"
    assert str(inspect.signature(agentrl.Engines.publish)) == "(self, weights: 'WeightUpdate') -> 'None'"
    learner = {name: list(inspect.signature(getattr(Learner, name)).parameters)[1:] for name in ("train", "export_weights", "save_model")}
    assert learner == {"train": ["step", "groups"], "export_weights": ["version", "members"], "save_model": ["path"]}


@pytest.mark.parametrize(
    "first",
    [
        "import agentrl.check",
        "from agentrl.check import report",
        pytest.param("import agentrl", marks=pytest.mark.slow),
        pytest.param("import agentrl.check.report", marks=pytest.mark.slow),
        pytest.param("from agentrl.check.findings import Report", marks=pytest.mark.slow),
        pytest.param("import agentrl.api.commands", marks=pytest.mark.slow),
        pytest.param("import importlib, agentrl.check; importlib.reload(agentrl.check)", marks=pytest.mark.slow),
    ],
)
def test_check_is_a_function_and_a_package_whatever_is_imported_first(first: str) -> None:
    code = f"""{first}
import inspect, agentrl, agentrl.check.findings
from agentrl import check
assert callable(agentrl.check) and agentrl.check is check, agentrl.check
assert list(inspect.signature(check).parameters) == ["env", "settings"]
assert agentrl.check.findings.RULES
try:
    agentrl.check("no_such_file.py")
except agentrl.ConfigError as error:
    print(error.field)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "--agent", result.stderr


def test_errors_are_standard_errors_too() -> None:
    assert issubclass(agentrl.ConfigError, ValueError)
    assert issubclass(agentrl.EnvTimeoutError, TimeoutError)
    assert all(issubclass(getattr(agentrl, name), agentrl.AgentRLError) for name in NAMES if name.endswith("Error"))


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, {', '.join(DRIVER_MODULES)}; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert agentrl.__version__ == pyproject["project"]["version"]

"""Asynchronous reinforcement learning for language-model agents: write an environment, run ``agentrl train``."""

from agentrl.core import interrupts as _interrupts
from agentrl.core import requirements as _requirements

if _interrupts.is_command():  # first, since a person may press Ctrl-C while the rest is imported, and packages may be missing for it
    _interrupts.leave_on_interrupt()
    _requirements.refuse_missing()

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions, Advantages
from agentrl.algo.facts import advantage_estimator, group_filter, group_reward, objective, off_policy_correction, policy_loss
from agentrl.algo.group_rewards import GroupAnswer, GroupAnswers
from agentrl.algo.off_policy import CorrectionInputs, TokenWeights
from agentrl.algo.row_losses import RowLosses, RowScores, StepRows
from agentrl.algo.token_losses import LossInputs, LossOptions, TokenLosses
from agentrl.api.commands import (
    check,
    check_async,
    evaluate,
    evaluate_async,
    iterate,
    load_run,
    make_callable,
    sample,
    sample_async,
    train,
    train_async,
)
from agentrl.api.loop import Engines, OpenRuntime, PlayedGroup, advantages, open_runtime, settings
from agentrl.core.callbacks import (
    BestModelSaved,
    Callback,
    CheckpointWritten,
    EvaluationEnd,
    GroupJudged,
    MetricsRow,
    RunBegin,
    RunEnd,
    StepEnd,
)
from agentrl.core.errors import (
    AgentRLError,
    CallbackError,
    ConfigError,
    DataError,
    EngineError,
    EnvError,
    EnvLoadError,
    EnvResultError,
    EnvTimeoutError,
    LearnerError,
    PluginError,
    RewardError,
    SandboxError,
)
from agentrl.core.summaries import GroupSummary, MemberSummary
from agentrl.core.types import Message, Task
from agentrl.engine.own import Engine
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, SamplingParams, StepResult, StepState
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.env.executor import Completion, Executor, Policy
from agentrl.env.rewards import verifiers
from agentrl.env.rewards.function import combine_rewards
from agentrl.env.rewards.judge import judge
from agentrl.env.rewards.server import remote_reward
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, SandboxSpec
from agentrl.env.timing import timed
from agentrl.env.tools.environment import ToolEnv
from agentrl.env.tools.mcp_servers import McpServer
from agentrl.env.tools.python import run_python
from agentrl.suites.gymnasium import GymEnv
from agentrl.suites.gymnasium_vector import GymVectorEnv
from agentrl.suites.nemo_gym import NemoGymEnv
from agentrl.suites.openenv import OpenEnvEnv

make_callable("agentrl.check")

__version__ = "0.3.0"

__all__ = [
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

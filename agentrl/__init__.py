"""Asynchronous reinforcement learning for language-model agents: write an environment, run ``agentrl train``."""

from agentrl.core.errors import (
    AgentRLError,
    ConfigError,
    DataError,
    EngineError,
    EnvError,
    EnvLoadError,
    EnvResultError,
    EnvTimeoutError,
    LearnerError,
)
from agentrl.core.types import Message, Task
from agentrl.env.adapters.gymnasium import GymEnv
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, SamplingParams, StepResult, StepState

__version__ = "0.1.0"

__all__ = [
    "AgentInstance",
    "AgentRLError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EnvError",
    "EnvLoadError",
    "EnvResultError",
    "EnvTimeoutError",
    "GymEnv",
    "LearnerError",
    "Message",
    "ResetResult",
    "ResetState",
    "SamplingParams",
    "StepResult",
    "StepState",
    "Task",
]

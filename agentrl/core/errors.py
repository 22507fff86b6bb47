"""Every error that agentrl raises on purpose: one flat tree, one class per boundary.

Each class is also a standard exception, so a caller that knows nothing of agentrl can still catch it. All of them
survive pickling, because they cross process boundaries.
"""

from __future__ import annotations

from agentrl.core.redaction import redacted


class AgentRLError(Exception):
    """Base of every error raised on purpose by agentrl; its text shows no credentials of the addresses and words that it quotes."""

    def __str__(self) -> str:
        """Return the message without what looks like a credential."""
        return redacted(super().__str__())


class ConfigError(AgentRLError, ValueError):
    """A setting is wrong; raised before anything heavy is started.

    Args:
        field: The flag or key as the user writes it, for example ``--n-samples-per-prompt``.
        value: The value that was given; `None` where there is none, and then it is not shown.
        problem: What is wrong with it, as a clause ("must be at least 1").
        remedy: What to do instead, as a sentence.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str = "") -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        stop = "" if problem.endswith((".", "?", "!")) else "."  # the text of another library's error may be a sentence
        subject = field if value is None else f"{field} = {value!r}:"
        super().__init__(f"{subject} {problem}" + (f"{stop} {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        """Pickle by the constructor's own arguments."""
        return type(self), (self.field, self.value, self.problem, self.remedy)


class UnknownFlagError(ConfigError):
    """Words of a command line that are no settings.

    Args:
        command: The command, ``agentrl train``.
        answers: Each word with one line that says what to write instead.
    """

    def __init__(self, command: str, answers: tuple[tuple[str, str], ...]) -> None:
        self.command, self.answers = command, answers
        super().__init__("flags", ", ".join(name for name, _ in answers), f"no settings of {command}", answers[0][1])
        width = max(len(name) for name, _ in answers)
        rows = "".join(f"\n  {name:<{width}}  {answer}" for name, answer in answers)
        self.args = (f"{command} has no such setting{'s' * (len(answers) > 1)}:{rows}",)

    def __reduce__(self) -> tuple[type[UnknownFlagError], tuple[str, tuple[tuple[str, str], ...]]]:  # type: ignore[override]
        """Pickle by the constructor's own arguments."""
        return type(self), (self.command, self.answers)


class EnvError(AgentRLError, RuntimeError):
    """User code (environment, reward function, tool) raised an exception."""


class EnvResultError(EnvError, ValueError):
    """User code returned something that cannot be used; the message names file, method and value."""


class ChatTemplateError(EnvResultError):
    """A chat template refuses the messages of an episode, leaves a part of them out, or finds no end."""


class NotScoredError(EnvError):
    """No reward applies to an answer; the episode is no failure, and is neither trained on nor compared with others."""


class EnvTimeoutError(EnvError, TimeoutError):
    """User code did not return before its deadline."""


class SandboxError(EnvError):
    """A sandbox cannot be held on this machine, or did not do what it was asked for."""


class EnvLoadError(ConfigError):
    """The file, module or class named by ``--agent`` cannot be loaded or lacks a method."""


class DataError(ConfigError):
    """A prompt data set is missing, malformed or empty."""


class RewardError(AgentRLError, RuntimeError):
    """A reward function or a reward server failed; never turned into a reward of 0."""


class RemoteError(AgentRLError, ConnectionError):
    """A server that the user named (reward model, environment) failed, or answered with something unusable.

    Args:
        message: Which server, and what went wrong.
        infrastructure: True if another attempt later could go better: no connection, a deadline, a busy or broken server.
            `False`: the request or the answer itself is at fault.
    """

    def __init__(self, message: str, infrastructure: bool = True) -> None:
        self.infrastructure = infrastructure
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, bool]]:
        """Pickle by the constructor's own arguments."""
        return type(self), (str(self), self.infrastructure)


class EngineError(AgentRLError, RuntimeError):
    """An inference engine refused or failed one request."""


class EngineDeadError(EngineError, ConnectionError):
    """An inference engine's process is gone or unusable."""


class RolloutWorkerDeadError(EngineDeadError):
    """A process with episodes is gone, and the engine that it shares with others is not."""


class ContextLengthError(EngineError, ValueError):
    """A prompt leaves no room for a single new token in the model's context."""


class StructureError(EngineError, ValueError):
    """An engine cannot hold a text to the structure that a request asks for."""


class WeightSyncError(AgentRLError, RuntimeError):
    """Weights did not reach an engine, or the engine reports another version than was published."""


class WeightsDifferError(AgentRLError, ArithmeticError):
    """An engine's weights after a publication are not the learner's, and no other engine would help; the message names tensors."""


class TransferAbandonedError(WeightSyncError):
    """A transfer of weights was given up before its end; the engine waits for another one, and generates nothing until then."""


class LearnerError(AgentRLError, RuntimeError):
    """A training step failed."""


class LearnerDeadError(LearnerError, ConnectionError):
    """A learner rank's process is gone."""


class NonFiniteError(LearnerError, FloatingPointError):
    """Loss or gradient stayed non-finite for several steps in a row."""


class MismatchError(LearnerError, ArithmeticError):
    """Engine and learner disagree about the log-probabilities of the same weights by more than ``--max-mismatch``."""


class BatchError(LearnerError, ValueError):
    """Training rows are inconsistent: lengths differ, a version or log-probability is missing."""


class CallbackError(AgentRLError, RuntimeError):
    """A callback raised an exception, was too late or returned something unusable; the message names it and its method."""


class PluginError(AgentRLError, RuntimeError):
    """A user's own estimator, loss or group filter raised an exception or returned something unusable; the message names it."""


class StorageError(AgentRLError, OSError):
    """A file of the run cannot be written, because the disk is full for example."""


class LedgerError(AgentRLError, AssertionError):
    """The accounting of groups does not balance; a bug in agentrl, never the user's."""


class StalenessError(AgentRLError, AssertionError):
    """A group older than the staleness bound reached the learner; a bug in agentrl."""


class TooManyFailuresError(AgentRLError, RuntimeError):
    """Too large a share of episodes failed; the message shows the most frequent causes."""


class NothingToTrainError(AgentRLError, RuntimeError):
    """The filter rejected nearly every group for a long time."""


class StallError(AgentRLError, TimeoutError):
    """Stall of a run: nothing progressed for longer than the stall deadline; the message says who waited for what."""


class CheckpointError(AgentRLError, OSError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is not what its manifest says."""


class ClusterError(AgentRLError, RuntimeError):
    """A worker process could not be started or was lost."""

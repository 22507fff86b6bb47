"""The types everything flows through.

    Task -> Trajectory (turns) -> Group -> [filter] -> queue -> Batch (tensors) -> loss -> weights vN+1

All are frozen; each step returns a new value. Lengths are written as ``# [L]``: P prompt tokens of a turn, T sampled
tokens of a turn. Arrays are read-only NumPy arrays, so that a group pickles fast and is shared without copies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Required, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import BatchError
from agentrl.core.images import PlacedImage
from agentrl.core.teaching import TeacherScores

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
ExpertArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2
"""vLLM raises colder ones to the first without telling the learner, and refuses a request with a hotter one."""


class Message(TypedDict, total=False):
    """One chat message, in the form that chat templates take.

    The first one may have ``tools``: JSON schemas of functions that the model may call. They are described by the model's
    chat template if it can, else in the system message.
    """

    role: Required[str]
    content: Required[Any]
    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    tools: Sequence[Mapping[str, Any]]


Prompt: TypeAlias = str | Sequence[Message]


def as_messages(prompt: Prompt) -> list[Message]:
    """A prompt as chat messages: text is one message of the user."""
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to attempt: what the environment is reset with.

    Attributes:
        prompt: Text, or chat messages to be rendered by the model's chat template.
        label: Whatever the environment needs to judge the answer; passed through untouched.
        id: Stable name, unique within the data set; filled in from the position if empty.
        images: Images that belong to the prompt: paths, data URLs, bytes of a file, PIL images or NumPy arrays.
        seed: Seed for the environment; the members of a group share it.
        metadata: Free-form, passed through to records and to the environment.
        position: Place in the epoch's order, the cursor of the data set; -1 before it is drawn.
        epoch: Which pass over the data set this is, from 0.
    """

    prompt: Prompt
    label: Any = None
    id: str = field(default="", kw_only=True)
    images: tuple[str, ...] = field(default=(), kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    position: int = field(default=-1, kw_only=True)
    epoch: int = field(default=0, kw_only=True)


class Status(StrEnum):
    """Outcome of an episode. Only `FINISHED` and `TRUNCATED` may reach the learner."""

    FINISHED = "finished"
    """The environment said it is over."""
    TRUNCATED = "truncated"
    """A budget ran out (tokens, turns, context) or the environment cut the episode short."""
    ENV_ERROR = "env_error"
    """The environment or its reward raised, or returned something unusable."""
    TIMEOUT = "timeout"
    """A deadline passed."""
    ENGINE_ERROR = "engine_error"
    """The inference engine failed."""
    CANCELLED = "cancelled"
    """The run no longer wanted it."""
    CANCELLED_STRAGGLER = "cancelled_straggler"
    """The episode was much later than the rest of its group, which was closed without it (``--group-quorum``)."""
    NOT_SCORED = "not_scored"
    """No reward applies to the answer: each returned `None`, as functions of TRL's form may."""

    @classmethod
    def _missing_(cls, value: object) -> Status | None:
        return cls.CANCELLED_STRAGGLER if value == "withheld" else None  # its name in records of agentrl 0.2

    @property
    def trainable(self) -> bool:
        """True if a trajectory with this status may be trained on."""
        return self is Status.FINISHED or self is Status.TRUNCATED

    @property
    def failed(self) -> bool:
        """True for the status of a failure."""
        return not self.trainable and self not in (Status.CANCELLED_STRAGGLER, Status.NOT_SCORED)


class FinishReason(StrEnum):
    """Reason for which the engine stopped sampling."""

    STOP = "stop"
    """An end token or a stop string was produced."""
    LENGTH = "length"
    """The token budget of the turn, the episode or the context was used up."""
    ABORTED = "aborted"
    """Nobody waited for the answer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling one turn."""

    temperature: float = 1.0  # divides the logits; log-probabilities are those of the tempered distribution
    top_p: float = 1.0  # nucleus mass; 1 switches it off
    top_k: int = 0  # number of candidates; 0 switches it off
    max_tokens: int = 128  # at most, in this turn; --max-new-tokens, under the name that user code and vLLM know
    stop: tuple[str, ...] = ()  # strings that end the turn; they are kept in the text
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end token
    seed: int | None = None  # of this one request; None leaves it to the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens that an engine sampled for one request; the three arrays have one entry per sampled token.

    Raises:
        BatchError: If the arrays differ in length.
    """

    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T] of the tempered behaviour policy, natural log
    versions: IntArray  # [T] policy version that produced each token
    finish_reason: FinishReason
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    # [P + T - 1, layers, top_k] experts that each token but the last went through; `None` if the engine does not say
    experts: ExpertArray | None = None

    def __post_init__(self) -> None:
        _aligned("Generation", self.token_ids, self.logprobs, self.versions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One exchange: tokens put before the model, tokens it sampled, what the environment paid for it.

    `prompt_ids` holds only what is new: if `fresh` is false, the engine was given every token of the trajectory so
    far followed by `prompt_ids`; if it is true the context was rewritten and `prompt_ids` is all of it.

    Raises:
        BatchError: If sampled tokens, log-probabilities and versions differ in length.
    """

    prompt_ids: IntArray  # [P]
    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T]
    versions: IntArray  # [T]
    finish_reason: FinishReason
    fresh: bool = False
    number: int = 0  # place among the turns of the whole episode, whichever agent's, from 0
    reward: float = 0.0
    step_rewards: tuple[tuple[int, float], ...] = ()  # places in `token_ids`, and what of `reward` is paid there, not at the last token
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # named components of what the environment paid for it
    temperature: float = 1.0
    state_key: str | None = None  # name of the state that it began in; `None`: its prompt
    prompt_text: str = ""  # derived, for people
    text: str = ""  # derived, for people
    info: Mapping[str, float] = field(default_factory=dict)  # numbers the environment logged for this step
    masked: str = ""  # why its branch is recorded and not trained; "" if it is trained
    branch_reason: str = ""  # why it begins a branch beside those before, derived, for people; "" if it begins none
    helper: str = ""  # why the branch that it begins is a helper's and not an agent's, derived, for people; "" if it is an agent's
    rewritten: str = ""  # what its client sent back in its place, derived, for people; "" if nothing was changed
    # [P + T, layers, top_k] experts of the token before the prompt and of all but the last of its own, one less where there is
    # none before; `None` if they are not known
    experts: ExpertArray | None = None
    images: tuple[PlacedImage, ...] = ()  # those in the prompt
    teacher: TeacherScores | None = None  # scores of a served teacher for the sampled tokens
    hinted_ids: IntArray | None = None  # what ``--teacher self`` reads in place of `prompt_ids`; `None` if that is the same

    def __post_init__(self) -> None:
        _aligned("Turn", self.token_ids, self.logprobs, self.versions)

    @property
    def state(self) -> tuple[object, ...]:
        """Equal for turns that began in the same state: its name, or else what the model read before them."""
        read = (self.prompt_ids.tobytes(), *(each.image.key for each in self.images))
        return read if self.state_key is None else (self.state_key,)


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which an episode waited for its environment, for a tool of it, or for the engine."""

    name: str  # reset, step, generate, or a tool within these: `tool:` and its name
    turn: int | None  # number of the turn that it belongs to, as `Turn.number`; `None` for a reset
    start_s: float  # since the episode began
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The turns of one agent in one episode, from reset to end; an episode has one trajectory per agent."""

    trajectory_id: str  # unique in the run
    episode_id: str  # shared by the agents of one multi-agent episode
    group_id: int
    turns: tuple[Turn, ...]  # in order of time
    status: Status
    reward: float | None = None  # the agent's total, None if the episode failed; None is not zero
    score: float | None = None  # success in 0..1, for filtering and evaluation, taken before penalties
    agent: str = ""  # name in a multi-agent episode
    frozen: bool = False  # the agent plays but is not trained
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # named components, summed over the turns
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged by the environment, reduced over the steps of the episode
    error: str | None = None  # what went wrong, for people
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of the whole episode: generate_s, env_s, total_s
    unanswered: Turn | None = None
    # what the policy would have read next where a limit cut the episode, without sampled tokens; `None` if nobody wants to know
    unread: Turn | None = None
    overflowed: bool = False  # the episode ended because an observation left no room for another turn
    messages: tuple[Message, ...] = ()  # what was read and written, as chat messages; empty where raw text was read
    # raw scores by reward model: one for the whole, or of a process reward model one per trained turn
    model_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()  # what the whole episode waited for, in the order in which it ended; empty if that is not known
    images: tuple[tuple[int, Any], ...] = ()  # of observations: number of the turn that reads it, and image
    forked_from: str = ""  # id of the episode whose first turns it shares; "" if it was played from its beginning
    forked_turns: int = 0  # turns of the whole episode that it shares with that one

    def __post_init__(self) -> None:
        if self.status.trainable and (self.reward is None or not math.isfinite(self.reward)):
            raise BatchError(f"trajectory {self.trajectory_id}: status {self.status} needs a finite reward, got {self.reward!r}")

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, without those that are not to be trained."""
        return sum(len(turn.token_ids) for turn in self.turns if not turn.masked)

    @property
    def trainable(self) -> bool:
        """True if the trajectory may reach the learner: it ended normally, holds sampled tokens, and its agent is trained."""
        return self.status.trainable and not self.frozen and self.num_tokens > 0

    @property
    def truncated_by_length(self) -> bool:
        """True if a token budget cut the last turn."""
        return bool(self.turns) and self.turns[-1].finish_reason is FinishReason.LENGTH

    @property
    def cut_short(self) -> bool:
        """True if a budget or the environment ended the episode before its end."""
        return self.truncated_by_length or self.status is Status.TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one task: the unit of filtering, queueing and accounting."""

    group_id: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    greedy: tuple[Trajectory, ...] = ()  # of an episode beside the members, sampled greedily: a baseline for them, and never trained
    record: int = 0  # episodes that are recorded, the first ones

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        """The trajectories that may be trained on."""
        return tuple(t for t in self.trajectories if t.trainable)

    def first_episodes(self, count: int) -> tuple[Trajectory, ...]:
        """The trajectories of the first `count` episodes; those that are recorded are the first ones."""
        wanted = list(dict.fromkeys(t.episode_id for t in self.trajectories))[:count]
        return tuple(t for t in self.trajectories if t.episode_id in wanted)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version among the trainable sampled tokens, `None` without any."""
        found = [turn.versions for t in self.trainable for turn in t.turns if len(turn.versions) and not turn.masked]
        versions = np.concatenate(found) if found else None
        return None if versions is None else (int(versions.min()), int(versions.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling:
    """Says that a group is played to measure the model, not to train it, and in what it differs from the run's other groups."""

    name: str  # begins the ids of its trajectories, so that they are no others' of the run
    seed: int  # in place of the run's, so that training and measuring draw different numbers
    temperature: float | None = None  # in place of the run's; 0 takes the most likely token each time, None leaves it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Permission to run one group, handed out by admission."""

    group_id: int  # order of admission, from 0; the queue is first-in first-out in this order
    task: Task
    n_samples_per_prompt: int
    version: int  # of the policy that was live at admission
    attempt: int = 0  # a group that failed is tried again under the same id
    record: int = 0  # members to render as JSON records
    eval_sampling: EvalSampling | None = None  # set if the group is no part of the training
    greedy: bool = False  # True if an episode beside the members takes the most likely token each time
    with_messages: bool = False  # the records hold the episodes as chat messages too, where they are known
    # mean and standard deviation with which the scores of each reward model are normalised
    reward_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def num_episodes(self) -> int:
        """Episodes to play: the members, and the greedy one behind them."""
        return self.n_samples_per_prompt + self.greedy


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on their order, so that a run and a resumed run agree."""
    # With a separator, so that the parts 1, 23 and 12, 3 give two seeds.
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def ints(values: Sequence[int] | IntArray) -> IntArray:
    """A read-only int32 array of `values`."""
    return _frozen(np.asarray(values, dtype=np.int32))


def floats(values: Sequence[float] | FloatArray) -> FloatArray:
    """A read-only float32 array of `values`."""
    return _frozen(np.asarray(values, dtype=np.float32))


def experts_of(values: npt.NDArray[Any]) -> ExpertArray:
    """A read-only copy of recorded experts, in their data type."""
    copied = values.copy()
    copied.setflags(write=False)
    return copied


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.flags.writeable:
        # A view could still be written to through the array that it is a part of.
        array = array.copy() if array.base is not None else array
        array.setflags(write=False)
    return array


def _aligned(owner: str, tokens: IntArray, logprobs: FloatArray, versions: IntArray) -> None:
    if not len(tokens) == len(logprobs) == len(versions):
        raise BatchError(
            f"{owner}: every sampled token needs one log-probability and one version, "
            f"got {len(tokens)} tokens, {len(logprobs)} log-probabilities, {len(versions)} versions"
        )

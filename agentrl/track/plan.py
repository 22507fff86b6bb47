"""Settings of what is kept of a run: its records, its metrics and its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from agentrl.core.recording import RecordBudget
from agentrl.core.settings import Positive, ResumeMayChange, UserFile

Record = Literal["none", "sample", "all"]
RunRecord: TypeAlias = Literal["none", "sample", "all"] | Positive
"""Values of ``--record``; a number is that of MiB."""

MIB = 2**20
RECORD_BYTES, TOKEN_BYTES = 2000, 25
"""Size that the record of an episode is taken to have before one was written: of its frame, and of each token that it may sample."""

SERVICES = ("wandb", "trackio")
"""Services of metrics, which are the names of their packages too."""


def is_service(sink: str) -> bool:
    """Return True for a value of ``--sink`` that names a service and its project."""
    service, _, project = sink.partition(":")
    return service in SERVICES and bool(project)


def num_recorded(record: RunRecord, episodes: int) -> int:
    """Return how many of a group's `episodes` are recorded in any case."""
    return {"none": 0, "all": episodes}.get(str(record), 1)


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Records and metrics of a run."""

    tensorboard: Annotated[bool, ResumeMayChange] = True
    """Write TensorBoard event files."""
    sink: Annotated[tuple[str, ...], ResumeMayChange, UserFile] = ()
    """Further sinks of metrics; may be given several times: ``wandb:PROJECT`` of Weights & Biases (``pip install wandb``),
    ``trackio:PROJECT`` (``pip install trackio``), or a class of your own, ``file.py:Name``. See ``docs/callbacks.md``."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Records of a training run, and its model."""

    record: Annotated[RunRecord, ResumeMayChange] = 256.0
    """Trajectories written to ``trajectories.jsonl``: ``none``; ``sample``, one per group; ``all``; or a number: all, as far as so many MiB
    of ``trajectories.jsonl`` and ``requests.jsonl`` together allow, of which each step has an equal share and what the steps before
    it left, else one per group. In evaluations a number records one of each task, to ``eval_trajectories.jsonl``."""
    annotate: Annotated[bool, ResumeMayChange] = True
    """Write what the learner knows of every token of the recorded trajectories to ``annotations.jsonl``: log-probability, ratio, advantage,
    entropy, share of the loss, and whether and why it was masked. See ``docs/viewer.md``."""
    callback: Annotated[tuple[str, ...], ResumeMayChange, UserFile] = ()
    """Class that follows the run, ``file.py:Name``; may be given several times. See ``docs/callbacks.md``."""
    save_model: Annotated[bool, ResumeMayChange] = True
    """Write the final policy as a Hugging Face directory."""
    push_to_hub: str = ""
    """Repository ``ORGANISATION/NAME`` that the final policy is uploaded to, on the Hugging Face hub or the one at ``HF_ENDPOINT``; it is
    made, private, if there is none. Needs a token (``HF_TOKEN``)."""


@dataclass(frozen=True, kw_only=True)
class TrackPlan:
    """The plan of what a run shows and keeps: sections as they are, and values of others.

    Attributes:
        track: Section with the metrics.
        record: Section with the records and the model.
        num_steps: Steps of the run.
        n_samples_per_prompt: Episodes of a group.
        max_new_tokens: Tokens of a turn at most.
        max_turns: Turns of an episode at most.
        max_episode_tokens: Tokens of an episode at most; 0: the context decides.
        max_model_len: Context length that engines are asked for; 0: their own choice.
    """

    track: TrackConfig = field(default_factory=TrackConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    num_steps: int
    n_samples_per_prompt: int
    max_new_tokens: int = 0
    max_turns: int = 0
    max_episode_tokens: int = 0
    max_model_len: int = 0

    def record_budget(self) -> RecordBudget:
        """Return the account of a run's records, of which there are none yet."""
        record, samples = self.record.record, self.n_samples_per_prompt
        return RecordBudget(
            samples=samples,
            least=num_recorded(record, samples),
            budget_bytes=0.0 if isinstance(record, str) else record * MIB,
            num_steps=self.num_steps,
            episode_bytes=RECORD_BYTES + TOKEN_BYTES * self.max_new_tokens,
        )

"""Every setting of a run, with its default and what it means. Frozen; resolved once; nothing changes it during a run.

A section is one dataclass. The range of a setting, its other names and whether it may differ on resumption stand in its annotation, and
the docstring under it is what ``--help`` and ``docs/configuration.md`` show. Names are unique over the sections of a command, so a flag
needs no prefix: ``--learning-rate`` is `LearnerConfig.learning_rate`. A command is a dataclass whose fields are sections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from agentrl.algo.facts import facts_of
from agentrl.algo.options import option_names
from agentrl.algo.plan import KINDS, AlgoConfig, AlgoSettings, chosen_functions
from agentrl.config.sections import sections_of, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import restorable
from agentrl.core.recording import RecordBudget
from agentrl.core.settings import (
    Alias,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    ResumeMayChange,
)
from agentrl.engine.plan import EngineConfig
from agentrl.env.plan import DataConfig, ImageConfig, IsolationConfig, SandboxConfig
from agentrl.evaluation.plan import EvalConfig
from agentrl.flow.plan import FlowConfig
from agentrl.learner.plan import LearnerConfig, LoraConfig
from agentrl.rollout.plan import EndpointConfig, ModelConfig, PartnerConfig, PenaltyConfig, RewardConfig, RolloutConfig, SamplingConfig
from agentrl.suites.registry import scheme_of
from agentrl.track.plan import MIB, RECORD_BYTES, TOKEN_BYTES, RecordConfig, TrackConfig, num_recorded
from agentrl.weights.plan import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The environment, the seed, and the processes of a run."""

    agent: Annotated[str, Alias("--agent-func-path")] = ""
    """Environment or reward to train on: ``file.py``, ``file.py:Name``, ``package.module:Name``, ``gym:ID``; or ``--remote-rm-url``."""
    observe: Literal["text", "pixels"] = "text"
    """Observations of ``--agent gym:ID``: ``text``, or ``pixels``, the pictures of its ``render_mode`` ``rgb_array``."""
    seed: CountOrZero = 0
    """Seed of the whole run: order of tasks, sampling, initialisation of new layers."""
    runtime: Annotated[Literal["auto", "ray", "local"], ResumeMayChange] = "auto"
    """``ray`` runs engines and learner ranks as Ray actors; ``local`` runs the same classes in this process, for debugging. ``auto``:
    ``ray`` for training, and elsewhere ``local`` for one engine."""
    device: Annotated[Literal["auto", "cpu", "cuda"], ResumeMayChange] = "auto"
    """Kind of device that engines and learner compute on. ``auto``: GPUs where there are any; a cluster that is joined (``--ray-address``)
    must have some."""
    ray_address: Annotated[str, ResumeMayChange] = ""
    """Ray cluster to join (``auto`` or ``host:port``). Empty starts a private cluster on loopback."""
    cluster_timeout_s: Annotated[NonNegative, ResumeMayChange] = 120.0
    """Seconds that a cluster which is joined has for its machines to come, until it has the GPUs and CPUs that the run asks for."""
    stall_timeout_s: Annotated[Positive, ResumeMayChange] = 600.0
    """Stop with a diagnosis if no group finishes and no step ends for this many seconds."""
    debug: Annotated[bool, ResumeMayChange] = False
    """Show tracebacks and the output of worker processes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent", observing(self.agent, self.observe))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, checkpoints, evaluations, and place of a run."""

    num_steps: Annotated[Count, ResumeMayChange, Alias("--max-steps")] = 50
    """Optimizer steps to train for."""
    run_dir: Annotated[Path | None, ResumeMayChange, Alias("--output-dir")] = None
    """Directory of everything that this run writes. Default: ``runs/<environment>-<date>-<time>``."""
    save_every: Annotated[CountOrZero, ResumeMayChange, Alias("--save-steps")] = 0
    """Steps between checkpoints, for ``--resume``; the last step gets one too. 0: none."""
    keep_checkpoints: Annotated[Count, ResumeMayChange, Alias("--save-total-limit", "--max-ckpt-num")] = 2
    """Checkpoints to keep; older ones are removed when a newer one is complete."""
    checkpoint_upload: Annotated[str, ResumeMayChange] = ""
    """Folder for copies of complete checkpoints, made while the run goes on: an address (``s3://bucket/run``, ``gs://``, ``az://``) or a
    path. As many are kept as in the run's directory. ``--resume`` takes this address, and ``--resume auto`` looks there too."""
    upload_timeout_s: Annotated[Positive, ResumeMayChange] = 1800.0
    """Seconds that one copy to ``--checkpoint-upload`` may take, and that the end of a run waits for the last one."""
    stop_timeout_s: Annotated[NonNegative, ResumeMayChange] = 15.0
    """Seconds that a first SIGINT or SIGTERM leaves to the step under way and a checkpoint after it; then the run ends without."""
    max_learner_restarts: Annotated[CountOrZero, ResumeMayChange] = 3
    """Times that a run goes on from its last checkpoint by itself when a learner rank dies; without a checkpoint it ends."""
    resume: Annotated[str, ResumeMayChange] = ""
    """Directory of a run to continue with its own settings, or its ``--checkpoint-upload``; or ``auto``: continue the run in ``--run-dir``
    if there is one."""
    check_env: Annotated[bool, ResumeMayChange] = True
    """Play one scripted episode before anything heavy starts, and end the run if the environment breaks its contract there. Skipped
    with ``--resume``, ``--ray-address`` and ``--env-isolation process``."""
    certify: Annotated[bool, ResumeMayChange] = True
    """Compare the learner's attention with the model's on a small twin while the run starts, and refuse a model that it computes wrongly,
    as ``agentrl certify`` does. The result is kept; types of models that are known to be exact are not tried."""
    check_memory: Annotated[bool, ResumeMayChange] = True
    """Refuse to start on GPUs whose memory is certainly too small, as ``agentrl plan`` computes it."""
    max_mismatch: Annotated[NonNegative | Literal["auto", "none"], ResumeMayChange] = "auto"
    """Stop if the log-probabilities that engine and learner give tokens of the same weights differ by more than this on average, nats, in
    the first step, or in the first with published weights; warn later. ``auto``: 0.01 where both compute in float32, else 0.1. 0 or
    ``none``: never."""
    audit_every: Annotated[CountOrZero, ResumeMayChange] = 100
    """Steps between two audits, the first step among them: one row of the batch is computed again, alone, in float32 with eager attention,
    and compared with what the learner made of it (``audit/...``). 0: none."""
    eval_every: Annotated[CountOrZero, ResumeMayChange, Alias("--eval-steps")] = 0
    """Steps between two evaluations during training; the last step gets one too. 0: none."""
    eval_at_start: Annotated[bool, ResumeMayChange] = False
    """Evaluate once before the first step as well."""
    eval_engines: Annotated[CountOrZero, ResumeMayChange] = 0
    """Engines of their own for evaluations, beside those of ``--num-engines``: each evaluation begins there with the weights of its step,
    and neither the learner nor the other engines wait for it. 0: evaluations run on the engines that generate for training."""
    keep_best: Annotated[str, ResumeMayChange] = ""
    """Figure by which the best model is kept in ``RUN_DIR/best``: ``eval/score``, ``eval/reward``, ``eval/pass@1``, or one kind's,
    ``eval/score/hard``; higher is better. Empty: none is kept."""

    def evaluates_after(self, step: int) -> bool:
        """Return True if there is an evaluation after `step` steps."""
        return bool(self.eval_every) and (step % self.eval_every == 0 or step == self.num_steps)


@dataclass(frozen=True, kw_only=True)
class PlaySettings:
    """Sections of every command that plays episodes on engines."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    partner: PartnerConfig = field(default_factory=PartnerConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PlaySettings):
    """Sections of ``agentrl train``. Those of the options of its algorithms are there while it is loaded; see `TrainConfig.schema`."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    record: RecordConfig = field(default_factory=RecordConfig)

    def record_budget(self) -> RecordBudget:
        """Return the account of a run's records, of which there are none yet."""
        record, samples = self.record.record, self.sampling.n_samples_per_prompt
        return RecordBudget(
            samples=samples,
            least=num_recorded(record, samples),
            budget_bytes=self.record.record_mib * MIB if record == "budget" else 0.0,
            num_steps=self.training.num_steps,
            episode_bytes=RECORD_BYTES + TOKEN_BYTES * self.rollout.max_new_tokens,
        )

    def mismatch_limit(self, device: Literal["cpu", "cuda"]) -> float | None:
        """Return the limit of ``--max-mismatch`` on this kind of device; `None` if nothing is judged, as with truncated sampling."""
        asked, truncated = self.training.max_mismatch, self.rollout.top_p < 1.0 or self.rollout.top_k > 0
        if asked in (0, "none") or truncated:  # the learner scores the whole distribution
            return None
        if not isinstance(asked, str):
            return asked
        dtypes = {self.engine.dtype(device), self.learner.dtype(device)}
        # Each of these has engine and learner compute something else on purpose.
        apart = self.engine.engine_args or self.learner.load_in_4bit or self.lora.lora_dropout or self.weights.kv_on_publish == "keep"
        return 0.01 if dtypes == {"float32"} and not apart else 0.1

    @classmethod
    def schema(cls, given: Mapping[str, Any]) -> type[Any]:
        """Return the sections to load: those of training, and one for the options of the estimator, the loss and the correction each.

        Args:
            given: Values of the settings that choose the algorithms, by name.

        Raises:
            ConfigError: If an algorithm cannot be used, or has an option with the name of a setting.
        """
        chosen = _chosen_functions(given)
        options = {section: facts_of(function).options for section, function in chosen.items()}
        taken = settings_of(cls)
        for section, kind in options.items():
            for name in option_names(kind):
                if name in taken:
                    problem = f"{kind.__name__} has an option {name}, and there is a setting of that name"
                    raise ConfigError(f"--{section}", chosen[section].__name__, problem, "Give the option another name.")
        return _with_options(tuple(options.items()))

    @classmethod
    def loaded(cls, sections: Any) -> TrainConfig:
        """Return the settings from the form in which they were loaded; see `schema`."""
        parts = {name: getattr(sections, name) for name in sections_of(cls)}
        options = {name: value for part in KINDS for name, value in vars(getattr(sections, part.section)).items()}
        return cls(**{**parts, "algo": AlgoConfig(**vars(sections.algo), options=options)})

    def to_load(self, schema: type[Any]) -> Any:
        """Return the settings in the form of `schema`."""
        algo = {name: value for name, value in vars(self.algo).items() if name != "options"}
        parts = {name: getattr(self, name) for name in sections_of(type(self))} | {"algo": AlgoSettings(**algo)}
        kinds = {part.section: sections_of(schema)[part.section] for part in KINDS}
        own = {
            name: kind(**{option: self.algo.options[option] for option in option_names(kind) if option in self.algo.options})
            for name, kind in kinds.items()
        }
        return schema(**parts, **own)


def _chosen_functions(given: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions that settings choose; of a run that goes on, a missing file can be restored from its copy."""
    try:
        return chosen_functions(given)
    except ConfigError as error:
        place = given.get("run_dir") if given.get("resume") == "auto" else given.get("resume")
        raise restorable(error, Path(place)) if place else error from None


@cache
def _with_options(options: tuple[tuple[str, type[Any]], ...]) -> type[Any]:
    """The sections of training with others behind them."""
    parts = {**sections_of(TrainConfig), "algo": AlgoSettings, **dict(options)}
    fields = [(name, kind, field(default_factory=kind)) for name, kind in parts.items()]
    return make_dataclass("TrainSections", fields, frozen=True, kw_only=True)


def observing(agent: str, observe: str) -> str:
    """Return the name of an environment with what it is to show the model, ``text`` or ``pixels``.

    Raises:
        ConfigError: If pictures are asked for, and it is no environment of gymnasium.
    """
    if observe == "text" or not agent or "observe=" in agent.partition("?")[2]:
        return agent
    if not scheme_of(agent).has_pictures:
        remedy = 'In a class of yours that inherits from GymEnv write observe = "pixels"; other environments return images themselves.'
        raise ConfigError("--observe", observe, f"is for gym:ID, and --agent is {agent!r}", remedy)
    return f"{agent}{'&' if '?' in agent else '?'}observe={observe}"

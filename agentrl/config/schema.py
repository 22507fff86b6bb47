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
from agentrl.assets import located_model
from agentrl.config.algorithm import KINDS, AlgoConfig, AlgoSettings, chosen_functions
from agentrl.config.engine import EngineConfig, WeightsConfig
from agentrl.config.episodes import EndpointConfig, IsolationConfig, RolloutConfig, SamplingConfig
from agentrl.config.flow import FlowConfig
from agentrl.config.images import ImageConfig, observing
from agentrl.config.learner import LearnerConfig
from agentrl.config.lora import LoraConfig
from agentrl.config.partner import PartnerConfig
from agentrl.config.record import MIB, RECORD_BYTES, TOKEN_BYTES, RecordConfig, TrackConfig, num_recorded
from agentrl.config.reward import PenaltyConfig, RewardConfig
from agentrl.config.sandboxes import SandboxConfig
from agentrl.config.sections import sections_of, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import restorable
from agentrl.core.recording import RecordBudget
from agentrl.core.settings import (
    Alias,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    ResumeMayChange,
    TemperatureOrZero,
    listed,
)


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
class DataConfig:
    """The tasks to train and to evaluate on."""

    prompts: Annotated[str, Alias("--prompt-data", "--dataset-name")] = ""
    """JSONL, CSV or Parquet file, folder of such files, or Hugging Face data set (``name`` or ``name@configuration``); several with commas
    between them. Empty: the environment's own ``tasks()``."""
    prompt_probs: Annotated[str, Alias("--prompt-data-probs")] = ""
    """Proportions in which to draw from several ``--prompts``: ``0.7,0.3``. Empty: they are one collection."""
    prompt_split: str = "train"
    """Split to load when ``--prompts`` names a Hugging Face data set, or a folder whose files are named after their splits."""
    eval_prompts: Annotated[str, Alias("--eval-dataset")] = ""
    """Tasks to evaluate on, in the same forms as ``--prompts``. Empty: the environment's own ``eval_tasks()``, else ``--eval-size``."""
    eval_split: str = "test"
    """The same for ``--eval-prompts``."""
    eval_size: Annotated[CountOrZero, Alias("--num-tasks", command="eval")] = 0
    """Tasks to evaluate on: of ``--eval-prompts`` or ``eval_tasks()`` at most so many (0: all), else so many held out of the training
    tasks, chosen by the seed and never trained on."""
    input_key: str = "prompt"
    """Column that holds the prompt: text or chat messages. ``a.b``: the key ``b`` in column ``a``."""
    label_key: str = "label"
    """Column that holds the label, also as ``a.b``; a missing ``label`` gives ``None``."""
    image_key: str = "images"
    """Column that holds the images of the prompt, a list of them or one; a data set may lack it."""
    input_template: str = ""
    """Text around each plain-text prompt of a data set, with ``{}`` in its place; ``{{`` and ``}}`` stand for braces."""
    apply_chat_template: bool = True
    """Render a plain-text prompt as one user message with the chat template; off: use the text as it is."""
    system_prompt: str = ""
    """System message put before every chat prompt."""
    remote_rm_url: Annotated[str, Alias("--reward")] = ""
    """Judge of single answers to ``--prompts``, without ``--agent``: URLs of reward servers with commas between, or a reward's file. With a
    program as ``--agent`` (``harness:NAME``, ``command:CMD``): the file of the reward function that judges what the program prints."""
    shuffle: bool = True
    """Draw tasks in an order derived from the seed and the epoch; off: in the given order."""

    @property
    def prompt_sources(self) -> tuple[str, ...]:
        """The data sets that `prompts` names."""
        return listed(self.prompts)

    @property
    def prompt_weights(self) -> tuple[float, ...]:
        """The numbers in `prompt_probs`."""
        return tuple(map(float, listed(self.prompt_probs)))

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """The data sets that `eval_prompts` names."""
        return listed(self.eval_prompts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    model: Annotated[str, Alias("--pretrain", "--model-name-or-path")] = ""
    """Hugging Face directory or hub name. Empty: the tiny chat model that ships with agentrl; ``tiny-vision``: that which reads images."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""
    chat_template: str = ""
    """File of a Jinja chat template to use instead of the one that comes with the model's tokenizer."""
    chat_template_kwargs: str = ""
    """Variables for the chat template, as a JSON object: ``{"reasoning_effort": "low"}``."""
    thinking: Literal["auto", "on", "off", "keep"] = "auto"
    """``on`` and ``off`` set the chat template's own switch for thinking, ``keep`` the one that keeps the thinking of earlier turns in the
    prompt; refused for a template without such a switch. ``auto``: as the template does by itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", located_model(self.model))


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of the model. Choose evaluation tasks with ``--eval-prompts``, the environment's
    ``eval_tasks()`` or ``--eval-size``.
    """

    eval_samples: Annotated[Count, ResumeMayChange, Alias("--eval-n-samples-per-prompt", "--n-samples-per-prompt")] = 4
    """Episodes per task; pass@k is estimated for k up to this."""
    eval_temperature: Annotated[TemperatureOrZero | None, ResumeMayChange, Alias("--temperature")] = None
    """Sampling temperature of evaluations, at most 2; 0 takes the most likely token each time. Unset: ``--temperature``."""
    eval_by: Annotated[str, ResumeMayChange] = ""
    """Key of the tasks' metadata by which figures are given apart. Empty: ``kind``, else ``source``, where tasks have them."""
    eval_pass_score: Annotated[Fraction, ResumeMayChange] = 1.0
    """Score from which an episode counts as solved in pass@k."""


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

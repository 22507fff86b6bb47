"""Settings of the methods in `agentrl.tune`: sections that all of them share, and one section of each method's own.

Names are those of ``agentrl train`` where the idea is the same. Field names are unique over the sections of a method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from agentrl.algo import facts
from agentrl.algo.objectives.distill import DistillOptions
from agentrl.algo.objectives.dpo import DpoOptions
from agentrl.algo.objectives.kto import KtoOptions
from agentrl.algo.objectives.orpo import OrpoOptions
from agentrl.algo.objectives.reward_model import RewardModelOptions
from agentrl.algo.objectives.sft import SftOptions
from agentrl.algo.options import option_names
from agentrl.config.sections import sections_of, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import is_plugin, kept_in_run
from agentrl.core.settings import Alias, Count, CountOrZero, Fraction, NonNegative, Positive, ResumeMayChange, UserFile
from agentrl.env.plan import ImageConfig
from agentrl.learner.plan import ComputeConfig, LoraConfig
from agentrl.rollout.plan import ModelConfig
from agentrl.track.plan import TrackConfig


@dataclass(frozen=True, kw_only=True)
class TuneRunConfig:
    """The length of the run, and the place of its results."""

    num_steps: Annotated[CountOrZero, ResumeMayChange] = 0
    """Optimizer steps to train for; 0: as many as ``--num-epochs`` gives."""
    num_epochs: Annotated[Positive, ResumeMayChange] = 1.0
    """Passes over the data, where ``--num-steps`` is not given."""
    seed: CountOrZero = 0
    """Seed of the whole run: order of the data, choice of held-out rows, initialisation of new layers, dropout."""
    run_dir: Annotated[Path | None, ResumeMayChange] = None
    """Directory of everything that this run writes. Default: ``runs/<method>-<date>-<time>``."""
    save_every: Annotated[CountOrZero, ResumeMayChange] = 0
    """Steps between two checkpoints, from which ``--resume`` continues; 0: none but that of a run which a signal ends."""
    keep_checkpoints: Annotated[Count, ResumeMayChange] = 2
    """Checkpoints to keep; older ones are removed when a newer one is complete."""
    resume: Annotated[str, ResumeMayChange] = ""
    """Directory of a run to continue with its own settings, or ``auto``: continue the run in ``--run-dir`` if there is one."""
    num_ranks: Annotated[Count, ResumeMayChange, Alias("--num-learners")] = 1
    """Ranks, each a process of this machine. Under torchrun or ``srun`` the ranks are theirs, and this is left out."""
    runtime: Annotated[Literal["auto", "ray", "local"], ResumeMayChange] = "auto"
    """``ray`` places the ranks on a Ray cluster, a private one on this machine unless ``--ray-address`` names another; ``local`` starts
    them here. ``auto``: ``ray`` with ``--ray-address``, else ``local``."""
    ray_address: Annotated[str, ResumeMayChange] = ""
    """Ray cluster to join (``auto`` or ``host:port``)."""
    record_rows: Annotated[CountOrZero, ResumeMayChange] = 16
    """Rows at most whose tokens are written to ``rows.jsonl`` with their losses before the first step and after the last, half of them held
    out where there are such, together at most 16,384 tokens; 0: none. See ``docs/viewer.md``."""
    debug: Annotated[bool, ResumeMayChange] = False
    """Show tracebacks."""


@dataclass(frozen=True, kw_only=True)
class TuneDataConfig:
    """The rows to train and to evaluate on."""

    data: str = ""
    """JSONL, CSV, Parquet or text file, folder of such files, or Hugging Face data set (``name`` or ``name@configuration``); several with
    commas between them. Required."""
    data_probs: str = ""
    """Proportions in which to draw from several ``--data``: ``0.7,0.3``. Empty: they are one collection."""
    data_split: str = "train"
    """Split to load when ``--data`` names a Hugging Face data set, or a folder whose files are named after their splits."""
    eval_data: str = ""
    """Rows to evaluate on, in the same forms as ``--data``. Empty: ``--eval-size``."""
    eval_split: str = "test"
    """The same for ``--eval-data``."""
    eval_size: CountOrZero | None = None
    """Rows to evaluate on: of ``--eval-data`` at most so many (0: all), else so many held out of ``--data``, chosen by the seed. Default:
    all of ``--eval-data``; else one of a hundred rows, at least 20, and none of fewer than 200 rows."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be used: ``stop`` with the first, which is named, or ``skip`` them; they are counted, and the first ones shown."""
    max_bad_rows: Fraction = 0.1
    """Share of the rows of a source that ``--bad-rows skip`` may skip; with more the run is refused."""
    max_length: Annotated[int, Ge(8)] = 1024
    """Tokens of a row at most, prompt included."""
    overlong: Literal["drop", "cut", "split"] = "drop"
    """Rows above ``--max-length``: ``drop`` them, ``cut`` off their end, or ``split`` plain text into several rows. They are counted."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text or a list of chat messages."""
    input_template: str = ""
    """Text around each plain-text prompt, with ``{}`` in its place; ``{{`` and ``}}`` stand for braces."""
    apply_chat_template: bool = True
    """Render a plain-text prompt as one user message with the chat template; off: use the text as it is."""
    system_prompt: str = ""
    """System message put before every chat that has none."""
    eos_token: str = ""
    """Token that ends a text, and an answer if the chat template writes no end, in place of the tokenizer's: for base models, whose chat
    template ends turns with another token. It is written to the tokenizer and the generation settings of the model."""
    token_cache: Annotated[str, ResumeMayChange] = ""
    """Directory in which the tokens of 1000 rows and more are kept for other runs; ``none``: they are not. Default: ``agentrl/rows`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    shuffle: bool = True
    """Take rows in an order derived from the seed and the epoch; off: in the given order."""


@dataclass(frozen=True, kw_only=True)
class DialogueDataConfig(TuneDataConfig):
    """The rows to train and to evaluate on: chats, prompts with completions, or texts."""

    form: Literal["auto", "chat", "completion", "text"] = "auto"
    """Form of the rows. ``auto``: by the columns of the first row, forms of published data sets among them; docs/tune.md lists them."""
    messages_key: str = "messages"
    """Column that holds a chat: a list of messages with role and content."""
    completion_key: str = "completion"
    """Column that holds the answer to the prompt: text, or a list of one assistant message."""
    text_key: str = "text"
    """Column that holds plain text."""


@dataclass(frozen=True, kw_only=True)
class SftDataConfig(DialogueDataConfig):
    """The rows to train and to evaluate on: chats, prompts with completions, or texts."""

    quality_key: str = ""
    """Column with the quality or reward of a row, a number or a word, to be written into its prompt (conditional SFT). Empty: off."""
    quality_template: str = "{prompt} <quality {quality}>"
    """Form in which ``--quality-key`` is written into the prompt's last user message, or into a plain-text prompt."""


@dataclass(frozen=True, kw_only=True)
class PairsDataConfig(TuneDataConfig):
    """The rows to train and to evaluate on: pairs of a chosen and a rejected answer."""

    chosen_key: str = "chosen"
    """Column with the preferred answer: text, a list of one assistant message, or a whole chat that begins as the rejected one."""
    rejected_key: str = "rejected"
    """Column with the other answer, in the same forms."""


@dataclass(frozen=True, kw_only=True)
class RewardDataConfig(PairsDataConfig):
    """The rows to train and to evaluate on: pairs of a chosen and a rejected answer, with a margin if there is one."""

    margin_key: str = ""
    """Column with the margin by which the chosen answer is to score higher. Empty: no margins."""


@dataclass(frozen=True, kw_only=True)
class LabelledDataConfig(PairsDataConfig):
    """The rows to train and to evaluate on: answers that are desirable or not; a pair counts as one of each."""

    completion_key: str = "completion"
    """Column that holds the answer to the prompt: text, or a list of one assistant message."""
    label_key: str = "label"
    """Column that is true for a desirable answer."""


@dataclass(frozen=True, kw_only=True)
class StepsDataConfig(TuneDataConfig):
    """The rows to train and to evaluate on: answers in steps, each labelled."""

    steps_key: str = "completions"
    """Column with the steps of the answer, a list of texts."""
    label_key: str = "labels"
    """Column with a label for each step: true or false, or the probability that it is good."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ComputeConfig):
    """Batches, the optimizer, and the ways in which ranks compute a step."""

    batch_size: Count = 32
    """Rows of an optimizer step, over all ranks."""
    micro_batch_tokens: Annotated[CountOrZero, ResumeMayChange] = 0
    """Tokens that go through the model at once on one rank; a longer row or pair goes alone. More take more memory; the loss is the same.
    0: 1024 on a CPU for a model from 5e7 parameters, else 8192."""
    micro_batch_size: Annotated[CountOrZero, ResumeMayChange] = 0
    """Earlier form of ``--micro-batch-tokens``: so many times ``--max-length`` tokens."""
    learning_rate: NonNegative = 0.0
    """Peak learning rate; 0: by method and size of the model, ten times as much with ``--lora-rank``. ``--dry-run`` shows it."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up; ``linear`` and ``cosine`` end behind the last step, as in transformers."""
    zero_stage: Annotated[int, Ge(0), Le(3), ResumeMayChange] = 0
    """DeepSpeed ZeRO stage; in bfloat16 0 means 1. One rank in float32 without ZeRO trains without DeepSpeed."""
    gradient_checkpointing: Annotated[bool, ResumeMayChange] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Alias("--learner-dtype")] = "auto"
    """Data type of the computation. ``auto``: float32 on CPU, bfloat16 on GPU and where ``--weight-dtype`` is."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16``: the same as ``--dtype bfloat16``, whose updates are those of float32 weights."""
    liger_kernels: bool = False
    """Refused: the learner has no such kernels."""


@dataclass(frozen=True, kw_only=True)
class TuneEvalConfig:
    """Evaluation on the held-out rows during training."""

    eval_every: Annotated[CountOrZero, ResumeMayChange] = 0
    """Steps between two evaluations; 0: before the first step and after the last one only."""
    keep_best: Annotated[str, ResumeMayChange] = ""
    """Figure of the evaluation, ``loss`` or ``accuracy`` for example, whose best model is kept in ``best/``. Empty: none is kept."""
    early_stopping: Annotated[CountOrZero, ResumeMayChange, Alias("--patience")] = 0
    """End after so many evaluations in a row without a better figure of ``--keep-best``, which is ``loss`` if none is named; 0: go on."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Settings of the method itself."""

    loss: Annotated[str, UserFile] = ""
    """Function of your own, ``file.py:name``, in the place of the method's loss."""


@dataclass(frozen=True, kw_only=True)
class AnswersMethodConfig(MethodConfig):
    """Training on the answers of dialogues."""

    train_on: Literal["answers", "last", "all"] = "answers"
    """Tokens that are trained: all ``answers`` of the assistant, the ``last`` one only, or ``all`` tokens. Plain text is trained whole."""


@dataclass(frozen=True, kw_only=True)
class SftMethodConfig(SftOptions, AnswersMethodConfig):
    """Supervised fine-tuning."""

    packing: bool = False
    """Unnecessary: rows always follow each other without padding where the model allows it."""


@dataclass(frozen=True, kw_only=True)
class RewardMethodConfig(RewardModelOptions, MethodConfig):
    """Training of a reward model on pairs (Bradley-Terry)."""


@dataclass(frozen=True, kw_only=True)
class StepsMethodConfig(MethodConfig):
    """Training on labelled steps."""

    step_separator: str = "\n"
    """Text after each step; the model judges the step at its last token."""
    last_step_only: bool = False
    """Train on the label of the last step of a row only, as an outcome reward model."""


@dataclass(frozen=True, kw_only=True)
class ProcessMethodConfig(StepsMethodConfig):
    """Training of a process reward model on labelled steps."""


@dataclass(frozen=True, kw_only=True)
class ReferenceMethodConfig(MethodConfig):
    """Training against a reference model."""

    reference: str = ""
    """Reference model. Empty: the model as it is before training."""


@dataclass(frozen=True, kw_only=True)
class DpoMethodConfig(DpoOptions, ReferenceMethodConfig):
    """Direct preference optimization."""


@dataclass(frozen=True, kw_only=True)
class KtoMethodConfig(KtoOptions, ReferenceMethodConfig):
    """Kahneman-Tversky optimization."""


@dataclass(frozen=True, kw_only=True)
class OrpoMethodConfig(OrpoOptions, MethodConfig):
    """Odds-ratio preference optimization, which needs no reference model."""


@dataclass(frozen=True, kw_only=True)
class TeacherMethodConfig(AnswersMethodConfig):
    """Training on the distribution of a teacher."""

    teacher: str = ""
    """Model whose distribution is learned, with the same tokens as ``--model``. Required."""


@dataclass(frozen=True, kw_only=True)
class DistillMethodConfig(DistillOptions, TeacherMethodConfig):
    """Distillation of a teacher's distribution on given data."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Everything a method needs, one section per concern."""

    run: TuneRunConfig = field(default_factory=TuneRunConfig)
    data: TuneDataConfig = field(default_factory=TuneDataConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    eval: TuneEvalConfig = field(default_factory=TuneEvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    @classmethod
    def schema(cls, given: Mapping[str, Any]) -> type[Any]:
        """Return the sections to load: the command's own, with the options of a user's loss in the place of those of the method's.

        Args:
            given: Values of settings by name.

        Raises:
            ConfigError: If the loss cannot be used, or has an option with the name of a setting.
        """
        spec = str(given.get("loss") or "")
        if not is_plugin(spec):
            return cls
        with kept_in_run(given):
            options = facts.facts_of(facts.find(facts.OBJECTIVE, spec, {})).options
        method = sections_of(cls)["method"]
        base = next(each for each in method.__mro__[1:] if issubclass(each, MethodConfig))
        taken = {name for name, setting in settings_of(cls).items() if setting.section != "method"} | {*option_names(base)}
        if clash := next((name for name in option_names(options) if name in taken), ""):
            problem = f"{options.__name__} has an option {clash}, and there is a setting of that name"
            raise ConfigError("--loss", spec, problem, "Give the option another name.")
        parts: tuple[Any, ...] = (cls, base, options, method.__doc__)  # mypy takes types for something that cannot be hashed
        return _with_options(*parts)


@cache
def _with_options(command: Any, base: Any, options: Any, doc: str) -> type[Any]:
    """The sections of a command with other options of its method."""
    own = make_dataclass(base.__name__, [], bases=(options, base), namespace={"__doc__": doc}, frozen=True, kw_only=True)
    fields: Any = [("method", own, field(default_factory=own))]
    return make_dataclass(command.__name__, fields, bases=(command,), namespace={"__doc__": command.__doc__}, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SftConfig(TuneConfig):
    """Train a model on chats, prompts with completions, or texts."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    method: SftMethodConfig = field(default_factory=SftMethodConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(TuneConfig):
    """Train a reward model on pairs of answers."""

    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    method: RewardMethodConfig = field(default_factory=RewardMethodConfig)


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModelConfig(TuneConfig):
    """Train a process reward model on answers whose steps are labelled."""

    data: StepsDataConfig = field(default_factory=StepsDataConfig)
    method: ProcessMethodConfig = field(default_factory=ProcessMethodConfig)


@dataclass(frozen=True, kw_only=True)
class DpoConfig(TuneConfig):
    """Train a model on pairs of answers, against a reference model."""

    data: PairsDataConfig = field(default_factory=PairsDataConfig)
    method: DpoMethodConfig = field(default_factory=DpoMethodConfig)


@dataclass(frozen=True, kw_only=True)
class KtoConfig(TuneConfig):
    """Train a model on answers that are desirable or not, against a reference model."""

    data: LabelledDataConfig = field(default_factory=LabelledDataConfig)
    method: KtoMethodConfig = field(default_factory=KtoMethodConfig)


@dataclass(frozen=True, kw_only=True)
class OrpoConfig(TuneConfig):
    """Train a model on pairs of answers, without a reference model."""

    data: PairsDataConfig = field(default_factory=PairsDataConfig)
    method: OrpoMethodConfig = field(default_factory=OrpoMethodConfig)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TuneConfig):
    """Train a model to predict as a teacher does, on given data."""

    data: DialogueDataConfig = field(default_factory=DialogueDataConfig)
    method: DistillMethodConfig = field(default_factory=DistillMethodConfig)

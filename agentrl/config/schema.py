"""Every setting of a run, with its default and what it means. Frozen; resolved once; nothing changes it during a run.

A section is one dataclass. The range of a setting, its other names and whether it may differ on resumption stand in its annotation, and
the docstring under it is what ``--help`` and ``docs/configuration.md`` show. Names are unique over the sections of a command, so a flag
needs no prefix: ``--learning-rate`` is `LearnerConfig.learning_rate`. A command is a dataclass whose fields are sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any

from agentrl.algo.facts import facts_of
from agentrl.algo.options import option_names
from agentrl.algo.plan import KINDS, AlgoConfig, AlgoSettings, chosen_functions
from agentrl.cluster.plan import RunConfig
from agentrl.config.sections import sections_of, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import kept_in_run
from agentrl.engine.plan import EngineConfig
from agentrl.env.plan import DataConfig, ImageConfig, IsolationConfig, SandboxConfig
from agentrl.evaluation.plan import EvalConfig
from agentrl.flow.plan import FlowConfig, TrainingConfig
from agentrl.learner.plan import LearnerConfig, LoraConfig
from agentrl.rollout.plan import EndpointConfig, ModelConfig, PartnerConfig, PenaltyConfig, RewardConfig, RolloutConfig, SamplingConfig
from agentrl.track.plan import RecordConfig, TrackConfig
from agentrl.weights.plan import WeightsConfig


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

    @classmethod
    def schema(cls, given: Mapping[str, Any]) -> type[Any]:
        """Return the sections to load: those of training, and one for the options of the estimator, the loss and the correction each.

        Args:
            given: Values of the settings that choose the algorithms, by name.

        Raises:
            ConfigError: If an algorithm cannot be used, or has an option with the name of a setting.
        """
        with kept_in_run(given):
            chosen = chosen_functions(given)
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


@cache
def _with_options(options: tuple[tuple[str, type[Any]], ...]) -> type[Any]:
    """The sections of training with others behind them."""
    parts = {**sections_of(TrainConfig), "algo": AlgoSettings, **dict(options)}
    fields = [(name, kind, field(default_factory=kind)) for name, kind in parts.items()]
    return make_dataclass("TrainSections", fields, frozen=True, kw_only=True)

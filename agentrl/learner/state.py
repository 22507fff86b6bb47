"""State of a running learner rank: models, tokenizer, and the few values that change between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.entropy import EntropyController
from agentrl.algo.facts import facts_of
from agentrl.algo.kl import KLController
from agentrl.algo.objectives import find_objective
from agentrl.algo.objectives.distill import compared
from agentrl.algo.teacher_specs import learner_teacher
from agentrl.core.errors import LearnerError
from agentrl.core.metrics import MetricSums
from agentrl.core.model_shape import text_part
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Group, derive_seed
from agentrl.learner.alarm import Comparison, MismatchAlarm
from agentrl.learner.annotations import recorded_trajectories
from agentrl.learner.batch import collate
from agentrl.learner.demonstration_files import Demonstrations
from agentrl.learner.demonstrations import as_rows
from agentrl.learner.dropout import check_repeatable
from agentrl.learner.engine import Backend, TrainEngine, backend_of
from agentrl.learner.export import WeightAverage, checkpoint_names, save_adapter, save_pretrained
from agentrl.learner.kernels import fit_kernel, fit_teacher
from agentrl.learner.lora import AdapterOff, adapter_parameters, has_adapter, merged_parameters, step_dropout
from agentrl.learner.models import HeadModel, PolicyModel, ValueModel, check_output, experts_per_token, load_model, load_value_backbone
from agentrl.learner.parameters import on_device
from agentrl.learner.policy_objective import PolicyObjective
from agentrl.learner.probes import ROUNDING, probe
from agentrl.learner.ranks import Ranks
from agentrl.learner.replay import replay_routers
from agentrl.learner.row_objective import LabelledRows, RowFigures, RowsObjective
from agentrl.learner.sequence import run_together
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.step import Models, TrainingStep
from agentrl.learner.targets import Algorithm, load_algorithm, load_objective
from agentrl.weights.digests import digest


class LearnerState:
    """Models and controllers of one rank."""

    def __init__(
        self, settings: LearnerSettings, backend: Backend, ranks: Ranks, models: Models, algorithm: Algorithm, tokenizer: Any
    ) -> None:
        self.settings, self.backend, self.ranks, self.models = settings, backend, ranks, models
        self.algorithm, self.tokenizer = algorithm, tokenizer
        algo = settings.algo
        self.kl = KLController(coefficient=algo.init_kl_coef, target=algo.kl_target)
        self.entropy = EntropyController(coefficient=algo.entropy_coef, target=algo.entropy_target)
        self.alarm = MismatchAlarm(settings.max_mismatch, _comparison(settings, models))
        decay = settings.learner.ema_decay
        self.objective = None if settings.objective is None else load_objective(settings.objective)
        self.demonstrations = None if settings.demonstrations is None else Demonstrations(settings.demonstrations)
        self.average = None
        if decay is not None:
            self.average = WeightAverage(self.policy, decay, ranks, backend.parameters, offload="ema" in settings.learner.offload)

    @property
    def policy(self) -> Any:
        """The transformers model being trained."""
        return self.models.policy.module.model

    def train(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """One step, and what follows it; the metrics of all ranks."""
        algo = self.settings.algo
        batch = collate(groups, mask_truncated=algo.mask_truncated, in_baseline=algo.truncated_in_baseline)
        trained = [engine.module for engine in self._trained]
        with step_dropout(trained, self.settings.seed, step):
            coefficients = (self.kl.coefficient, self.entropy.in_force)
            recorded = recorded_trajectories(groups) if self.settings.annotations else frozenset()
            run = TrainingStep(step, self.models, self.settings, self.ranks)
            demonstrations = None if self.demonstrations is None else as_rows(self.demonstrations.of_step(step))
            objective = PolicyObjective(run, batch, self.algorithm, *coefficients, recorded, demonstrations)
            metrics = run.train(objective).result()
        self.alarm.judge(step, metrics, int(objective.same_version.sum()))
        metrics |= self.alarm.metrics
        if "kl/reference" in metrics:
            self.kl = self.kl.update(metrics["kl/reference"], batch.num_episodes)
        if "entropy" in metrics:  # not while the policy is frozen
            self.entropy = self.entropy.update(metrics["entropy"])
        every = self.settings.algo.ref_reset_every
        if self.models.reference is not None and every and (step + 1) % every == 0:
            self.backend.parameters.copy(self.models.policy.module, self.models.reference)
        if self.average is not None:
            self.average.update()
        return metrics

    def train_rows(self, step: int, rows: LabelledRows) -> dict[str, float]:
        """One step of the objective of the settings; the metrics of all ranks."""
        with step_dropout([self.models.policy.module], self.settings.seed, step):
            run, objective = self._objective(step, rows)
            metrics = run.train(objective).result()
        if self.average is not None:
            self.average.update()
        return metrics

    def evaluate_rows(self, step: int, blocks: Iterable[LabelledRows]) -> dict[str, float]:
        """Return loss and metrics of rows that are not trained on; what belongs to a step is computed for each block."""
        sums = MetricSums()
        for rows in blocks:
            run, objective = self._objective(step, rows)
            sums.merge(run.evaluate(objective))
        return sums.result()

    def measure_rows(self, step: int, rows: LabelledRows) -> RowFigures:
        """Return the figures of each row, which are not trained on."""
        return self._objective(step, rows)[1].measure()

    def _objective(self, step: int, rows: LabelledRows) -> tuple[TrainingStep, RowsObjective]:
        if self.objective is None:
            raise LearnerError("rows can be trained by an objective only; set LearnerSettings.objective")
        run = TrainingStep(step, self.models, self.settings, self.ranks)
        return run, RowsObjective(run, rows, *self.objective)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their checkpoint names with an adapter merged into them, or what `publish` asks for: the adapter."""
        parameters = self.backend.parameters
        if self.settings.weights.publish == "adapter":
            return adapter_parameters(parameters.named(self.policy, trained=True))
        adapted = has_adapter(self.policy)
        return checkpoint_names(self.policy, merged_parameters(self.policy, parameters) if adapted else parameters.named(self.policy))

    def save(self, path: str) -> None:
        """Write the policy as a Hugging Face directory, or its adapter; the moving average, if kept, to the same name with ``-ema``."""
        adapted = has_adapter(self.policy)
        save = save_adapter if adapted else save_pretrained
        save(self.policy, self.backend.parameters.named(self.policy, trained=adapted), self.tokenizer, path, self.ranks)
        if self.average is not None:
            save(self.policy, self.average.weights(), self.tokenizer, f"{path}-ema", self.ranks)

    def offload(self, *, keep_weights: bool) -> None:
        """Move gradients and optimizer to CPU memory, and the trained weights too unless they are kept; frozen models stay."""
        for engine in self._trained:
            engine.offload(keep_weights=keep_weights)

    def reload(self) -> None:
        """Undo `offload`."""
        for engine in self._trained:
            engine.reload()

    def digests(self) -> list[int]:
        """Return the digests of the policy's weights, and of this rank's master weights and optimizer."""
        weights = (weight for _, weight in self.named_weights())
        return [digest(part, part.dtype) for part in (*weights, *self.models.policy.tensors())]

    @property
    def _trained(self) -> list[TrainEngine]:
        return [engine for engine in (self.models.policy, self.models.critic) if engine is not None]

    def close(self) -> None:
        """Release models and optimizers, and the process group."""
        self.models.policy.close()
        if self.models.critic is not None:
            self.models.critic.close()
        self.ranks.leave()


def _comparison(settings: LearnerSettings, models: Models) -> Comparison:
    model: Any = models.policy.module.model
    rows = "rows back to back" if models.kernel.packed else "rows padded"
    return Comparison(
        model=type(model).__name__,
        learner_dtype=str(model.dtype).removeprefix("torch."),
        kernel=models.kernel.name,
        layout=f"{rows}, prompts shared" if models.share_prompts else rows,
        engine=settings.engine,
    )


def load_state(settings: LearnerSettings, ranks: Ranks, tokenizer: Any = None) -> LearnerState:
    """Load every model the algorithm or the objective needs and no other; the tokenizer is that of the model unless one is given.

    Raises:
        ConfigError: If a load-balancing loss is asked for and the model has no experts, or a user's algorithm cannot be used.
    """
    torch.manual_seed(derive_seed(settings.seed, "learner"))
    config, algo, bf16 = settings.learner, settings.algo, settings.bf16
    backend = backend_of(config.learner_backend)
    algorithm = load_algorithm(algo)
    model = load_model(settings, backend, trained=True)
    if algo.aux_loss_coef:
        experts_per_token(model)
    frozen, reference, taught, teacher = _load_frozen_models(settings, backend, ranks)
    policy = _trained_module(settings, model, taught)
    critic = None
    if facts_of(algorithm.estimator).needs_critic:
        critic = backend.train(ValueModel(load_value_backbone(settings, backend)), config, ranks, bf16=bf16)
    engine = backend.train(policy, config, ranks, bf16=bf16)
    if isinstance(policy, PolicyModel):
        check_output(policy, engine, ranks.device)
    check_repeatable(model, lambda micro: engine(micro)[0], probe(model.config), ranks.device)
    if algo.router_replay and isinstance(policy, PolicyModel):
        replay_routers(policy, engine, ranks.device)
    if _has_reference(settings) and frozen is None:
        # The policy without its adapter is the initial model, so no second copy is needed.
        reference = AdapterOff(engine)
    everyone = [part for part in (policy, frozen, taught, critic and critic.module) if part is not None]
    # A load-balancing loss counts tokens, and shared ones would count once.
    same = [part for part in everyone if part is not taught]
    kernel, share = fit_kernel(settings, engine, same, share=config.share_prompts and not algo.aux_loss_coef)
    if taught is not None:
        with on_device(taught, ranks.device):
            share = fit_teacher(taught, teacher, _teacher(settings), ranks.device, kernel, share=share)
    if ranks.sequence_parallel > 1:
        run_together(kernel, backend.exchange_heads, lambda micro: engine(micro)[0], everyone, ranks, ROUNDING[model.dtype])
    width = text_part(model.config)["hidden_size"]
    models = Models(
        policy=engine, hidden_size=width, kernel=kernel, reference=reference, teacher=teacher, critic=critic, share_prompts=share
    )
    if tokenizer is None:
        tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    return LearnerState(settings, backend, ranks, models, algorithm, tokenizer)


def _has_reference(settings: LearnerSettings) -> bool:
    objective = settings.objective
    return settings.algo.init_kl_coef > 0 if objective is None else facts_of(find_objective(objective.name)).reference


def _teacher(settings: LearnerSettings) -> str:
    """Return the teacher that this rank runs; "" if there is none."""
    return learner_teacher(settings.algo.teacher) if settings.objective is None else settings.objective.teacher


def _load_frozen_models(settings: LearnerSettings, backend: Backend, ranks: Ranks) -> tuple[Any, Any, Any, Any]:
    """Return the reference and the teacher, each with what to call in its place; `None` for one that is not wanted.

    A reference that is the initial model is no model of its own beside an adapter.
    """
    own = settings.objective.reference if settings.objective is not None else ""
    frozen = reference = taught = teacher = None
    if _has_reference(settings) and (own or not settings.lora.lora_rank):
        frozen, reference = load_frozen(replace(settings, model=own or settings.model), backend, ranks)
    if model := _teacher(settings):
        taught, teacher = load_frozen(replace(settings, model=model), backend, ranks)
    return frozen, reference, taught, teacher


def _trained_module(settings: LearnerSettings, model: Any, teacher: PolicyModel | None) -> PolicyModel | HeadModel:
    """Return what a back-end trains: a model whose end is that of the objective."""
    algo, objective = settings.algo, settings.objective
    bonus = algo.entropy_coef > 0 or algo.entropy_target is not None
    rest: Any = {"entropy_gradient": bonus, "routing": algo.aux_loss_coef > 0, "fp32_head": settings.learner.fp32_lm_head}
    if objective is None:
        return PolicyModel(model, **rest)
    if facts_of(find_objective(objective.name)).reads == "head":
        return HeadModel(model)
    options = load_objective(objective)[1]
    compare = None if teacher is None else lambda student, states: compared(student, teacher.logits(states), options)
    return PolicyModel(model, samples=False, compare=compare, **rest)


def load_frozen(settings: LearnerSettings, backend: Backend, ranks: Ranks) -> tuple[PolicyModel, Any]:
    """Load the model of the settings to be run forward only; returns it, and what to call in its place."""
    config = settings.learner
    frozen = PolicyModel(load_model(settings, backend, trained=False), fp32_head=config.fp32_lm_head, samples=settings.objective is None)
    called = backend.freeze(frozen, config, ranks.device, bf16=settings.bf16)
    with on_device(frozen, ranks.device):
        check_output(frozen, called, ranks.device)
    return frozen, called

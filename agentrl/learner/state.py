"""State of a running learner rank: models, tokenizer, and the few values that change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.advantages import find_estimator
from agentrl.algo.facts import facts_of
from agentrl.algo.kl import KLController
from agentrl.algo.losses import find_loss
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Group, derive_seed
from agentrl.learner.batch import collate
from agentrl.learner.engine import TrainEngine, copy_weights, deepspeed_config, partition_frozen
from agentrl.learner.export import WeightAverage, checkpoint_names, save_pretrained, whole_parameters
from agentrl.learner.layout import can_share
from agentrl.learner.models import PolicyModel, ValueModel, experts_per_token, load_model, load_value_backbone
from agentrl.learner.ranks import Ranks
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.step import Algorithm, Models, TrainingStep


class LearnerState:
    """Models and controllers of one rank."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks, models: Models, algorithm: Algorithm, tokenizer: Any) -> None:
        self.settings, self.ranks, self.models, self.algorithm, self.tokenizer = settings, ranks, models, algorithm, tokenizer
        self.kl = KLController(coefficient=settings.algo.init_kl_coef, target=settings.algo.kl_target, horizon=settings.algo.kl_horizon)
        decay = settings.learner.ema_decay
        self.average = None if decay is None else WeightAverage(self.policy, decay, ranks)

    @property
    def policy(self) -> Any:
        """The transformers model being trained."""
        return self.models.policy.module.model

    def train(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """One step, and what follows it; the metrics of all ranks."""
        batch = collate(groups)
        metrics = TrainingStep(batch, step, self.models, self.algorithm, self.settings, self.ranks, self.kl.coefficient).run().result()
        if "kl/reference" in metrics:
            self.kl = self.kl.update(metrics["kl/reference"], batch.num_episodes)
        every = self.settings.algo.ref_reset_every
        if self.models.reference is not None and every and (step + 1) % every == 0:
            copy_weights(self.models.policy.module, self.models.reference)
        if self.average is not None:
            self.average.update()
        return metrics

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under their checkpoint names."""
        return checkpoint_names(self.policy, whole_parameters(self.policy))

    def save(self, path: str) -> None:
        """Write the policy as a Hugging Face directory; its moving average, if kept, to the same name with ``-ema``."""
        save_pretrained(self.policy, whole_parameters(self.policy), self.tokenizer, path, self.ranks)
        if self.average is not None:
            save_pretrained(self.policy, self.average.weights(), self.tokenizer, f"{path}-ema", self.ranks)

    def close(self) -> None:
        """Release DeepSpeed and the process group."""
        self.models.policy.close()
        if self.models.critic is not None:
            self.models.critic.close()
        self.ranks.leave()


def load_state(settings: LearnerSettings, ranks: Ranks) -> LearnerState:
    """Load every model the algorithm needs and no other.

    Raises:
        ConfigError: If a load-balancing loss is asked for and the model has no experts, or a user's estimator or loss cannot be used.
    """
    torch.manual_seed(derive_seed(settings.seed, "learner"))
    config, algo, bf16 = settings.learner, settings.algo, settings.bf16
    algorithm = Algorithm(estimator=find_estimator(algo.advantage_estimator), loss=find_loss(algo.policy_loss))
    options = deepspeed_config(config, bf16=bf16)
    model = load_model(settings, options, trained=True)
    if algo.aux_loss_coef:
        experts_per_token(model)
    policy = PolicyModel(model, entropy_gradient=algo.entropy_coef > 0, routing=algo.aux_loss_coef > 0)
    reference = critic = None
    if algo.init_kl_coef > 0:
        frozen = PolicyModel(load_model(settings, options, trained=False)).to(ranks.device)
        reference = partition_frozen(frozen, config, bf16=bf16)
    if facts_of(algorithm.estimator).needs_critic:
        critic = TrainEngine(ValueModel(load_value_backbone(settings, options)), config, ranks, bf16=bf16)
    engine = TrainEngine(policy, config, ranks, bf16=bf16)
    # A load-balancing loss counts tokens, and shared ones would count once. Flash attention takes no mask, and "eager" another kind.
    wanted = config.share_prompts and config.attn_implementation == "sdpa" and not algo.aux_loss_coef
    share = wanted and can_share(lambda micro: engine(micro)[0], model.config, ranks.device)
    width = model.config.get_text_config().hidden_size if share else None
    models = Models(policy=engine, reference=reference, critic=critic, sharing_width=width)
    tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    return LearnerState(settings, ranks, models, algorithm, tokenizer)

"""The kernel of attention that a model's layers agree with: proven on a twin in float32, then tried on the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import ConfigError
from agentrl.core.language_models import set_text_attention
from agentrl.core.model_shape import attends_to_everything, layer_kinds, mutual_layers, placeholder_ids, text_part
from agentrl.learner.attention import EXTRAS, KERNELS, Kernel, choose_kernel, register, register_reference, separate_rows
from agentrl.learner.engine import TrainEngine
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.models import PolicyModel
from agentrl.learner.probes import ROUNDING, can_pack, can_share, in_order, probe_batch
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.trees import one_row_bundles, share_prefixes
from agentrl.weights.twin import ROW, twin_of
from agentrl.weights.twin_images import LAST_TEXT, drawn_images
from agentrl.weights.twin_sizes import VOCABULARY

EXACT = 1e-4
"""Difference of log-probabilities in float32 that passes for rounding; what leaves a token out or adds one differs by far more."""

PROMPT, SAMPLED = 12, (ROW - 12, 41, 28, 5)
"""Tokens of the rows that a twin is tried on; some go beyond its windows and have padding behind them."""

MODEL_FAULTS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError)
"""Errors with which a model says that it cannot do something; it has many ways."""


class Proof:
    """Tries kernels on the twin of a model, by comparison with one row at a time through the model's own attention."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.name, self.config = type(model).__name__, model.config
        self._device = device
        self._small = twin_of(model)
        vocabulary = VOCABULARY if self._small is None else self._small.config.get_text_config().vocab_size
        images = drawn_images(self._small) if self._small is not None and placeholder_ids(self._small.config) else ()
        self._batch = probe_batch(LAST_TEXT if images else vocabulary - 1, prompt=PROMPT, sampled=SAMPLED, images=images)
        self._expected = self._alone()
        self._asked = self._extras()

    def problem(self, kernel: Kernel, *, share: bool = False) -> str:
        """Return why rows laid out for a kernel, as prefix trees if asked, have other scores than alone; "" if they have the same."""
        if mutual_layers(self.config) and (kernel.packed or share):
            return f"tokens of an image attend to each other in both directions in {self.name}, for which rows are padded and share nothing"
        if self._small is None or self._expected is None:
            return self._unproven(kernel)
        try:
            with self._attending(register_reference(kernel)):
                found = self._scores(kernel, share)
        except MODEL_FAULTS as error:
            said = str(error).split(". ", maxsplit=1)[0].strip()
            return self._missing(kernel) or f"{self.name} does not run with {kernel.name}: {said}"
        if (found - self._expected).abs().max() < EXACT:
            return ""
        return self._missing(kernel) or self._mixed(kernel)

    def _unproven(self, kernel: Kernel) -> str:
        """Return why a kernel is not taken for a model of which no twin can be built."""
        if kernel.packed:
            return f"no small copy of {self.name} can be built, on which it could be shown that rows back to back do not see each other"
        if kernel.name == "sdpa" and text_part(self.config).get("attn_logit_softcapping"):
            return f"sdpa leaves out {EXTRAS['softcap']}, which {self.name} asks for"
        return ""

    def _missing(self, kernel: Kernel) -> str:
        missing = [EXTRAS[name] for name in sorted(self._asked - kernel.applies)]
        return f"{kernel.name} leaves out {' and '.join(missing)}, which {self.name} asks for" if missing else ""

    def _mixed(self, kernel: Kernel) -> str:
        if not kernel.packed:
            return f"scores of a row of {self.name} depend on the rows beside it, or {kernel.name} leaves out a part of its attention"
        if "chunked_attention" in layer_kinds(self.config):
            return f"{kernel.name} knows no chunks of attention, which {self.name} has"
        return f"rows back to back would see each other in {self.name}"

    def _scores(self, kernel: Kernel, share: bool) -> Tensor:
        budget = self._batch.num_tokens
        bundles = share_prefixes(self._batch, budget=budget, hidden_size=budget) if share else one_row_bundles(self._batch)
        micro = Layout(self._batch).micro_batch(bundles, packed=kernel.packed)
        return self._score(micro)

    def _score(self, micro: MicroBatch) -> Tensor:
        policy = PolicyModel(self._small)
        policy.whole = True
        return in_order(micro, policy(micro.to(self._device))[0])

    @torch.no_grad()
    def _alone(self) -> Tensor | None:
        """Return the scores of one row at a time, where the twin runs; it may have kernels of the device alone."""
        if self._small is None:
            return None
        layout = Layout(self._batch)
        try:
            self._small.to(self._device)
            found = torch.cat([self._score(layout.micro_batch([bundle], packed=False)) for bundle in one_row_bundles(self._batch)])
            separate_rows(self._small)
        except MODEL_FAULTS:
            return None
        return found if bool(torch.isfinite(found).all()) else None

    def _extras(self) -> frozenset[str]:
        """Return which of `EXTRAS` layers ask their attention for."""
        asked: set[str] = set()
        if self._small is None or self._expected is None:
            return frozenset()
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def note(_: nn.Module, query: Tensor, __: Tensor, value: Tensor, ___: Any, **options: Any) -> tuple[Tensor, None]:
            asked.update(name for name in EXTRAS if options.get(name) is not None)
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

        ALL_ATTENTION_FUNCTIONS.register("agentrl_extras", note)
        try:
            with self._attending("agentrl_extras"):
                self._scores(KERNELS["eager"], share=False)
        except MODEL_FAULTS:
            pass  # its attention takes no other
        return frozenset(asked)

    @contextmanager
    def _attending(self, implementation: str) -> Iterator[None]:
        small: Any = self._small
        own = small.config.get_text_config()._attn_implementation
        try:
            if implementation != own:
                set_text_attention(small, implementation)
            with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
                yield
        finally:
            set_text_attention(small, own)


def fit_kernel(settings: LearnerSettings, engine: TrainEngine, models: Sequence[Any], *, share: bool) -> tuple[Kernel, bool]:
    """Give all models the first kernel that the settings allow with which the policy in `engine` computes what its own attention does.

    Args:
        settings: Of the learner.
        engine: The policy.
        models: What has a transformers model as its `model`; the policy's first, the others of the same class.
        share: True if rows that begin with the same tokens should go through the model as one sequence.

    Returns:
        The kernel, and True if rows may share tokens.

    Raises:
        ConfigError: If a kernel was asked for by name and the model cannot be run with it.
    """
    asked, model, device = settings.learner.attn_implementation, models[0].model, engine.ranks.device
    first = choose_kernel(settings.learner, settings.device)
    if asked == "auto" and settings.objective is not None and settings.objective.packs and not first.packed:
        first = KERNELS["varlen"]
    proof, problem = Proof(model, device), ""
    candidates = [first] if asked != "auto" else list(dict.fromkeys([first, KERNELS["sdpa"], KERNELS["eager"]]))
    for kernel in candidates:
        own = proof.problem(kernel) or _take(kernel, engine, models)
        if not own:
            return kernel, share and kernel.shares and _shares(proof, kernel, engine)
        problem = problem or own
    remedy = "Leave the flag out, or use another model." if asked != "auto" else "Use another model."
    raise ConfigError("--attn-implementation", asked, problem, remedy)


def _shares(proof: Proof, kernel: Kernel, engine: TrainEngine) -> bool:
    if not attends_to_everything(proof.config) or proof.problem(kernel, share=True):
        return False
    module: Any = engine.module
    rounding = ROUNDING[module.model.dtype]
    return can_share(lambda micro: engine(micro)[0], proof.config, engine.ranks.device, packed=kernel.packed, rounding=rounding)


def _take(kernel: Kernel, engine: TrainEngine, models: Sequence[Any]) -> str:
    """Give all models a kernel; return why the policy itself cannot have it, "" if it can."""
    model = models[0].model
    before = model.config.get_text_config()._attn_implementation
    for other in models:
        set_kernel(other.model, kernel)
    if not kernel.packed:
        return ""

    def apart() -> bool:
        return can_pack(lambda micro: engine(micro)[0], model.config, engine.ranks.device, rounding=ROUNDING[model.dtype])

    native = apart()
    if native or (separate_rows(model) and apart()):
        for other in models[1:]:
            if not native:
                separate_rows(other.model)
        return ""
    for other in models:
        set_text_attention(other.model, before)
    return f"rows back to back would see each other in {type(model).__name__}"


def set_kernel(model: Any, kernel: Kernel) -> None:
    """Have a model of transformers compute attention with a kernel."""
    if kernel.packed:
        register(kernel.name)
    if model.config.get_text_config()._attn_implementation != kernel.implementation:
        set_text_attention(model, kernel.implementation)


def fit_teacher(teacher: PolicyModel, called: Any, name: str, device: torch.device, kernel: Kernel, *, share: bool) -> bool:
    """Give a teacher, which may have another architecture than the policy, a kernel that takes rows laid out for the policy's `kernel`.

    Returns:
        True if rows may share tokens with it too; never without `share`.

    Raises:
        ConfigError: If it does not keep rows apart that follow each other without padding.
    """
    config, rounding, proof = teacher.model.config, ROUNDING[teacher.model.dtype], Proof(teacher.model, device)
    problem = proof.problem(kernel)
    if problem and not kernel.packed:
        kernel = KERNELS["eager" if kernel.name == "sdpa" else "sdpa"]
        problem = proof.problem(kernel)
    if not problem:
        set_kernel(teacher.model, kernel)
        if kernel.packed and not can_pack(lambda micro: called(micro)[0], config, device, rounding=rounding):
            problem = f"rows back to back would see each other in {type(teacher.model).__name__}"
    if problem:
        raise ConfigError("--teacher", name, problem, "Use --attn-implementation sdpa, or another teacher.")
    share = share and kernel.shares and attends_to_everything(config) and not proof.problem(kernel, share=True)
    return share and can_share(lambda micro: called(micro)[0], config, device, packed=kernel.packed, rounding=rounding)

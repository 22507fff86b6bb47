"""A model of transformers that keeps the keys and values of many sequences in slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import logging

from agentrl.core.errors import ConfigError
from agentrl.core.language_models import language_model, set_text_attention
from agentrl.core.model_shape import engine_context, mutual_layers, placeholder_ids
from agentrl.core.types import ExpertArray
from agentrl.engine.image_features import ImageFeatures, RowImages, with_images
from agentrl.engine.settings import EngineSettings
from agentrl.engine.slots import NAME, SlotCache, Step, make_rows_independent, padded, register, tune_by_place
from agentrl.weights.rope import fix_rope
from agentrl.weights.routers import Routers
from agentrl.weights.twin import ROW, twin_of


class SlotModel:
    """Computes logits of new tokens of sequences whose earlier tokens are in slots of its cache."""

    def __init__(self, settings: EngineSettings) -> None:
        self.device = torch.device("cuda" if settings.device == "cuda" else "cpu")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model: Any = language_model(settings.model.model, trust_remote_code=settings.model.trust_remote_code).from_pretrained(
            settings.model.model,
            dtype=getattr(torch, settings.dtype),
            attn_implementation="eager",  # what `_adopt_attention` compares with: it leaves nothing out
            trust_remote_code=settings.model.trust_remote_code,
            # Files of pickled weights can run code when they are read.
            use_safetensors=True,
        )
        self._model.to(self.device).eval().requires_grad_(False)
        self.context = engine_context(self._model.config, asked=settings.engine.max_model_len, cpu=settings.device == "cpu")
        fix_rope(self._model, self.context)
        self.end_ids = _end_ids(self._model)
        self.vocabulary = int(self._model.config.get_text_config().vocab_size)
        self.placeholders = placeholder_ids(self._model.config)
        self._images, self._mutual = ImageFeatures(self._model), mutual_layers(self._model.config)
        self.cache: SlotCache = self._adopt_attention()
        self._routers = Routers(self._model) if settings.routed_experts else None

    def __call__(self, ids: Tensor, step: Step, images: Sequence[RowImages] = ()) -> tuple[Tensor, Sequence[Sequence[ExpertArray]]]:
        """Run the model over new tokens # [B, n], with anything behind the last one of a row that has fewer.

        `images` are those of rows that have some, with the number of the row and the place of its first new token.

        Returns:
            The logits after the last new token of each row # [B, V], and the experts of each token # B times n of [layers, top_k], or
            none if they are not asked for # B times 0.
        """
        if self._routers is None:
            return self._logits(ids, step, images), [()] * len(ids)
        logits, chosen = self._routers.record(lambda: self._logits(ids, step, images))
        return logits, [list(row) for row in self._routers.compact(chosen).reshape(*ids.shape, *chosen.shape[1:])]

    def _logits(self, ids: Tensor, step: Step, images: Sequence[RowImages]) -> Tensor:
        self.cache.step = step = with_images(step, images, self._mutual).to(self.device)
        ids = ids.to(self.device)
        out = self._model(
            input_ids=ids,
            **self._images.arguments(images),
            position_ids=step.positions(),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if len(ids) == 1 else 0,  # 0: all, of which `_last` leaves one each
            slot_step=step,
        )
        logits: Tensor = out.logits
        last = (self._last(logits) if logits.shape[1] > 1 else logits)[:, 0].float()
        if self.placeholders:
            last[:, list(self.placeholders)] = float("-inf")  # never sampled: the model would read pixels in their places
        return last

    def _last(self, states: Tensor) -> Tensor:
        """Leave the last new token of each row # [B, count, ...] -> [B, 1, ...]."""
        step = self.cache.step
        return states[torch.arange(len(states), device=states.device), step.counts - 1][:, None]

    def load(self, path: str) -> None:
        """Copy a set of weights into the model; the cache stays as it is.

        Raises:
            ValueError: If a parameter is not in the file.
        """
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open has no iterator
        self._images.forget()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if not tensors.keys() <= parameters.keys():
            tensors = self._joined(tensors)
        done = {id(parameters[name].copy_(tensor)) for name, tensor in tensors.items()}  # a tied one has two names
        if missing := [name for name, parameter in parameters.items() if id(parameter) not in done]:
            raise ValueError(f"{path} lacks values for {len(missing)} parameters, for example {min(missing)}")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, tied ones under both names."""
        found: Iterator[tuple[str, Tensor]] = self._model.named_parameters(remove_duplicate=False)
        return found

    def _joined(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a checkpoint under the names of the model, in which the experts of a layer are one tensor."""
        kind: Any = type(self._model)
        made, report = kind.from_pretrained(
            None, config=self._model.config, state_dict=tensors, dtype=self._model.dtype, output_loading_info=True
        )
        missing = report["missing_keys"]
        return {name: tensor for name, tensor in made.named_parameters() if name not in missing}

    def move(self, device: torch.device) -> None:
        """Move the weights; nothing is computed while they are not on the model's own device."""
        self._model.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop(self) -> None:
        """Free the model and its cache."""
        self._model = None
        self._images.forget()
        self.cache.drop()

    def _adopt_attention(self) -> SlotCache:
        """Replace the model's attention by `attend`, and compare the two on a few tokens, whose keys and values are returned.

        A twin is compared first: with more tokens than its windows and chunks have, and in float32 throughout.

        Raises:
            ValueError: If they differ, or the model keeps another kind of state than keys and values.
        """
        try:
            if (small := twin_of(self._model)) is not None:
                _compare(small, ROW, small.config.get_text_config().vocab_size)
            cache = _compare(self._model, min(8, self.vocabulary - 3), self.vocabulary)
        except (TypeError, AttributeError, NotImplementedError, RuntimeError) as error:  # of a cache for another kind of state
            raise not_computed(self._model) from error
        if self.device.type == "cpu":
            make_rows_independent(self._model)
        if (head := self._model.get_output_embeddings()) is not None:  # logits of other tokens are not needed
            head.register_forward_pre_hook(lambda _, inputs: (self._last(inputs[0]),) if len(inputs[0]) > 1 else None)
        return cache


def not_computed(model: Any) -> ConfigError:
    """Return the refusal of a model whose attention is of a kind that this engine does not compute."""
    problem = f"does not compute the attention of {type(model).__name__}, which is of another kind"
    return ConfigError("--engine", "transformers", problem, "Use --engine vllm if it has the model, or another one.")


@torch.inference_mode()
def _compare(model: Any, count: int, vocabulary: int) -> SlotCache:
    """Give a model slots, run one sequence in parts with another one between them, and return the cache.

    Raises:
        ConfigError: If the logits are not those of one pass without slots.
    """
    ids = (torch.arange(3, 3 + count, device=model.device) % vocabulary)[None]
    expected = model(input_ids=ids, use_cache=False).logits.float()
    register()
    tune_by_place(model)
    set_text_attention(model, NAME)
    cache = SlotCache(2, padded(count))

    def run(tokens: Tensor, slot: int, start: int) -> Tensor:
        size = tokens.shape[1]
        cache.step = step = Step(torch.tensor([slot]), torch.tensor([start]), torch.tensor([size]), size, cache.capacity).to(model.device)
        logits: Tensor = model(input_ids=tokens, position_ids=step.places(), past_key_values=cache, use_cache=True, slot_step=step).logits
        return logits.float()

    first, second = count // 2, count - 1
    begun = run(ids[:, :first], 0, 0)
    run(ids.flip(1), 1, 0)
    found = torch.cat([begun, run(ids[:, first:second], 0, first), run(ids[:, second:], 0, second)], 1)
    bound = 1e-3 if expected.abs().max() < 1e3 and model.dtype == torch.float32 else 0.1 * float(expected.abs().max())
    if not torch.allclose(found, expected, atol=bound, rtol=0.01) or not cache.bytes_per_token:
        raise not_computed(model)
    return cache


def _end_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence, from the model's generation settings and its configuration."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))

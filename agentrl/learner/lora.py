"""Low-rank adapters (Hu et al., arXiv:2106.09685) by peft: small trained matrices beside the layers of a model that stays as it is.

Variants are rsLoRA (Kalajdzievski, arXiv:2312.03732), whose scale is another one, and DoRA (Liu et al., arXiv:2402.09353), which trains
the length of each row of a weight, too.

peft puts its layers into the model in place, so the model keeps its class, and everything else treats it as before. A layer with an
adapter is ``NAME.base_layer`` with the weight of the base model, ``NAME.lora_A.default`` and ``NAME.lora_B.default``. What goes to
engines and into merged models has the names and shapes of the base model.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.core.adapter_files import WEIGHTS_FILE
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.model_shape import placeholder_ids
from agentrl.core.types import derive_seed
from agentrl.learner.engine import TrainEngine
from agentrl.learner.layout import MicroBatch
from agentrl.learner.parameters import WHOLE, Parameters
from agentrl.learner.plan import ALL_LINEAR, LoraConfig
from agentrl.learner.quantised import whole_weight
from agentrl.weights.twin import ROW, twin_of

ADAPTER = "default"
"""peft's name for the only adapter of a model."""

BASE = ".base_layer"
PREFIX = "base_model.model."
"""Prefix of peft before the names of layers in a file."""


def add_adapter(model: Any, lora: LoraConfig, *, base: str, task: str = "CAUSAL_LM", head: Sequence[str] = ()) -> None:
    """Put an adapter beside the layers that `lora` names and freeze the rest; at first it changes nothing, since B is 0.

    Args:
        model: A transformers model, changed in place.
        lora: Rank, scale and layers.
        base: Directory or hub name of the model, for whoever loads the adapter.
        task: Task of the model, as peft names it.
        head: Layers that are new, and trained whole.

    Raises:
        ConfigError: If the model has no such layer, or one of them cannot have an adapter that can be merged.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    names, bypassed = lora.target_names, _bypassed(model)
    _not_experts(model, lora)
    if asked := next((name for name in names for path in bypassed if path.endswith(f".{name}")), ""):
        raise _not_possible(lora, f"{type(model).__name__} uses the weight of {asked} by itself, past an adapter beside it")
    config = PeftConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        target_modules=ALL_LINEAR if names == (ALL_LINEAR,) else list(names),
        exclude_modules=[*bypassed, *outside_text(model), *head] or None,
        use_rslora="rslora" in lora.lora_variant,
        use_dora="dora" in lora.lora_variant,
        base_model_name_or_path=base,
        task_type=task,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise _not_possible(lora, str(error).splitlines()[0]) from error
    # peft would wrap these layers, and the model would have other names for its parameters than its checkpoints.
    config.modules_to_save = list(head) or None
    for name in head:
        model.get_submodule(name).requires_grad_(True)
    layers = adapted_layers(model)
    for name in names:
        if name != ALL_LINEAR and not any(layer == name or layer.endswith(f".{name}") for layer in layers):
            raise _not_possible(lora, f"the model has no layer {name}")
    ends = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    for name, layer in layers.items():
        if id(layer) in ends or not hasattr(layer.get_base_layer(), "weight") or len(layer.lora_A) != 1:
            raise _not_possible(lora, f"{name} is no plain linear layer inside the model")
        layer.lora_dropout[ADAPTER] = StepDropout(lora.lora_dropout)


def outside_text(model: Any) -> list[str]:
    """Return the linear layers outside the text part of a model that reads images; they get no adapter."""
    if not placeholder_ids(model.config):
        return []
    text = set(model.get_decoder().modules())
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in text]


def _not_experts(model: nn.Module, lora: LoraConfig) -> None:
    """Refuse names of experts that are one parameter of three dimensions: peft would pass over them, or change their shape for engines."""
    for path, parameter in model.named_parameters():
        module = path.rpartition(".")[0]
        asked = any(end == name or end.endswith(f".{name}") for end in (path, module) for name in lora.target_names)
        if asked and parameter.ndim == 3:
            raise _not_possible(lora, f"the experts of a layer are one tensor, {path}, which no adapter can stand beside")


def _bypassed(model: nn.Module) -> list[str]:
    """Return the linear layers that the model never calls, as ``mixer.dt_proj``: it uses their weights by itself, as Jamba does."""
    twin, called = twin_of(model), set[str]()
    if twin is None:
        return []
    layers = {name: module for name, module in twin.named_modules() if isinstance(module, nn.Linear)}
    for name, module in layers.items():
        end = _end_of(name)
        module.register_forward_hook(lambda *_, end=end: called.add(end))
    try:
        with torch.no_grad():
            twin(input_ids=torch.arange(ROW)[None] % twin.config.get_text_config().vocab_size, use_cache=False)
    except Exception:  # code of any model's author, with sizes that do not go together
        return []
    return sorted({_end_of(name) for name in layers} - called)


def _end_of(path: str) -> str:
    """Return the end of a module's path that is the same in all layers and for all experts."""
    return ".".join([part for part in path.split(".") if not part.isdigit()][-2:])


def _not_possible(lora: LoraConfig, problem: str) -> ConfigError:
    return ConfigError("--lora-target-modules", lora.lora_target_modules, problem, f"Use {ALL_LINEAR}, or names of linear layers inside.")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by the names that they have in the base model; empty without an adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")}


def has_adapter(model: Any) -> bool:
    """Return True for a model that `add_adapter` has changed."""
    return ADAPTER in getattr(model, "peft_config", {})


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the block, the model computes what the base model does."""
    layers = list(adapted_layers(model).values())
    for layer in layers:
        layer._disable_adapters = True  # its public method also switches `requires_grad`, which DeepSpeed relies on
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdapterOff:
    """The reference policy of a model with an adapter: the same weights with the adapter off, called like the policy."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Score a micro-batch as `agentrl.learner.models.PolicyModel` does."""
        with adapter_off(self._engine.module):
            found: tuple[Tensor, ...] = self._engine(micro)
        return found


class StepDropout(nn.Module):
    """Dropout of inputs with one mask for all tokens and passes of a step (like Gal and Ghahramani, arXiv:1512.05287).

    A new mask in every pass would make the importance ratio of a policy to itself differ from 1, and the loss depend on how rows are
    laid out. Outside of a step there is no mask.
    """

    mask: Tensor | None = None  # [inputs], 0 or 1 / (1 - share)

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` # [..., inputs] with the inputs that the mask leaves out set to 0 and the others scaled up."""
        return x if self.mask is None else x * self.mask


@contextmanager
def step_dropout(models: Iterable[nn.Module], seed: int, step: int) -> Iterator[None]:
    """Within the block, adapters of these models leave out the inputs that `seed` and `step` decide, alike on every rank."""
    layers = [layer for model in models for layer in adapted_layers(model).values() if layer.lora_dropout[ADAPTER].share]
    for number, layer in enumerate(layers):
        dropout, weight = layer.lora_dropout[ADAPTER], layer.lora_A[ADAPTER].weight
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora dropout", step, number))
        kept = torch.rand(layer.in_features, generator=generator) >= dropout.share
        dropout.mask = (kept / (1.0 - dropout.share)).to(weight.device, weight.dtype)
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_dropout[ADAPTER].mask = None


def merged_parameters(model: nn.Module, parameters: Parameters = WHOLE) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the base model under its own name, with ``scale * B A`` added where there is an adapter.

    With DoRA the rows of the sum then get their trained lengths.

    The sum is computed in float32 and rounded once to the data type of the weight; the model's own tensors are only read. Where
    ranks hold parts, every rank iterates to the end. A tensor is valid until the next one is asked for.
    """
    layers = {id(layer.get_base_layer().weight): layer for layer in adapted_layers(model).values()}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        with parameters.gathered(parameter) as tensor:
            weight = whole_weight(parameter) if hasattr(parameter, "quant_state") else tensor
            layer = layers.get(id(parameter))
            yield name.replace(BASE, ""), weight if layer is None else _merged(layer, weight, parameters)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor, parameters: Parameters) -> Tensor:
    with parameters.gathered(layer.lora_A[ADAPTER].weight) as a, parameters.gathered(layer.lora_B[ADAPTER].weight) as b:
        change = b.float() @ a.float()
    if getattr(layer, "fan_in_fan_out", False):
        change = change.T
    merged: Tensor = weight.float() + layer.scaling[ADAPTER] * change
    if ADAPTER in (lengths := layer.lora_magnitude_vector):
        rows = 0 if getattr(layer, "fan_in_fan_out", False) else 1
        own = merged.to(weight.dtype).norm(dim=rows).to(weight.dtype)  # as the layer computes it, so that 1 stays 1 in bfloat16
        merged *= (lengths[ADAPTER].weight.float() / own.float()).unsqueeze(rows)
    return merged.to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Return True for the name of a parameter that belongs to an adapter."""
    return any(part in name for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


def adapter_parameters(parameters: Iterable[tuple[str, Tensor]], head: Sequence[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the adapter and of a `head` among those of the model, under the names that peft gives them in its files."""
    for name, tensor in parameters:
        if is_adapter(name) or name.rpartition(".")[0] in head:
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), tensor


def write_adapter(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter's weights, named as in peft's files, and its settings, as `PeftModel.from_pretrained` and vLLM read them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.peft_config[ADAPTER]
    before, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(folder))
    finally:
        config.inference_mode = before


SAMPLES, SAMPLE_BYTES = 64, 2**16


def base_fingerprint(model: str) -> str:
    """Return a hash of a model's configuration and of its weight files: their names, their sizes, and samples spread evenly over each.

    A model that was trained further has another one; single changed bytes of a large file may be missed, since reading 100 GB whole
    would take minutes at every start. `model` is a directory, or a hub name whose files are in the cache by now.
    """
    from transformers.utils import cached_file

    config = Path(model, "config.json") if Path(model).is_dir() else Path(str(cached_file(model, "config.json")))
    digest = hashlib.sha256(config.read_bytes())
    for path in sorted(config.parent.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
                if size <= SAMPLE_BYTES:
                    break
    return digest.hexdigest()


def check_base(saved: Mapping[str, Any] | None, model: str) -> None:
    """Check that a checkpoint's adapter belongs to the base model; `saved` is what `base_of` returned then.

    Raises:
        CheckpointError: If it is of another model.
    """
    if saved is not None and saved["fingerprint"] != base_fingerprint(model):
        raise CheckpointError(
            f"the adapter was trained beside {saved['model']}, whose files were not those that {model} holds now; "
            "put the original files back, or name a copy of them with --model"
        )


def base_of(model: Any, name: str) -> dict[str, str] | None:
    """Return name and fingerprint of the base of a model with an adapter, `None` for one without."""
    return {"model": name, "fingerprint": base_fingerprint(name)} if has_adapter(model) else None

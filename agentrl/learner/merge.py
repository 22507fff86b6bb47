"""Models made of models without training: an adapter merged into its base, and weighted averages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.core.adapter_files import CONFIG_FILE
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.files import swap_directory
from agentrl.core.language_models import CLASSES, LABELS
from agentrl.core.tokenizers import load_tokenizer, quiet_transformers
from agentrl.learner.export import ALONE, save_pretrained
from agentrl.learner.lora import ADAPTER, adapted_layers, merged_parameters

FLAG = "SOURCE"
WHOLE, REPLACED = f".modules_to_save.{ADAPTER}", ".original_module."
"""Parts of the names of layers that are trained whole beside an adapter, and of those that they replace."""


@torch.no_grad()
def merge_into_base(adapter: Path, target: Path, *, base: str = "", dtype: str = "auto", trust_remote_code: bool = False) -> int:
    """Write the base model with the adapter merged in, and return the number of its parameters.

    The base is loaded as it was before any quantisation: adding an adapter to weights of 4 bits would round away most of it. Sums are
    computed in float32 and rounded once.

    Args:
        adapter: Directory with an adapter of peft's form, as ``train`` and the commands of supervised training write it.
        target: Directory to write; complete under its name, or not there.
        base: The base model; empty for the one that the adapter names.
        dtype: Type of the weights to write; ``auto`` is that of the base.
        trust_remote_code: Allow the base's own Python code to run.

    Raises:
        ConfigError: If the adapter is of another kind, or the base cannot be loaded.
        CheckpointError: If the adapter does not fit the base, or the directory cannot be written.
    """
    import transformers
    from peft import PeftModel
    from safetensors import SafetensorError
    from transformers.utils import GENERATION_CONFIG_NAME

    settings = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    task = str(settings.get("task_type") or "CAUSAL_LM")
    if settings.get("peft_type") != "LORA" or task not in CLASSES:
        form = f"{settings.get('peft_type')} for {task}"
        raise ConfigError(FLAG, str(adapter), f"holds an adapter of the kind {form}", f"LoRA for {', '.join(CLASSES)} can be merged.")
    name = base or str(settings.get("base_model_name_or_path") or "")
    if not name:
        raise ConfigError("--base", "", "is not given, and the adapter does not say on which model it was trained", "Name the model.")
    labels = {"num_labels": LABELS[task]} if task in LABELS else {}
    wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        with quiet_transformers():
            kind: Any = CLASSES[task](name, trust_remote_code=trust_remote_code)
            model = kind.from_pretrained(name, dtype=wanted, trust_remote_code=trust_remote_code, use_safetensors=True, **labels)
            inner = PeftModel.from_pretrained(model, str(adapter)).get_base_model()
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{adapter} cannot be put on {name}: {reason}") from error
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError("--base", name, "holds quantised weights, which cannot take an adapter in", "Name the model as it was before.")
    if not adapted_layers(inner):
        raise CheckpointError(f"{adapter} changes no layer of {name}")
    if (adapter / GENERATION_CONFIG_NAME).is_file():  # the tokens at which the adapter was trained to end
        inner.generation_config = transformers.GenerationConfig.from_pretrained(adapter)
    tokenizer = load_tokenizer(str(adapter) if (adapter / "tokenizer_config.json").is_file() else name, trust_remote_code=trust_remote_code)
    save_pretrained(inner, _without_wrappers(merged_parameters(inner)), tokenizer, target, ALONE)
    return sum(parameter.numel() for _, parameter in _without_wrappers(merged_parameters(inner)))


def _without_wrappers(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters under the names of the base model; layers that were trained whole take the places of those that they replace."""
    for name, tensor in parameters:
        if REPLACED not in name:
            yield name.replace(WHOLE, ""), tensor


def average_models(sources: Sequence[Path], weights: Sequence[float], target: Path) -> int:
    """Write the weighted average of several models of one architecture, and return the number of its parameters.

    Every tensor is ``sum(w_i * t_i) / sum(w_i)``, computed in float32 and rounded once to the type of the first model's. Configuration and
    tokenizer are the first model's. Only a tensor of each model is in memory at a time, beside the file that is written.

    Raises:
        ConfigError: If the models do not have the same tensors.
        CheckpointError: If one cannot be read, or the directory cannot be written.
    """
    from safetensors import SafetensorError

    total = sum(weights)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(sources[0], temporary, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.pt", "*.pth"))
        with ExitStack() as stack:
            opened = [_Tensors(source, stack) for source in sources]
            for source, tensors in zip(sources[1:], opened[1:], strict=True):
                _check_same(sources[0], opened[0], source, tensors)
            count = _write_average(opened, [weight / total for weight in weights], temporary)
        swap_directory(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the average cannot be written to {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count


class _Tensors:
    """The safetensors files of a model, open."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self.by_file: dict[str, list[str]] = {}  # name of a file -> names of its tensors
        self._files: dict[str, Any] = {}  # name of a tensor -> its file
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            self.by_file[path.name] = list(file.keys())
            self._files.update(dict.fromkeys(self.by_file[path.name], file))

    def shapes(self) -> dict[str, list[int]]:
        """Shape of every tensor."""
        return {name: list(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def get(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _check_same(first: Path, expected: _Tensors, source: Path, found: _Tensors) -> None:
    theirs, ours = found.shapes(), expected.shapes()
    if theirs != ours:
        name = next(iter(sorted(theirs.keys() ^ ours.keys())), "") or next(name for name in ours if ours[name] != theirs[name])
        problem = f"has other tensors than {first}: {name} is {theirs.get(name, 'missing')} here and {ours.get(name, 'missing')} there"
        raise ConfigError(FLAG, str(source), problem, "Average models that were trained from one another.")


def _write_average(opened: Sequence[_Tensors], weights: Sequence[float], folder: Path) -> int:
    from safetensors.torch import save_file

    count = 0
    for file, names in opened[0].by_file.items():
        state: dict[str, Tensor] = {}
        for name in names:
            state[name] = _average([tensors.get(name) for tensors in opened], weights)
            count += state[name].numel()
        save_file(state, folder / file, metadata={"format": "pt"})
    return count


def _average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():
        return first
    total = torch.zeros_like(first, dtype=torch.float32)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.to(torch.float32), alpha=weight)
    return total.to(first.dtype)

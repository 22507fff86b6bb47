"""Arguments of vLLM's own, ``--engine-args name=value``: read, and checked against vLLM's list of them without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.named_args import parse_named_args
from agentrl.core.plugins import suggest

FLAG = "--engine-args"

OURS = {
    "model": "--model",
    "dtype": "--engine-dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
    "data_parallel_size": "--num-engines",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "kv_cache_memory_bytes": "--kv-cache-gib",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "trust_remote_code": "--trust-remote-code",
    "seed": "--seed",
    "enable_lora": "--publish",
    "enable_sleep_mode": "--colocate",
    "enable_return_routed_experts": "--router-replay",
    "aux_output_config": "--router-replay",
}
"""Arguments for which there is a flag."""
FIXED = (
    *("skip_tokenizer_init", "enable_prefix_caching", "logprobs_mode", "structured_outputs_config", "disable_log_stats"),
    *("weight_transfer_config", "worker_extension_cls", "distributed_executor_backend", "max_lora_rank", "max_loras", "max_cpu_loras"),
)
"""Arguments that training relies on."""
NATIVE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM sets room aside for; an adapter of a lower rank than its room is filled up with zeros."""
_TYPES: dict[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "str": str}


def workers_per_engine(tensor_parallel_size: int, words: Sequence[str]) -> int:
    """Return the number of vLLM's workers, and so of GPUs, of one engine."""
    pipeline = parse_named_args(words).get("pipeline_parallel_size", 1)
    return tensor_parallel_size * (pipeline if isinstance(pipeline, int) else 1)


def check_engine_args(words: Sequence[str]) -> None:
    """Compare each argument with vLLM's own list; without vLLM on this machine, its engines will.

    Raises:
        ConfigError: If vLLM knows no such argument, a flag or training itself sets it, or its value is of another type.
    """
    for name, value in parse_named_args(words).items():
        if name in OURS or name.startswith("data_parallel"):
            raise ConfigError(FLAG, name, "has a flag of its own", f"Use {OURS.get(name, '--num-engines')}.")
        if name in FIXED:
            raise ConfigError(FLAG, name, "is set by agentrl, because training relies on it", "Leave it out.")
        if not (known := _known()):
            continue
        if name not in known:
            raise ConfigError(FLAG, name, "is no argument of the installed vLLM", suggest(name, known) or "See `vllm serve --help=all`.")
        if not _fits(value, known[name]):
            raise ConfigError(FLAG, f"{name}={value}", f"must be {known[name]}", "Correct the value.")


def _fits(value: object, annotation: str) -> bool:
    """Return whether a value is of one of the plain types that the annotation names; any value fits other types."""
    names = re.split(r"\s*\|\s*", annotation)
    if not all(name in _TYPES or name == "None" for name in names):
        return True
    # Python counts True and False as integers.
    if isinstance(value, bool):
        return "bool" in names
    return (value is None and "None" in names) or any(name in _TYPES and isinstance(value, _TYPES[name]) for name in names)


@cache
def _known() -> dict[str, str]:
    """Return vLLM's arguments with their types, from its source text; importing it takes ten seconds."""
    found = importlib.util.find_spec("vllm")
    source = Path(found.origin).parent / "engine" / "arg_utils.py" if found and found.origin else None
    if source is None or not source.is_file():
        return {}
    classes = {item.name: item for item in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(item, ast.ClassDef)}
    fields = (field for name in ("EngineArgs", "AsyncEngineArgs") if name in classes for field in classes[name].body)
    return {
        field.target.id: ast.unparse(field.annotation)
        for field in fields
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }

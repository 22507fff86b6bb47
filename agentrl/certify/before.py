"""The short certification before a training run: only the kernel that the run asks for, in a process of its own, kept for the next run.

The process is there because the one that starts a run may have no need of torch at all, and because no model may end the run by a crash. A
certificate is kept by the hash of everything that it depends on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from agentrl.certify.results import Certificate, Comparison
from agentrl.core.errors import ConfigError
from agentrl.core.files import write_text
from agentrl.core.model_shape import local_config, text_part
from agentrl.core.paths import cache_folder
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.settings import LearnerSettings

PACKAGES = ("transformers", "torch", "peft")
SOURCES = ("certify", "learner", "engine", "weights")
"""Parts of agentrl that decide the outcome."""
PASSED_OVER = ("_name_or_path", "transformers_version")
"""Fields of a configuration that decide nothing."""


def certificate_file(settings: Mapping[str, Any], tried: Sequence[str]) -> Path:
    """Return the file of the certificate of a model with the contents `settings` of its ``config.json``.

    Args:
        settings: The configuration.
        tried: The parts that were compared, such as the kernels of the learner.
    """
    digest = hashlib.sha256()
    fields = {name: value for name, value in settings.items() if name not in PASSED_OVER}
    digest.update(json.dumps([fields, list(tried), [_version(name) for name in PACKAGES]], sort_keys=True, default=str).encode())
    package = Path(__file__).parent.parent
    # The code itself counts, not its version, which stays the same while a part is worked on.
    for part in SOURCES:
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return cache_folder() / "certificates" / f"{digest.hexdigest()[:32]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_certificate(path: Path) -> Certificate | None:
    """Return a kept certificate; `None` if there is none, or it cannot be read."""
    try:
        return Certificate.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_certificate(path: Path, certificate: Certificate) -> None:
    """Write a certificate; nothing is kept where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(certificate.to_dict(), indent=2) + "\n")
    except OSError:
        return


_log = logging.getLogger(__name__)

KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Types of models that a test finds exact with every kernel; they are not tried again at the start of a run."""
FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding that are the same whatever the length of a row."""
NOISE = ("dropout", "pdrop", "jitter", "drop_rate")
"""Parts of the names of fields with the strength of something random."""
DEADLINE_S = 60.0
ANYWAY = "--skip-checks model begins the run all the same."


def is_known(settings: Mapping[str, Any]) -> bool:
    """Return True for a configuration of a type in `KNOWN` without noise or an embedding that depends on the length of the row."""
    text = text_part(settings)
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    noisy = any(value for name, value in text.items() if any(part in name for part in NOISE) and name != "attention_dropout")
    return settings.get("model_type") in KNOWN and kind in FIXED_ROTARY and not noisy


def kernels_of(config: LearnerConfig, device: Literal["cpu", "cuda"]) -> tuple[str, ...]:
    """Return the kernels to try for a run; flash attention runs on no CPU, so that ``varlen`` stands for its layout."""
    asked = config.attn_implementation
    if asked in ("eager", "sdpa", "varlen"):
        return (asked,)
    return ("sdpa",) if device == "cpu" and config.sequence_parallel == 1 else ("varlen", "sdpa")


async def refuse_wrong(plan: LearnerSettings) -> None:
    """Raise if a learner would compute its model wrongly; a model that cannot be tried passes.

    Raises:
        ConfigError: With the layout that is wrong, by how much, and what to do instead.
    """
    path = local_config(plan.model)
    if path is None:
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    if is_known(settings):
        return
    kernels = kernels_of(plan.learner, plan.device)
    kept = certificate_file(settings, kernels)
    certificate = read_certificate(kept) or await _certify(path, kernels, trust_remote_code=plan.trust_remote_code)
    if certificate is None:
        return
    keep_certificate(kept, certificate)
    for comparison in certificate.wrong:
        if plan.learner.share_prompts or "prefix trees" not in comparison.name:
            raise _refusal(comparison, certificate, plan.learner.attn_implementation)


def _refusal(comparison: Comparison, certificate: Certificate, asked: str) -> ConfigError:
    kind = certificate.model_type
    problem = f"agentrl certify finds {comparison.name} wrong for models of the type {kind}: {comparison.reason}"
    by = "" if comparison.logprob is None else f", by {comparison.logprob:.2g} nats at most"
    return ConfigError("--attn-implementation", asked, problem + by, f"{comparison.remedy} {ANYWAY}")


async def _certify(path: Path, kernels: Sequence[str], *, trust_remote_code: bool) -> Certificate | None:
    """Return the certificate that a process of its own makes; `None`, and a line in the log, if it makes none."""
    words = [sys.executable, "-m", __name__, str(path), ",".join(kernels), str(int(trust_remote_code))]
    # The twin is computed on the CPU, because the run may already start its own processes on the GPUs.
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=variables)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        # Libraries may have written to standard output before.
        return Certificate.from_dict(json.loads(output.decode().splitlines()[-1]))
    except (TimeoutError, ValueError, KeyError, TypeError, IndexError):
        _log.info("%s is not certified before the run; see agentrl certify", path)
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main(words: Sequence[str]) -> None:
    """Write the certificate of a ``config.json`` with some kernels to standard output."""
    from agentrl.certify.configs import read_config
    from agentrl.certify.run import certify

    path, kernels, trusted = words
    settings = read_config(Path(path), trust_remote_code=trusted == "1")
    certificate = certify(path, settings, only=kernels.split(","))
    sys.stdout.write(json.dumps(certificate.to_dict()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

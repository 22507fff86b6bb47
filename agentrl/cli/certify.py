"""``agentrl certify``: proofs on a small twin that learner and engines compute what a model computes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.assets import model_path
from agentrl.config.load import Command, load
from agentrl.config.words import Word
from agentrl.core.model_shape import local_config
from agentrl.rollout.plan import ModelConfig


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """The extent of a certification, and its report."""

    vllm: bool = False
    """Sample with vLLM too, if it has the model's class and runs here; takes about 20 s more."""
    json: bool = False
    """Write the certificate as JSON."""
    debug: bool = False
    """Show tracebacks."""


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """Sections of ``agentrl certify``; ``--model`` names a directory or a ``config.json``, weights are not read."""

    model: ModelConfig = field(default_factory=ModelConfig)
    certify: CertifyOptions = field(default_factory=CertifyOptions)


CERTIFY = Command(
    "certify",
    CertifyConfig,
    "Compare what learner, adapters and engines compute with the model itself, on a small twin made from its config.json alone. "
    "Exit code: 0 exact, 1 wrong, 2 cannot be tried.",
    words=(Word(setting="model", label="MODEL", doc="Directory of a model, or its config.json; by default the bundled model."),),
)


def main(words: list[str]) -> int:
    """Run the command with the words after ``certify``; the code is 1 if a part is wrong, 2 if none can be tried."""
    config = load(CERTIFY, words)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
    from agentrl.certify.configs import read_config
    from agentrl.certify.report import print_certificate
    from agentrl.certify.run import certify
    from agentrl.certify.templates import compare_template
    from agentrl.track.text import Screen

    model = model_path(config.model.model)
    settings = read_config(local_config(model) or Path(model).expanduser(), trust_remote_code=config.model.trust_remote_code)
    certificate = certify(model, settings, vllm=config.certify.vllm)
    folder = str(Path(model).parent if model.endswith(".json") else model)
    template = compare_template(folder, config.model, trust_remote_code=config.model.trust_remote_code)
    certificate = replace(certificate, comparisons=(*certificate.comparisons, *template))
    if config.certify.json:
        sys.stdout.write(json.dumps(certificate.to_dict(), indent=2) + "\n")
    else:
        print_certificate(Screen(), certificate)
    return certificate.exit_code

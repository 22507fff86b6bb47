"""``agentrl certify``: proofs on a small twin that learner and engines compute what a model computes."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from agentrl.assets import tiny_model_path
from agentrl.config.certify import CERTIFY
from agentrl.config.load import load
from agentrl.core.model_shape import local_config


def main(words: list[str]) -> int:
    """Run the command with the words after ``certify``; the code is 1 if a part is wrong, 2 if none can be tried."""
    config = load(CERTIFY, words)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
    from agentrl.certify.configs import read_config
    from agentrl.certify.report import print_certificate
    from agentrl.certify.run import certify
    from agentrl.certify.templates import compare_template
    from agentrl.track.text import Screen

    model = config.model.model or str(tiny_model_path())
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

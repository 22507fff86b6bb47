"""Settings of ``agentrl certify``."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.config.load import Command
from agentrl.config.words import Word
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

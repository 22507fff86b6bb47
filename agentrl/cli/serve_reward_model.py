"""``agentrl serve-reward-model``: a reward model over HTTP, for ``--remote-rm-url`` of this system and of OpenRLHF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from agentrl.cli.serve import say, until_signal
from agentrl.cli.words import Arguments, read
from agentrl.config.reward import reward_model_facts
from agentrl.core.settings import Count, CountOrZero, Port


@dataclass(frozen=True, kw_only=True)
class ServeRewardModelArgs(Arguments):
    """Offer a reward model over HTTP: POST {"query", "prompts", "labels"} gives {"rewards", "scores", "extra_logs"}. Ctrl-C ends it."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A reward model: a Hugging Face directory or hub name, as ``agentrl reward-model`` writes it."""
    port: Port = 5000
    """Port to listen on. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it may ask the model; there is no key."""
    batch_size: Count = 64
    """Texts that go through the model at once."""
    max_pending: Count = 1024
    """Texts that may wait; further requests are refused with 429 and ``Retry-After``."""
    max_tokens: CountOrZero = 0
    """Tokens that are read; of a longer text the last ones. 0: the context length of the model."""
    value_head_prefix: str = ""
    """Name of the layer that makes the score, in the model's files. Empty: ``score``, or what its ``config.json`` says."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    trust_remote_code: tyro.conf.FlagCreatePairsOff[bool] = False
    """Allow the model's own Python code to run."""


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    args = read(ServeRewardModelArgs, "serve-reward-model", words)
    reward_model_facts(args.model, args.value_head_prefix, "MODEL")
    from agentrl.api.reward_serving import RewardServing, serve_reward_model

    serving = RewardServing(
        model=args.model,
        port=args.port,
        host=args.host,
        batch_size=args.batch_size,
        max_pending=args.max_pending,
        max_tokens=args.max_tokens,
        head=args.value_head_prefix,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    return until_signal(serve_reward_model(serving, say))

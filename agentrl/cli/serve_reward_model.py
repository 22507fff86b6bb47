"""``agentrl serve-reward-model``: a reward model over HTTP, for ``--remote-rm-url`` of this system and of OpenRLHF."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.cli.serve import say, until_signal
from agentrl.cli.words import command_of, read, word
from agentrl.config.serving import RewardServing
from agentrl.engine.reward_model_facts import reward_model_facts


@dataclass(frozen=True, kw_only=True)
class ServeRewardModelArgs(RewardServing):
    """Offer a reward model over HTTP: POST {"query", "prompts", "labels"} gives {"rewards", "scores", "extra_logs"}. Ctrl-C ends it."""


SERVE_REWARD_MODEL = command_of("serve-reward-model", ServeRewardModelArgs, word("model", "MODEL"))


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    args: ServeRewardModelArgs = read(SERVE_REWARD_MODEL, words)
    reward_model_facts(args.model, args.value_head_prefix, "MODEL")
    from agentrl.api.reward_serving import serve_reward_model

    return until_signal(serve_reward_model(args, say))

"""Flags of OpenRLHF that mean the same thing here; accepted silently, so that a known command line keeps working."""

from __future__ import annotations

from collections.abc import Sequence

ALIASES: dict[str, tuple[str, ...]] = {
    "--agent-func-path": ("--agent",),
    "--prompt-data": ("--prompts",),
    "--prompt-data-probs": ("--prompt-probs",),
    "--eval-dataset": ("--eval-prompts",),
    "--eval-steps": ("--eval-every",),
    "--eval-n-samples-per-prompt": ("--eval-samples",),
    "--pretrain": ("--model",),
    "--rollout-batch-size": ("--groups-per-step",),
    "--generate-max-len": ("--max-new-tokens",),
    "--vllm-num-engines": ("--num-engines",),
    "--vllm-tensor-parallel-size": ("--tensor-parallel-size",),
    "--vllm-gpu-memory-utilization": ("--gpu-memory-utilization",),
    "--actor-num-gpus-per-node": ("--num-learners",),
    "--actor-learning-rate": ("--learning-rate",),
    "--l2": ("--weight-decay",),
    "--max-norm": ("--max-grad-norm",),
    "--max-tokens-per-gpu": ("--micro-batch-tokens",),
    "--adam-offload": ("--optimizer-offload",),
    "--eps-clip": ("--eps-clip-low", "--eps-clip-high"),
    "--use-tensorboard": ("--tensorboard",),
    "--async-train": ("--async",),
    "--async-queue-size": ("--max-staleness",),
    "--dynamic-filtering-reward-range": ("--dynamic-filtering-range",),
    "--overlong-buffer-len": ("--overlong-buffer",),
    "--overlong-penalty-factor": ("--overlong-penalty",),
    "--stop-properly-penalty-coef": ("--stop-properly-penalty",),
}


def expand_aliases(args: Sequence[str]) -> list[str]:
    """Rewrite aliased flags, with ``_`` or ``-`` between words and with ``--flag value`` or ``--flag=value``.

    Args:
        args: Command-line words.

    Returns:
        The words with every alias replaced by our flag or flags.
    """
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        targets = ALIASES.get(name.replace("_", "-")) if name.startswith("--") else None
        if targets is None:
            words.append(word)
        elif equals:
            words += [f"{target}={value}" for target in targets]
        elif len(targets) > 1 and rest:
            value = rest.pop(0)
            words += [part for target in targets for part in (target, value)]
        else:
            words += targets
    return words

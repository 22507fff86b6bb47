"""The same contract in OpenRLHF's dictionary form: files written for it run unchanged.

Prompts come from a file, and observations are raw text that is appended to the context as it is. Run it with::

    agentrl train --agent examples/dictionary_form.py --prompts examples/reverse.jsonl --input-key question --label-key answer
"""

from typing import Any


class AgentInstance:
    """Two tries to reverse three digits, with a hint in between."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start with the prompt as it is."""
        self.tries = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Judge one try."""
        self.tries += 1
        right = states["action_text"].strip() == states["label"]
        return {
            "rewards": 1.0 / self.tries if right else 0.0,
            "scores": float(right),
            "environment_feedback": "" if right else "<|end|><|user|>Again.<|end|><|assistant|>",
            "done": right or self.tries == 2,
            "extra_logs": {"tries": self.tries},
        }

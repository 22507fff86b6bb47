"""vLLM's scheduler for models that read images: its workers keep the pixels of images that a request found in the prefix cache.

vLLM 0.32 strips those pixels from a new request, because no worker has to look at them while the keys and values stay. A publication
forgets these, and so does a preemption for want of memory; its first model runner then resumes the request without being given the
pixels, and the engine dies of an "Encoder cache miss".
"""

from __future__ import annotations

from copy import copy
from typing import Any

SCHEDULER = "agentrl.engine.vllm_scheduler.make_scheduler"
"""Name by which vLLM finds the scheduler, in whichever process has it."""


class _WholeFeatures:
    """Hands all images of a new request to the workers, over a scheduler of vLLM."""

    requests: dict[str, Any]

    def schedule(self, *args: Any, **named: Any) -> Any:
        output = super().schedule(*args, **named)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            new.mm_features = self.requests[new.req_id].mm_features
        return output


def make_scheduler(vllm_config: Any, **named: Any) -> Any:
    """Return the scheduler that vLLM would choose, with whole features where a resumed request is not sent anew."""
    config = copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    chosen = config.get_scheduler_cls()
    if not getattr(vllm_config, "use_v2_model_runner", False):
        chosen = type(chosen.__name__, (_WholeFeatures, chosen), {})
    return chosen(vllm_config=vllm_config, **named)

"""An engine that asks a person: the policy of ``agentrl play``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from agentrl.core.errors import ContextLengthError
from agentrl.core.protocols import EngineStats, GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, floats, ints

Ask: TypeAlias = Callable[[GenerationRequest], Awaitable[Sequence[int]]]


class HumanEngine:
    """Implements `agentrl.core.protocols.Engine`; every log-probability is 0, every version is 0.

    Args:
        ask: Asks for the token ids of a turn; they are cut to the turn's budget, as a model's would be.
        max_model_len: Context length in tokens.
    """

    def __init__(self, ask: Ask, *, max_model_len: int) -> None:
        self._ask, self.max_model_len = ask, max_model_len
        self.end_token_ids: tuple[int, ...] = ()

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Wait for the person's turn, without a deadline.

        Raises:
            ContextLengthError: If the prompt leaves no room for one token.
        """
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ContextLengthError(f"the prompt has {len(request.prompt_ids)} tokens, the context {self.max_model_len} (--max-model-len)")
        said = list(await self._ask(request))
        kept = said[: min(room, request.sampling.max_tokens)]
        return Generation(
            token_ids=ints(kept),
            logprobs=floats([0.0] * len(kept)),
            versions=ints([0] * len(kept)),
            finish_reason=FinishReason.LENGTH if len(kept) < len(said) else FinishReason.STOP,
        )

    async def load_weights(self, update: WeightUpdate) -> int:
        """There are no weights; the version is taken as it is."""
        return update.version

    def stats(self) -> EngineStats:
        """Nothing is counted."""
        return EngineStats()

    async def close(self) -> None:
        """Nothing to do."""

"""Continuous batching of a model of transformers: new prompts are computed, then all sequences are decoded together."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from agentrl.core.errors import EngineDeadError
from agentrl.core.model_shape import CPU_CONTEXT
from agentrl.core.protocols import EngineLoad, GenerationRequest, Memory, TokenListener
from agentrl.core.types import FinishReason, Generation, experts_of, floats, ints
from agentrl.engine.commands import CommandQueue
from agentrl.engine.prefill import Prefill
from agentrl.engine.sampling import sample
from agentrl.engine.sequences import Sequence, SlotTable
from agentrl.engine.settings import EngineSettings
from agentrl.engine.slot_model import SlotModel
from agentrl.engine.slots import SlotCache, Step, padded
from agentrl.weights.digests import Found, found_in

FIRST_CAPACITY = 64
"""Tokens of a slot at first; it doubles when a sequence needs more."""


Tell: TypeAlias = Callable[[list[tuple[TokenListener, int]]], object]
"""Takes the tokens of one step with those who listen to them."""


class Batcher:
    """Owns a model on one thread; other threads post commands. `tell` gets new tokens, once per step, before an answer that they end."""

    def __init__(self, settings: EngineSettings, tell: Tell) -> None:
        self._tell = tell
        # OpenMP reads the variable once, when PyTorch is imported, which may have been before the engine's environment was set.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._model = SlotModel(settings)
        self._tokenizer: Any = (
            AutoTokenizer.from_pretrained(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
            if settings.stop_strings
            else None
        )
        self.context = self._model.context or CPU_CONTEXT
        self.vocabulary, self.end_ids, self.placeholders = self._model.vocabulary, self._model.end_ids, self._model.placeholders
        self.version = 0
        self.dead: str | None = None  # why it has ended
        self.load_now, self.ended = EngineLoad(), threading.Event()
        self._seed, self._keep_kv = settings.seed, settings.weights.kv_on_publish == "keep"
        self._commands = CommandQueue()
        self._lock = threading.Lock()
        self._waiting: deque[Sequence] = deque()
        self._active: dict[Sequence, None] = {}  # a set with an order
        self._table = SlotTable(0)
        self._asleep: set[Memory] = set()
        self._max_slots, self._tokens = (
            settings.engine.max_num_seqs,
            int(settings.engine.kv_cache_gib * 2**30 / self._model.cache.bytes_per_token),
        )
        self._resize(min(FIRST_CAPACITY, padded(self.context)))

    # Called by other threads.

    def post(self, command: Callable[[], object]) -> None:
        """Have the thread call something between two steps; a batcher that has ended does not."""
        # Under the lock: a command that comes after the last look at the queue would never be answered.
        with self._lock:
            if self.dead is None:
                self._commands.put(command)
                return
        raise EngineDeadError(f"the engine cannot be used: {self.dead}")

    def call(self, command: Callable[[], object]) -> Future[object]:
        """Do the same, and return where its result will be."""
        result: Future[object] = Future()
        result.set_running_or_notify_cancel()  # so that nobody else ends it

        def run() -> None:
            try:
                result.set_result(command())
            except BaseException as error:
                result.set_exception(error)

        self.post(run)
        return result

    def end(self, reason: str) -> None:
        """End the thread after the present step; every request fails with `EngineDeadError`."""
        with self._lock:
            self.dead = self.dead or reason
        self._commands.put(None)

    # The thread.

    @torch.inference_mode()
    def serve(self) -> None:
        """Serve commands and take steps until the end."""
        try:
            while self._commands.serve(self._runnable) and self.dead is None:
                if not self._asleep:
                    self._admit()
                    if self._active:
                        self._decode()
                self._note_load()
        except BaseException as error:
            with self._lock:
                self.dead = self.dead or f"{type(error).__name__}: {error}"
        failed = [*self._active, *self._waiting]
        self._active, self._waiting = {}, deque()  # before commands that abort one of them
        for sequence in failed:
            sequence.answer.set_exception(EngineDeadError(f"the engine is gone: {self.dead}"))
        self._commands.drain()
        self._model.drop()
        self.ended.set()

    def _runnable(self) -> bool:
        return bool(self._active or self._waiting) and not self._asleep

    def add(self, request: GenerationRequest, answer: Future[Generation]) -> None:
        """Queue a request."""
        if self.dead is not None:
            answer.set_exception(EngineDeadError(f"the engine is gone: {self.dead}"))
            return
        sampling, ids = request.sampling, request.prompt_ids.tolist()
        seed = self._seed if sampling.seed is None else sampling.seed
        self._waiting.append(
            Sequence(
                request=request,
                answer=answer,
                ids=ids,
                budget=min(sampling.max_tokens, self.context - len(ids)),
                ends=frozenset((*self.end_ids, *sampling.stop_token_ids)),
                # A generator for each sequence, so that its draws do not depend on what is decoded beside it.
                uniform=np.random.Generator(np.random.Philox(key=seed % 2**64)),
            )
        )

    def abort(self, request_id: str) -> None:
        """End a request with what was sampled."""
        for sequence in [*self._active, *self._waiting]:
            if sequence.request.request_id == request_id:
                self._finish(sequence, FinishReason.ABORTED)

    def load(self, path: str, version: int) -> int:
        """Copy a set of weights into the model, and forget keys and values; those of sequences under way stay if they are to be kept."""
        self._model.load(path)
        if self._keep_kv:  # without a session and a prompt, no later sequence finds them
            self._table.forget_free()
        else:
            self._forget()
            self._table = SlotTable(len(self._table))
        self.version = version
        return version

    def digests(self, dtype: str) -> Found:
        """Return the digests of the model's weights."""
        return found_in(self._model.named_parameters(), dtype)

    def sleep(self) -> None:
        """Move the weights to CPU memory and drop the cache; sequences under way wait, with what was sampled."""
        if not self._asleep:
            self._forget()
            self._table = SlotTable(0)
            self._model.cache.drop()
            self._model.move(torch.device("cpu"))
            self._asleep = {"weights", "kv_cache"}

    def wake(self, *parts: Memory) -> None:
        """Undo `sleep` for parts of the memory."""
        if "weights" in parts and "weights" in self._asleep:
            self._model.move(self._model.device)
        if "kv_cache" in parts and "kv_cache" in self._asleep:
            self._resize(min(FIRST_CAPACITY, padded(self.context)))
        self._asleep -= set(parts)

    def _forget(self) -> None:
        """Have the sequences under way computed again."""
        # Backwards, so that they come to the head of the queue in their old order.
        for sequence in reversed(self._active):
            sequence.slot = -1
            self._waiting.appendleft(sequence)
        self._active = {}

    def _admit(self) -> None:
        """Compute waiting sequences, as many as there are free slots, and sample their next tokens."""
        if (chosen := min(len(self._waiting), self._table.free)) == 0:
            return
        need = max(len(sequence.ids) for sequence in islice(self._waiting, chosen)) + 1
        if need > self._model.cache.capacity:
            self._resize(self._model.cache.capacity * 2, need=need)
        if not (batch := [self._waiting.popleft() for _ in range(min(len(self._waiting), self._table.free))]):
            return  # fewer, longer slots, all of them in use
        self._active.update(dict.fromkeys(batch))
        self._sample(batch, Prefill(self._model, self._table).run(batch))

    def _decode(self) -> None:
        """Compute the next token of every sequence."""
        longest = max(len(sequence.ids) for sequence in self._active)
        if longest > self._model.cache.capacity:
            self._resize(self._model.cache.capacity * 2, need=longest)
        if not (batch := list(self._active)):
            return
        rows = torch.tensor([sequence.slot for sequence in batch])
        starts = torch.tensor([len(sequence.ids) - 1 for sequence in batch])
        last = torch.tensor([[sequence.ids[-1]] for sequence in batch])
        keys = min(padded(longest), self._model.cache.capacity)
        images = [(row, len(each.ids) - 1, each.request.placed) for row, each in enumerate(batch) if each.request.placed]
        logits, experts = self._model(last, Step(rows, starts, torch.ones_like(rows), 1, keys), images)
        for sequence, new in zip(batch, experts, strict=True):
            slot = self._table[sequence.slot]
            slot.ids.append(sequence.ids[-1])
            slot.experts.extend(new)
            sequence.experts.extend(new)
        self._sample(batch, logits)

    def _sample(self, batch: list[Sequence], logits: Tensor) -> None:
        draws = [sequence.uniform.random() for sequence in batch]
        tokens, logprobs = sample(logits, [sequence.request.sampling for sequence in batch], draws)
        pairs = zip(batch, tokens, strict=True)
        if news := [(listener, token) for sequence, token in pairs if (listener := sequence.request.on_tokens) is not None]:
            self._tell(news)
        for sequence, token, logprob in zip(batch, tokens, logprobs, strict=True):
            sequence.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.ends or self._stopped(sequence):
                self._finish(sequence, FinishReason.STOP)
            elif len(sequence.logprobs) == sequence.budget:
                self._finish(sequence, FinishReason.LENGTH)

    def _stopped(self, sequence: Sequence) -> bool:
        """Return whether what was sampled holds one of the strings that end it."""
        stop = sequence.request.sampling.stop
        if not stop:
            return False
        # All of it, because a stop string may begin within a token, and a character may take several tokens.
        text = self._tokenizer.decode(sequence.ids[sequence.prompt_length :], skip_special_tokens=False)
        return any(part in text for part in stop)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence in self._active:
            del self._active[sequence]
            self._table.release(sequence.slot)
        else:
            self._waiting.remove(sequence)
        sequence.answer.set_result(
            Generation(
                token_ids=ints(sequence.ids[sequence.prompt_length :]),
                logprobs=floats(sequence.logprobs),
                versions=ints(sequence.versions),
                finish_reason=reason,
                cached_tokens=sequence.cached,
                experts=experts_of(np.stack(sequence.experts)) if sequence.experts else None,
            )
        )

    # Memory.

    def _resize(self, capacity: int, need: int = 0) -> None:
        """Make slots longer and, if the memory wants it, fewer; sequences without a slot wait until there is one again."""
        while capacity < need:
            capacity *= 2
        capacity = min(capacity, padded(self.context))
        number = max(1, min(self._max_slots, self._tokens // capacity))
        if len(self._table) == 0:
            self._table, self._model.cache = SlotTable(number), SlotCache(number, capacity)
            return
        self._table, moves = self._table.resized(number)
        self._model.cache = self._model.cache.resized(number, capacity, moves)
        for sequence in [each for each in self._active if each.slot < 0]:
            del self._active[sequence]
            self._waiting.appendleft(sequence)

    def _note_load(self) -> None:
        held = sum(len(sequence.ids) for sequence in self._active)
        capacity = max(1, len(self._table)) * self._model.cache.capacity
        self.load_now = EngineLoad(running=len(self._active), waiting=len(self._waiting), kv_usage=min(1.0, held / capacity))

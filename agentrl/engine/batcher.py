"""Continuous batching of a model of transformers: prompts are computed one at a time, then all sequences are decoded together."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from agentrl.core.errors import EngineDeadError
from agentrl.core.protocols import EngineLoad, GenerationRequest, Memory
from agentrl.core.types import ExpertArray, FinishReason, Generation, experts_of, floats, ints
from agentrl.engine.sampling import sample
from agentrl.engine.settings import EngineSettings
from agentrl.engine.slot_model import SlotModel
from agentrl.engine.slots import KEYS, SlotCache, Step

GATHER_S = 0.001
"""Time that further requests are awaited before a step, as long as they keep coming; they tend to come in bursts."""
GATHER_ROUNDS = 4
FIRST_CAPACITY = 64
"""Tokens of a slot at first; it doubles when a sequence needs more."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way."""

    request: GenerationRequest
    answer: Future[Generation]
    ids: list[int]  # prompt and what was sampled
    budget: int  # tokens to sample at most
    ends: frozenset[int]  # tokens that end it
    uniform: np.random.Generator  # decides what is sampled
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)  # [layers, top_k] of each token when it was first computed, if recorded
    slot: int = -1
    cached: int = 0  # prompt tokens that were not computed again

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)


@dataclass(slots=True)
class Slot:
    """Tokens whose keys and values a slot holds; they stay after the sequence has ended, until the slot is needed."""

    ids: list[int] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)  # [layers, top_k] of each token, if recorded
    session: str = ""
    prompt: bytes = b""  # of the sequence, if `logits` are known
    logits: Tensor | None = None  # after the prompt # [V]
    used: int = 0  # when it was last taken
    owner: Sequence | None = None


class Batcher:
    """Owns a model on one thread; other threads post commands."""

    def __init__(self, settings: EngineSettings, cpu_context: int) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._model = SlotModel(settings)
        self._tokenizer: Any = (
            AutoTokenizer.from_pretrained(settings.model.model, trust_remote_code=settings.model.trust_remote_code)
            if settings.stop_strings
            else None
        )
        own = self._model.positions or cpu_context
        self.context = settings.engine.max_model_len or (min(own, cpu_context) if settings.device == "cpu" else own)
        self.vocabulary, self.end_ids = self._model.vocabulary, self._model.end_ids
        self.version = 0
        self.dead: str | None = None  # why it has ended
        self.load_now, self.ended = EngineLoad(), threading.Event()
        self._seed, self._keep_kv = settings.seed, settings.engine.kv_on_publish == "keep"
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock, self._order = threading.Lock(), itertools.count()
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._slots: list[Slot] = []
        self._asleep: set[Memory] = set()
        self._max_slots, self._tokens = (
            settings.engine.max_num_seqs,
            int(settings.engine.kv_cache_gib * 2**30 / self._model.cache.bytes_per_token),
        )
        self._resize(min(FIRST_CAPACITY, _padded(self.context)))

    # Called by other threads.

    def post(self, command: Callable[[], object]) -> None:
        """Have the thread call something between two steps; a batcher that has ended does not."""
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
            while self._serve_commands():
                if not self._asleep:
                    self._admit()
                    if self._active:
                        self._decode()
                self._note_load()
        except BaseException as error:
            with self._lock:
                self.dead = self.dead or f"{type(error).__name__}: {error}"
        failed = [*self._active, *self._waiting]
        self._active, self._waiting = [], deque()  # before commands that abort one of them
        for sequence in failed:
            sequence.answer.set_exception(EngineDeadError(f"the engine is gone: {self.dead}"))
        while not self._commands.empty():  # requests that came too late
            if (command := self._commands.get()) is not None:
                command()
        self._model.drop()
        self.ended.set()

    def _serve_commands(self) -> bool:
        served = self._serve_queued(block=not self._runnable)
        for _ in range(GATHER_ROUNDS):
            if not served or not self._runnable:
                break
            time.sleep(GATHER_S)
            served = self._serve_queued(block=False)
        return self.dead is None

    @property
    def _runnable(self) -> bool:
        return bool(self._active or self._waiting) and not self._asleep

    def _serve_queued(self, *, block: bool) -> int:
        served = 0
        while self.dead is None:
            try:
                command = self._commands.get(block=block and not served)
            except queue.Empty:
                break
            if command is not None:
                command()
            served += 1
        return served

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
            self._slots = [Slot(slot.ids, slot.experts, owner=slot.owner, used=slot.used) if slot.owner else Slot() for slot in self._slots]
        else:
            self._forget()
            self._slots = [Slot() for _ in self._slots]
        self.version = version
        return version

    def sleep(self) -> None:
        """Move the weights to CPU memory and drop the cache; sequences under way wait, with what was sampled."""
        if not self._asleep:
            self._forget()
            self._slots = []
            self._model.cache.drop()
            self._model.move(torch.device("cpu"))
            self._asleep = {"weights", "kv_cache"}

    def wake(self, *parts: Memory) -> None:
        """Undo `sleep` for parts of the memory."""
        if "weights" in parts and "weights" in self._asleep:
            self._model.move(self._model.device)
        if "kv_cache" in parts and "kv_cache" in self._asleep:
            self._resize(min(FIRST_CAPACITY, _padded(self.context)))
        self._asleep -= set(parts)

    def _forget(self) -> None:
        """Have the sequences under way computed again."""
        for sequence in reversed(self._active):
            sequence.slot = -1
            self._waiting.appendleft(sequence)
        self._active = []

    def _admit(self) -> None:
        """Compute the prompts of waiting sequences, as many as there are free slots, and sample their first tokens."""
        ready: list[tuple[Sequence, Tensor]] = []
        while self._waiting and len(self._active) < len(self._slots):
            sequence = self._waiting[0]
            if len(sequence.ids) + 1 > self._model.cache.capacity:
                self._resize(self._model.cache.capacity * 2, need=len(sequence.ids) + 1)
                continue
            self._waiting.popleft()
            self._active.append(sequence)
            ready.append((sequence, self._prefill(sequence)))
        if ready:
            self._sample([sequence for sequence, _ in ready], torch.stack([logits for _, logits in ready]))

    def _prefill(self, sequence: Sequence) -> Tensor:
        """Give a sequence a slot with the keys and values of all of its tokens; returns the logits after them # [V]."""
        ids, fresh = sequence.ids, len(sequence.ids) == sequence.prompt_length
        key = sequence.request.prompt_ids.tobytes() if fresh else b""
        same = next((index for index, slot in enumerate(self._slots) if fresh and slot.logits is not None and slot.prompt == key), None)
        before = same if same is not None else self._of_session(sequence)
        known = len(ids) if same is not None else _common(self._slots[before].ids, ids) if before is not None else 0
        experts = self._slots[before].experts[:known] if before is not None else []
        index = self._take_slot(prefer=before if same is None else None, keep=same)
        if before is not None and before != index:
            self._model.cache.copy(before, index, known)
        logits = self._slots[same].logits if same is not None else None
        if logits is None:
            known = min(known, len(ids) - 1)
            rows, starts = torch.tensor([index]), torch.tensor([known])
            step = Step(rows, starts, len(ids) - known, self._keys(len(ids)))
            (logits,), (new,) = self._model(torch.tensor([ids[known:]]), step)
            experts = [*experts[:known], *new]
        if fresh:
            sequence.cached = known
        session = sequence.request.session
        self._slots[index] = Slot(list(ids), experts, session, key, logits if fresh else None, next(self._order), sequence)
        sequence.slot = index
        sequence.experts += experts[len(sequence.experts) :]
        return logits

    def _of_session(self, sequence: Sequence) -> int | None:
        """Return the slot with the longest beginning of the sequence, among those of its session."""
        session = sequence.request.session
        found = [(_common(slot.ids, sequence.ids), index) for index, slot in enumerate(self._slots) if session and slot.session == session]
        return max(found)[1] if found and max(found)[0] else None

    def _take_slot(self, prefer: int | None, keep: int | None) -> int:
        """Return a free slot: the preferred one, or that which was not used for longest; `keep` only if there is no other."""
        free = [index for index, slot in enumerate(self._slots) if slot.owner is None]
        return prefer if prefer in free else min(free, key=lambda index: (index == keep, self._slots[index].used))

    def _decode(self) -> None:
        """Compute the next token of every sequence."""
        longest = max(len(sequence.ids) for sequence in self._active)
        if longest > self._model.cache.capacity:
            self._resize(self._model.cache.capacity * 2, need=longest)
        batch = self._active
        if not batch:
            return
        rows = torch.tensor([sequence.slot for sequence in batch])
        starts = torch.tensor([len(sequence.ids) - 1 for sequence in batch])
        last = torch.tensor([[sequence.ids[-1]] for sequence in batch])
        logits, experts = self._model(last, Step(rows, starts, 1, self._keys(longest)))
        for sequence, new in zip(batch, experts, strict=True):
            slot = self._slots[sequence.slot]
            slot.ids.append(sequence.ids[-1])
            slot.experts.extend(new)
            sequence.experts.extend(new)
        self._sample(batch, logits)

    def _sample(self, batch: list[Sequence], logits: Tensor) -> None:
        draws = [sequence.uniform.random() for sequence in batch]
        tokens, logprobs = sample(logits, [sequence.request.sampling for sequence in batch], draws)
        for sequence, token, logprob in zip(batch, tokens, logprobs, strict=True):
            sequence.ids.append(token)
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
        text = self._tokenizer.decode(sequence.ids[sequence.prompt_length :], skip_special_tokens=False)
        return any(part in text for part in stop)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence in self._active:
            self._active = [other for other in self._active if other is not sequence]
            self._slots[sequence.slot].owner = None
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

    def _keys(self, tokens: int) -> int:
        return min(_padded(tokens), self._model.cache.capacity)

    def _resize(self, capacity: int, need: int = 0) -> None:
        """Make slots longer and, if the memory wants it, fewer; sequences without a slot wait until there is one again."""
        while capacity < need:
            capacity *= 2
        capacity = min(capacity, _padded(self.context))
        number = max(1, min(self._max_slots, self._tokens // capacity))
        old, self._slots = self._slots, [Slot() for _ in range(number)]
        keep = sorted(range(len(old)), key=lambda index: (old[index].owner is None, -old[index].used))[:number]
        keep = [index for index in keep if old[index].ids]
        moves = {source: target for target, source in enumerate(keep)}
        self._model.cache = self._model.cache.resized(number, capacity, moves) if old else SlotCache(number, capacity)
        for source, target in moves.items():
            self._slots[target] = old[source]
            if (owner := old[source].owner) is not None:
                owner.slot = target
        left = [slot.owner for index, slot in enumerate(old) if slot.owner is not None and index not in moves]
        self._active = [sequence for sequence in self._active if sequence not in left]
        self._waiting.extendleft(sequence for sequence in left if sequence is not None)

    def _note_load(self) -> None:
        held = sum(len(sequence.ids) for sequence in self._active)
        capacity = max(1, len(self._slots)) * self._model.cache.capacity
        self.load_now = EngineLoad(running=len(self._active), waiting=len(self._waiting), kv_usage=min(1.0, held / capacity))


def _padded(tokens: int) -> int:
    return -(-tokens // KEYS) * KEYS


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""Make the bundled chat model: a tokenizer and a 0.85M-parameter Llama, pretrained on synthetic chats in minutes on one core.

Run it as::

    python -m examples.tiny_model.make --out DIR --cpu-seconds 280 --seed 0

Training has two phases. In the first the mistakes of `Corpus` stand in the context but are not imitated, so that the
skills are learned from clean targets; in the second they are imitated too, which spreads the model's probability over
right and wrong answers. With ``--num-steps`` the schedule counts steps instead of seconds and the result depends
on the seed alone; the bundled model was made with ``--num-steps 1900``.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny_model.corpus import Chat, Corpus

VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BATCH_SIZE = 64
BATCHES_PER_POOL = 16
PEAK_LR = 3e-3
WARMUP_STEPS = 30
IMITATE_MISTAKES_AFTER = 0.75  # share of the training
IGNORED = -100  # label that carries no loss

logger = logging.getLogger(__name__)


def make_tokenizer(corpus: Corpus, *, num_chats: int = 8000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `VOCAB_SIZE` tokens on `num_chats` chats.

    A digit and a space are always tokens of their own, so that a word has the same token wherever it stands.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    role_tokens = [f"<|{role}|>" for role in ROLES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, *role_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (turn.content for _ in range(num_chats) for turn in corpus.chat())
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=role_tokens,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A freshly initialised Llama of 0.85M parameters with tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


class Encoder:
    """Turns chats into tokens and labels, with the tokens that the chat template would give."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._end: int = tokenizer.eos_token_id
        self._roles = {role: int(tokenizer.convert_tokens_to_ids(f"<|{role}|>")) for role in ROLES}
        self._encode = cache(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def __call__(self, chat: Chat, *, imitate_mistakes: bool) -> tuple[list[int], list[int]]:
        """Token ids [L] and labels [L]; only what the assistant says carries a label."""
        tokens: list[int] = []
        labels: list[int] = []
        for turn in chat:
            body = [*self._encode(turn.content), self._end]
            learned = turn.role == "assistant" and (imitate_mistakes or not turn.corrupted)
            tokens += [self._roles[turn.role], *body]
            labels += [IGNORED, *(body if learned else [IGNORED] * len(body))]
        return tokens, labels


class Batches:
    """Endless batches of chats of about the same length, padded on the right."""

    def __init__(self, corpus: Corpus, encoder: Encoder, *, seed: int, pad_id: int) -> None:
        self._corpus, self._encoder, self._pad_id = corpus, encoder, pad_id
        self._rng = random.Random(seed)

    def pool(self, *, imitate_mistakes: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens [B, L] and labels [B, L] of the next `BATCHES_PER_POOL` batches, in random order."""
        rows = [self._encoder(self._corpus.chat(), imitate_mistakes=imitate_mistakes) for _ in range(BATCH_SIZE * BATCHES_PER_POOL)]
        rows.sort(key=lambda row: len(row[0]))
        starts = list(range(0, len(rows), BATCH_SIZE))
        self._rng.shuffle(starts)
        for start in starts:
            batch = rows[start : start + BATCH_SIZE]
            yield _padded([tokens for tokens, _ in batch], self._pad_id), _padded([labels for _, labels in batch], IGNORED)


def train(model: LlamaForCausalLM, batches: Batches, *, cpu_seconds: float, num_steps: int | None) -> int:
    """Pretrain in place for `cpu_seconds` of this process, or for exactly `num_steps`; returns the steps taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    started, step, done = time.process_time(), 0, 0.0
    model.train()
    while done < 1:
        for tokens, labels in batches.pool(imitate_mistakes=done >= IMITATE_MISTAKES_AFTER):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, done)
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            spent = time.process_time() - started
            done = step / num_steps if num_steps else spent / cpu_seconds
            if step % 200 == 0:
                logger.info("step %d, %.0f%%, loss %.3f, %.0f CPU s", step, 100 * done, loss.item(), spent)
            if done >= 1:
                break
    return step


def main() -> None:
    """Command line: make tokenizer and model, and write them as a Hugging Face directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--cpu-seconds", type=float, default=280.0, help="CPU time to train for")
    parser.add_argument("--num-steps", type=int, help="train for exactly this many steps instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus, the weights and the order")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    corpus = Corpus(args.seed)
    tokenizer = make_tokenizer(corpus)
    model = make_model(tokenizer)
    batches = Batches(corpus, Encoder(tokenizer), seed=args.seed, pad_id=tokenizer.pad_token_id)
    steps = train(model, batches, cpu_seconds=args.cpu_seconds, num_steps=args.num_steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    logger.info("%d parameters, %d steps, written to %s", model.num_parameters(), steps, args.out)


def _learning_rate(step: int, done: float) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


if __name__ == "__main__":
    main()

"""A reward model of transformers: it reads texts and gives scores, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentrl.core.errors import ConfigError, EnvResultError, RewardError
from agentrl.core.images import ImageInput, image_arguments, locate
from agentrl.core.language_models import CLASSES
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts
from agentrl.core.tokenizers import load_tokenizer, quiet_transformers
from agentrl.core.types import Message
from agentrl.engine.reward_model_facts import FLAG, NAMED_HEAD, RewardModelFacts, RewardModelSettings, reward_model_facts
from agentrl.env.plan import ImageConfig
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.images import ImageReader, open_reader

if TYPE_CHECKING:
    from torch import Tensor

SEPARATOR = "\n"
"""Text that a process reward model reads after each step, unless its ``config.json`` says something else (`step_separator`)."""
PROBE = (Message(role="user", content="?"),)
UNLIMITED = ImageConfig(max_images=2**31, max_image_pixels=2**31)
"""Images have passed the limits of the episode that they are of."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens for one forward pass, and the positions at which the head is read."""

    ids: list[int]
    places: list[int]
    was_cut: bool
    images: tuple[ImageInput, ...] = ()
    ends: tuple[int, ...] = ()  # characters of the turn up to the end of the step that is read at each of `places`


class RewardModel:
    """Scores texts; made unloaded, and used from one thread at a time.

    A sequence classifier is read at the last token of the text, which is the token that ends the policy's last turn (it is added where a
    turn was cut). A process reward model reads each turn as steps, each followed by its separator, where the probability of class 1 is
    the score of the step; the score of a turn is that of its worst step.
    """

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._facts = RewardModelFacts()
        self._model: Any = None
        self._codec: ChatCodec | None = None
        self._reader: ImageReader | None = None  # of images; `None` for a model that reads text only
        self._same_template = True
        self._limit, self._separator = 0, SEPARATOR

    @property
    def facts(self) -> ScorerFacts:
        """Facts about the model; known once loaded."""
        return ScorerFacts(per_step=self._facts.per_step, scale=self._facts.scale)

    def load(self) -> None:
        """Load tokenizer and weights.

        Raises:
            ConfigError: If the files hold no reward model.
        """
        import torch
        from safetensors import SafetensorError

        settings = self._settings
        tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code, flag=FLAG)
        self._codec = ChatCodec(tokenizer)
        if settings.policy:
            policy = ChatCodec(load_tokenizer(settings.policy, trust_remote_code=settings.trust_remote_code))
            self._same_template = _rendered(policy) == _rendered(self._codec)
        self._facts = facts = reward_model_facts(_local(settings.model))
        on_cpu = settings.device == "cpu"
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.float32 if on_cpu else torch.bfloat16}[settings.dtype]
        renamed = {} if facts.head == "score" else {"key_mapping": {rf"^{facts.head}\.": "score."}}
        labels = {} if facts.per_step else {"num_labels": 1}
        trusted = settings.trust_remote_code
        try:
            with quiet_transformers():
                kind = CLASSES["TOKEN_CLS" if facts.per_step else "SEQ_CLS"](settings.model, trust_remote_code=trusted)
                model, report = kind.from_pretrained(
                    settings.model,
                    dtype=dtype,
                    trust_remote_code=trusted,
                    output_loading_info=True,
                    use_safetensors=True,
                    **labels,
                    **renamed,
                )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(FLAG, settings.model, f"cannot be loaded: {reason}", "Give a directory with safetensors files.") from error
        # Frequencies of rotary positions are computed, and need not be in the files.
        if missing := sorted(key for key in report["missing_keys"] if not key.endswith("rotary_emb.inv_freq")):
            problem = f"its files hold no weights for {', '.join(missing[:3])}"
            raise ConfigError(FLAG, settings.model, problem, f"Train one with agentrl reward-model, or {NAMED_HEAD}.")
        self._model = model.to(settings.device).eval()
        self._reader = None if facts.per_step else open_reader(_local(settings.model), UNLIMITED, trust_remote_code=trusted)
        own = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self._limit = min(filter(None, (settings.max_tokens, own)), default=0)
        self._separator = str(getattr(model.config, "step_separator", SEPARATOR))

    def check_texts(self, *, as_messages: bool) -> None:
        """Make sure that what the policy reads and writes can be scored.

        Args:
            as_messages: True if requests come with chat messages.

        Raises:
            ConfigError: If the model has another chat template than the policy and gets texts alone.
        """
        if not self._same_template and not as_messages:
            problem = "has another chat template than the policy, and episodes of an environment are judged as the policy reads them"
            remedy = "Use a reward model of the policy's family, or judge single answers to --prompts without --agent."
            raise ConfigError(FLAG, self._settings.model, problem, remedy)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """Score texts; their order and their batches change no score but for rounding."""
        rows = [(index, row) for index, request in enumerate(requests) for row in self._rows(request)]
        values, worst = [0.0] * len(rows), [0] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda place: len(rows[place][1].ids))  # texts of similar length share a batch
        size = max(1, self._settings.batch_size)
        for batch in (by_length[start : start + size] for start in range(0, len(rows), size)):
            for place, (value, step) in zip(batch, self._forward([rows[place][1] for place in batch]), strict=True):
                values[place], worst[place] = value, step
        scores: list[list[float]] = [[] for _ in requests]
        ends: list[list[int]] = [[] for _ in requests]
        for (index, row), value, step in zip(rows, values, worst, strict=True):
            scores[index].append(value)
            ends[index] += row.ends[step : step + 1]
        cut = {index for index, row in rows if row.was_cut}
        return [ScoreAnswer(tuple(own), index in cut, tuple(ends[index])) for index, own in enumerate(scores)]

    def _rows(self, request: ScoreRequest) -> list[_Row]:
        if not self._facts.per_step:
            return [self._whole(request)]
        self._with_images([], request.images)
        return [self._steps(request.text[:begin], request.text[begin:end]) for begin, end in request.spans]

    def _whole(self, request: ScoreRequest) -> _Row:
        codec = self._loaded()
        if request.messages is not None and not self._same_template:
            *before, answer = request.messages
            ids = codec.encode_chat(before) + codec.encode_text(str(answer["content"]))
        else:
            ids = codec.encode_text(_without_padding(request.text, codec.tokenizer.pad_token))
        end = codec.turn_end_ids
        if end and ids[-1:] != end:
            ids = ids + end
        ids, images = self._with_images(ids, request.images)
        kept, dropped = self._kept(ids)
        if dropped and images:
            raise RewardError(f"{self._settings.model}: the {len(ids)} tokens of a text with images are more than {self._limit}")
        return _Row(kept, [len(kept) - 1], dropped > 0, images)

    def _with_images(self, ids: list[int], images: Sequence[bytes]) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Return the tokens of a text with those of its images, and these; `RewardError` if the model cannot read them."""
        if self._reader is None:
            if images:
                raise RewardError(f"{self._settings.model}: the reward model reads text only, and the episode has {len(images)} images")
            return ids, ()
        try:
            read = self._reader.read_here(images)
            return self._reader.expand(ids, read)[0], tuple(read)
        except EnvResultError as error:
            raise RewardError(f"{self._settings.model}: {error}") from error

    def _steps(self, before: str, turn: str) -> _Row:
        codec = self._loaded()
        turn = turn.removesuffix(codec.decode(codec.turn_end_ids))
        ids, places, steps, at = codec.encode_text(before), list[int](), list[tuple[str, int]](), 0
        for part in turn.split(self._separator):
            at += len(part)
            steps += [(part, at)] if part.strip() else []
            at += len(self._separator)
        steps = steps or [(turn, len(turn))]
        for part, _ in steps:
            ids = ids + codec.encode_text(part + self._separator)
            places.append(len(ids) - 1)
        kept, dropped = self._kept(ids)
        read = [number for number, place in enumerate(places) if place >= dropped]
        return _Row(kept, [places[number] - dropped for number in read], dropped > 0, ends=tuple(steps[number][1] for number in read))

    def _kept(self, ids: list[int]) -> tuple[list[int], int]:
        # The beginning goes, because scores are read at the end.
        dropped = max(0, len(ids) - self._limit) if self._limit else 0
        return ids[dropped:], dropped

    def _loaded(self) -> ChatCodec:
        if self._codec is None:
            raise RuntimeError("the reward model is not loaded")
        return self._codec

    def _forward(self, rows: Sequence[_Row]) -> list[tuple[float, int]]:
        """The score of each row, and the number of the place where it was read.

        Padding stands behind the text, where a causal model does not see it.
        """
        import torch

        longest = max(len(row.ids) for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            mask[number, : len(row.ids)] = 1
        device = self._settings.device
        arrays = image_arguments(longest, [locate(row.ids, row.images) for row in rows])
        pixels = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        with torch.inference_mode():
            hidden = self._model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device), **pixels).last_hidden_state
            return [self._read(hidden[number, row.places]) for number, row in enumerate(rows)]

    def _read(self, hidden: Tensor) -> tuple[float, int]:
        """The score of one row from its hidden states at the places where it is read, [P, H], and which place that was."""
        logits = self._model.score(hidden).float()
        if not self._facts.per_step:
            return float(logits[-1, 0]), 0
        value, step = cast("Tensor", logits.softmax(-1))[:, 1].min(0)
        return float(value), int(step)


def _without_padding(text: str, padding: str | None) -> str:
    """A text without the padding tokens that some clients leave around it."""
    while padding and text.startswith(padding):
        text = text.removeprefix(padding)
    while padding and text.endswith(padding):
        text = text.removesuffix(padding)
    return text


def _rendered(codec: ChatCodec) -> tuple[str, str]:
    """A question as a template writes it, and what it puts behind an answer; alike for texts of one template."""
    return codec.decode(codec.encode_chat(PROBE)), codec.decode(codec.turn_end_ids)


def _local(model: str) -> str:
    """The directory of a model; that of a hub name is in the cache."""
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser())
    from transformers.utils import cached_file

    return str(Path(str(cached_file(model, "config.json"))).parent)

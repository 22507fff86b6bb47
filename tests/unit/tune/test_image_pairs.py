"""Preferences between answers to pictures: rows, and losses against passes over one row at a time."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from agentrl.algo.objectives.dpo import DpoOptions
from agentrl.algo.objectives.kto import KtoOptions
from agentrl.algo.objectives.orpo import OrpoOptions
from agentrl.algo.objectives.reward_model import RewardModelOptions
from agentrl.algo.plan import AlgoConfig
from agentrl.config.methods import METHODS
from agentrl.config.tune import DpoConfig, KtoConfig, LabelledDataConfig, ModelConfig, PairsDataConfig, RewardDataConfig, StepsDataConfig
from agentrl.core.errors import DataError, EnvResultError
from agentrl.core.language_models import sequence_classifier
from agentrl.core.tokenizers import load_tokenizer
from agentrl.env.images import image_text
from agentrl.env.plan import ImageConfig
from agentrl.learner.dropout import disable_dropout
from agentrl.learner.engine import join
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.settings import LearnerSettings, ObjectiveSettings
from agentrl.learner.state import load_state
from agentrl.rollout.images import ImageReader
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.columns import RowError
from agentrl.tune.encode import render
from agentrl.tune.forms import PARSERS, Labelled, Pair, labelled, pair, steps
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.prepare import image_reader
from agentrl.tune.row_table import Row, as_rows, fingerprint
from tests.image_support import picture, reader_of
from tests.unit.tune.plans import encoder_of

PICTURES = [image_text(picture(seed)) for seed in range(3)]
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
CONFIGS: dict[str, Any] = {"dpo": DpoConfig, "orpo": DpoConfig, "reward-model": DpoConfig, "kto": KtoConfig}
OWN: dict[str, Any] = {
    "dpo": DpoOptions(beta=0.5),
    "orpo": OrpoOptions(beta=0.25),
    "kto": KtoOptions(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
    "reward-model": RewardModelOptions(center_rewards_coefficient=0.1),
}


@pytest.fixture(scope="module")
def reader(vision_model: str) -> ImageReader:
    return reader_of(vision_model)


@pytest.fixture(scope="module")
def codec(vision_model: str) -> TextCodec:
    return TextCodec(load_tokenizer(vision_model))


def data(method: str) -> list[dict[str, Any]]:
    """Two rows with one picture, and one with two."""
    two = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}]
    pictures = [PICTURES[:1], PICTURES[1:2], PICTURES[1:]]
    prompts: list[Any] = ["Which colour?", ASKED, two]
    answers = [("red", "blue sky"), ("green", "red"), ("a long answer", "no")]
    rows = []
    for number, (prompt, images, (good, bad)) in enumerate(zip(prompts, pictures, answers, strict=True)):
        answer = {"completion": good, "label": number != 1} if method == "kto" else {"chosen": good, "rejected": bad}
        rows.append({"prompt": prompt, "images": images, **answer})
    return rows


def encoded(codec: TextCodec, reader: ImageReader | None, method: str, rows: list[dict[str, Any]], **options: Any) -> list[Row]:
    config = CONFIGS[method]()
    kind: Any = type(config.data)
    config = type(config)(data=kind(**options))
    parse: Any = PARSERS[METHODS[method].form]
    return list(as_rows(encoder_of(codec, config, reader).encode([example for row in rows for example in parse(row, config.data)])))


@functools.cache
def model(path: str, seed: int, *, scores: bool = False) -> Any:
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    labels = {"num_labels": 1} if scores else {}
    found = (sequence_classifier(path) if scores else AutoModelForImageTextToText).from_pretrained(path, **labels)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        if scores:
            found.score.weight.normal_()
    found.config.text_config.pad_token_id = load_tokenizer(path).pad_token_id
    disable_dropout(found)
    return found


def given(reader: ImageReader, names: list[str], ids: list[int]) -> dict[str, Any]:
    """Arguments of a model for one row."""
    pixels = [torch.tensor(image.tensors["pixel_values"].array) for image in reader.read_here(names)]
    return {"input_ids": torch.tensor([ids]), "pixel_values": torch.cat(pixels, 1)}


@torch.no_grad()
def logprob(of: Any, reader: ImageReader, row: Row, answer: list[int]) -> tuple[float, int]:
    """Log-probability of an answer by a pass over its row alone, and its number of tokens."""
    prompt = row["prompt_ids"]
    found = torch.log_softmax(of(**given(reader, row["images"], prompt + answer)).logits[0].float(), -1)
    return float(sum(found[len(prompt) - 1 + at, token] for at, token in enumerate(answer))), len(answer)


def measured(method: str, reader: ImageReader, path: str, rows: list[Row]) -> float:
    """The loss of a step on rows, by the learner."""
    scores = method == "reward-model"
    chosen = ObjectiveSettings(
        name=method,
        options=OWN[method],
        reference=path if method in ("dpo", "kto") else "",
        task="SEQ_CLS" if scores else "CAUSAL_LM",
    )
    learner = LearnerConfig(learner_backend="torch", zero_stage=0, train_vision=True)
    settings = LearnerSettings(model=path, learner=learner, algo=AlgoConfig(), num_steps=1, max_new_tokens=0, objective=chosen)
    state = load_state(settings, join("torch", 0, 1, device="cpu"))
    pairs = [(state.policy, model(path, 1, scores=scores)), *([(state.models.reference.model, model(path, 2))] if chosen.reference else [])]
    for own, other in pairs:
        own.load_state_dict(other.state_dict())
    return state.evaluate_rows(0, [RowMaker(method, reader)(rows)])["loss"]


def minus_log_sigmoid(value: float) -> float:
    return math.log1p(math.exp(-value))


def ratios(reader: ImageReader, path: str, rows: list[Row], answers: list[list[int]]) -> list[float]:
    pairs = zip(rows, answers, strict=True)
    return [logprob(model(path, 1), reader, row, ids)[0] - logprob(model(path, 2), reader, row, ids)[0] for row, ids in pairs]


def test_dpo_is_that_of_log_ratios_on_the_rows_own_pictures(codec: TextCodec, reader: ImageReader, vision_model: str) -> None:
    rows = encoded(codec, reader, "dpo", data("dpo"))
    good, bad = (ratios(reader, vision_model, rows, [row[name] for row in rows]) for name in ("chosen_ids", "rejected_ids"))
    expected = [minus_log_sigmoid(0.5 * (a - b)) for a, b in zip(good, bad, strict=True)]
    assert measured("dpo", reader, vision_model, rows) == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    swapped = [{**row, "images": other["images"]} for row, other in zip(rows[:2], reversed(rows[:2]), strict=True)]
    assert measured("dpo", reader, vision_model, swapped) != pytest.approx(sum(expected[:2]) / 2, abs=1e-4)


def test_orpo_is_that_of_odds_on_the_rows_own_pictures(codec: TextCodec, reader: ImageReader, vision_model: str) -> None:
    rows = encoded(codec, reader, "orpo", data("orpo"))
    good, bad = ([logprob(model(vision_model, 1), reader, row, row[name]) for row in rows] for name in ("chosen_ids", "rejected_ids"))
    likelihood = -sum(total for total, _ in good) / sum(count for _, count in good)
    odds = [[mean - math.log1p(-math.exp(mean)) for mean in (total / count for total, count in side)] for side in (good, bad)]
    expected = [likelihood + 0.25 * minus_log_sigmoid(a - b) for a, b in zip(*odds, strict=True)]
    assert measured("orpo", reader, vision_model, rows) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_kto_compares_with_answers_to_other_pictures(codec: TextCodec, reader: ImageReader, vision_model: str) -> None:
    rows = encoded(codec, reader, "kto", data("kto"))
    answers = [row["completion_ids"] for row in rows]
    own = ratios(reader, vision_model, rows, answers)
    divergence = max(sum(ratios(reader, vision_model, rows, [answers[-1], *answers[:-1]])) / len(rows), 0.0)
    expected = []
    for row, ratio in zip(rows, own, strict=True):
        sign, weight = (1, 1.5) if row["label"] else (-1, 0.5)
        expected.append(weight * (1 - 1 / (1 + math.exp(-sign * 0.5 * (ratio - divergence)))))
    assert measured("kto", reader, vision_model, rows) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_a_reward_model_scores_the_last_token_behind_its_pictures(codec: TextCodec, reader: ImageReader, vision_model: str) -> None:
    rows = encoded(codec, reader, "reward-model", data("reward-model"))
    judge = model(vision_model, 1, scores=True)
    rewards = []
    with torch.no_grad():
        for row in rows:
            pair_of = [given(reader, row["images"], row["prompt_ids"] + row[name]) for name in ("chosen_ids", "rejected_ids")]
            rewards.append([float(judge.score(judge.model(**each).last_hidden_state[0, -1])) for each in pair_of])
    expected = [minus_log_sigmoid(good - bad) + 0.1 * (good + bad) ** 2 for good, bad in rewards]
    assert measured("reward-model", reader, vision_model, rows) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_a_prompt_has_the_tokens_of_its_pictures_and_answers_are_cut_behind_them(codec: TextCodec, reader: ImageReader) -> None:
    rows = encoded(codec, reader, "dpo", data("dpo"))
    for row, names in zip(rows, (PICTURES[:1], PICTURES[1:2], PICTURES[1:]), strict=True):
        count = sum(len(image.token_ids) for image in reader.read_here(names))
        inside = sum(token in reader.read_here(names)[0].token_ids.tolist() for token in row["prompt_ids"])
        assert (inside, row["images"]) == (count, names)
    assert "<image>" in render(codec, rows[0])
    length = len(rows[2]["prompt_ids"])
    (cut,) = encoded(codec, reader, "dpo", data("dpo")[2:], max_length=length + 2, overlong="cut")
    assert (cut["prompt_ids"], len(cut["chosen_ids"])) == (rows[2]["prompt_ids"], 2)
    with pytest.raises(DataError, match="leaves no row"):
        encoded(codec, reader, "dpo", data("dpo")[2:], max_length=length, overlong="cut")
    other = encoded(codec, reader, "dpo", [{**data("dpo")[0], "images": PICTURES[2:]}])
    assert fingerprint(other) != fingerprint(rows[:1])


def test_chats_that_begin_alike_share_their_pictures() -> None:
    chats = {name: [*ASKED, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    (found,) = pair({**chats, "images": PICTURES[:1]}, PairsDataConfig())
    assert isinstance(found, Pair)
    assert (found.images, found.prompt) == (tuple(PICTURES[:1]), ASKED)
    (repeated,) = pair({**chats, "prompt": ASKED, "images": PICTURES[:1]}, PairsDataConfig())
    assert (repeated.prompt, repeated.chosen, repeated.images) == (found.prompt, found.chosen, found.images)  # type: ignore[union-attr]
    good, bad = labelled({**chats, "images": PICTURES[:1]}, LabelledDataConfig())
    assert isinstance(good, Labelled)
    assert (good.images, good.label, bad.label) == (tuple(PICTURES[:1]), True, False)  # type: ignore[union-attr]


def test_a_template_stands_around_a_prompt_with_a_picture() -> None:
    row = {"prompt": "red or blue", "chosen": "red", "rejected": "blue", "image": PICTURES[0]}
    (found,) = pair(row, PairsDataConfig(input_template="Say: {}"))
    assert found.prompt == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Say: red or blue"}]}]  # type: ignore[union-attr]


def test_pictures_that_answers_do_not_share_or_that_stand_in_them_are_refused() -> None:
    def chat(url: str, answer: Any) -> list[Any]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}, {"role": "assistant", "content": answer}]

    with pytest.raises(RowError, match="has other images than column 'chosen'"):
        pair({"chosen": chat("a.png", "red"), "rejected": chat("b.png", "blue")}, RewardDataConfig())
    with pytest.raises(RowError, match="part of the type image"):
        pair({"prompt": ASKED, "images": PICTURES[:1], "chosen": chat("a.png", "x")[:1], "rejected": "blue"}, PairsDataConfig())
    with pytest.raises(RowError, match="1 parts for images and there are 2 images"):
        pair({"prompt": ASKED, "images": PICTURES[:2], "chosen": "red", "rejected": "blue"}, PairsDataConfig())
    with pytest.raises(RowError, match="1 images"):
        steps({"prompt": ASKED, "images": PICTURES[:1], "completions": ["a"], "labels": [1]}, StepsDataConfig())


def test_a_model_of_text_and_damaged_pictures_are_refused_by_line(codec: TextCodec, reader: ImageReader) -> None:
    with pytest.raises(DataError, match="1 images, and the model reads no images"):
        encoded(codec, None, "dpo", data("dpo"))
    with pytest.raises(DataError, match="no image that can be read"):
        encoded(codec, reader, "kto", [{**data("kto")[0], "images": [b"nothing"]}])


def test_the_size_and_the_number_of_pictures_have_limits(vision_model: str) -> None:
    config = DpoConfig(model=ModelConfig(model=vision_model), images=ImageConfig(max_images=2, max_image_pixels=4000))
    small = image_reader(config.model, config.images)
    assert small is not None
    with pytest.raises(EnvResultError, match=r"64 x 64 pixels, more than 4,000 \(--max-image-pixels\)"):
        small.read_here(PICTURES[:1])
    with pytest.raises(EnvResultError, match=r"3 images are more than 2 \(--max-images\)"):
        small.expand([small.placeholder] * 3, reader_of(vision_model).read_here(PICTURES))

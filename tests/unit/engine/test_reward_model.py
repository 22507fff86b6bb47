"""Scores of reward models, against transformers' own forward pass over the same tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer, LlamaConfig

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ConfigError, RewardError
from agentrl.core.language_models import sequence_classifier
from agentrl.core.scoring import ScoreRequest
from agentrl.core.types import Message
from agentrl.engine.reward_model import RewardModel
from agentrl.engine.reward_model_facts import RewardModelSettings
from tests.image_support import read, reader_of

TINY = str(tiny_model_path())
TEXTS = ["2+2?", "What is 17+25? It is 42, because", "x"]


def saved(folder: Path, kind: type = AutoModelForSequenceClassification, labels: int = 1) -> str:
    """A small random classifier with the tokenizer of the bundled model."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=128, num_labels=labels, pad_token_id=0, **sizes)
    model = kind.from_config(config)
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


def loaded(path: str, **settings: object) -> RewardModel:
    model = RewardModel(RewardModelSettings(model=path, **settings))  # type: ignore[arg-type]
    model.load()
    return model


def test_a_score_is_the_logit_at_the_end_of_the_last_turn(tmp_path: Path) -> None:
    path = saved(tmp_path / "rm")
    tokenizer, reference = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    found = loaded(path, batch_size=2).score([ScoreRequest(text=text) for text in TEXTS])
    for text, answer in zip(TEXTS, found, strict=True):
        ids = tokenizer(text + "<|end|>", add_special_tokens=False, return_tensors="pt").input_ids
        assert answer.values == pytest.approx((reference(ids).logits.item(),), abs=1e-5)
    ended, padded = loaded(path).score([ScoreRequest(text=TEXTS[0] + "<|end|>"), ScoreRequest(text=f"{tokenizer.pad_token}{TEXTS[0]}")])
    assert ended.values == padded.values == pytest.approx(found[0].values, abs=1e-5)


def test_a_head_with_another_name_gives_the_same_scores(tmp_path: Path) -> None:
    path = saved(tmp_path / "rm")
    expected = loaded(path).score([ScoreRequest(text="2+2?")])
    tensors = load_file(Path(path, "model.safetensors"))
    tensors["value_head.weight"] = tensors.pop("score.weight")
    save_file(tensors, Path(path, "model.safetensors"), metadata={"format": "pt"})
    assert loaded(path).score([ScoreRequest(text="2+2?")]) == expected


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "rm")
    whole = Path(path, "model.safetensors").read_bytes()
    for content in (b"none", b"version https://git-lfs.github.com/spec/v1", whole[:-8]):
        Path(path, "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be (loaded|read)"):
            loaded(path)


def test_the_end_of_a_text_that_is_too_long_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "rm")
    short, long = loaded(path, max_tokens=6).score([ScoreRequest(text="2+2?"), ScoreRequest(text="word " * 50)])
    assert (short.was_cut, long.was_cut) == (False, True)
    reference, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("word " * 50 + "<|end|>", add_special_tokens=False, return_tensors="pt").input_ids[:, -6:]
    assert long.values == pytest.approx((reference(ids).logits.item(),), abs=1e-5)


def test_a_process_reward_model_gives_each_turn_the_score_of_its_worst_step(tmp_path: Path) -> None:
    path = saved(tmp_path / "prm", AutoModelForTokenClassification, 2)
    before, first, between, second = "Q: 1+2+3?\n", "1+2=3\n3+3=7<|end|>", "\nsure? ", "no"
    text = before + first + between + second
    begin = len(before + first + between)
    spans = ((len(before), len(before + first)), (begin, begin + len(second)))
    (found,) = loaded(path).score([ScoreRequest(text=text, spans=spans)])
    tokenizer, reference = AutoTokenizer.from_pretrained(path), AutoModelForTokenClassification.from_pretrained(path)

    def probabilities(*pieces: str) -> list[float]:
        ids, places = list[int](), list[int]()
        for piece in pieces:
            ids += tokenizer(piece, add_special_tokens=False).input_ids
            places.append(len(ids) - 1)
        return reference(torch.tensor([ids])).logits[0].softmax(-1)[places[1:], 1].tolist()

    steps = probabilities(before, "1+2=3\n", "3+3=7\n")
    expected = min(steps), *probabilities(before + first + between, "no\n")
    assert found.values == pytest.approx(expected, abs=1e-5)
    assert found.ends == ((5, 11)[steps.index(min(steps))], 2)
    turned = loaded(path).score([ScoreRequest(text=before + "3+3=7\n\n1+2=3", spans=((len(before), len(before) + 12),))])[0]
    others = probabilities(before, "3+3=7\n", "1+2=3\n")
    assert turned.ends == ((5, 12)[others.index(min(others))],)


def test_another_chat_template_reads_messages_and_refuses_bare_episodes(tmp_path: Path) -> None:
    path = saved(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n<|end|>{% endfor %}[assistant] "
    tokenizer.save_pretrained(path)
    model = loaded(path, policy=TINY)
    with pytest.raises(ConfigError, match="another chat template than the policy"):
        model.check_texts(as_messages=False)
    model.check_texts(as_messages=True)
    messages = (Message(role="user", content="2+2?"), Message(role="assistant", content="4"))
    (found,) = model.score([ScoreRequest(text="ignored", messages=messages)])
    (expected,) = loaded(path).score([ScoreRequest(text="[user] 2+2?\n<|end|>[assistant] 4<|end|>")])
    assert found.values == pytest.approx(expected.values, abs=1e-5)
    loaded(path).check_texts(as_messages=False)  # without a policy texts are for this model


def test_pictures_stand_where_the_text_has_their_placeholders(vision_model: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    reference = sequence_classifier(vision_model).from_pretrained(vision_model, num_labels=1)
    reference.save_pretrained(tmp_path / "rm")
    for file in Path(vision_model).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (tmp_path / "rm" / file.name).write_bytes(file.read_bytes())
    model, reader = loaded(str(tmp_path / "rm")), reader_of(vision_model)
    pictures = read(reader, 1, 2)
    text = "<|user|><image>What?<|end|><|assistant|>"
    requests = [
        ScoreRequest(text=text + answer, images=(image.data,)) for answer, image in zip(("red", "a blue one"), pictures, strict=True)
    ]
    found = [answer.values[0] for answer in model.score([*requests, ScoreRequest(text="no picture")])]
    tokenizer = AutoTokenizer.from_pretrained(vision_model)
    for request, image, value in zip(requests, pictures, found, strict=False):
        ids, _ = reader.expand(tokenizer(request.text + "<|end|>", add_special_tokens=False).input_ids, [image])
        pixels = {name: torch.tensor(tensor.array) for name, tensor in image.tensors.items()}
        with torch.no_grad():
            assert value == pytest.approx(reference(torch.tensor([ids]), **pixels).logits.item(), abs=1e-5)
    with pytest.raises(RewardError, match="1 placeholders of images, and there are 2 images"):
        model.score([ScoreRequest(text=text, images=(pictures[0].data, pictures[1].data))])
    with pytest.raises(RewardError, match="tokens of a text with images are more than 6"):
        loaded(str(tmp_path / "rm"), max_tokens=6).score([requests[0]])
    with pytest.raises(RewardError, match="reads text only, and the episode has 1 images"):
        loaded(saved(tmp_path / "text")).score([ScoreRequest(text="What?", images=(pictures[0].data,))])

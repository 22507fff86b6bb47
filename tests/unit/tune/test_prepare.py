"""The user's own chat template and end token: what is trained with them, and what stands in the model that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentrl.assets import tiny_model_path
from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.learner.merge import merge_into_base
from agentrl.resolve.tune import load_given
from agentrl.rollout.plan import ModelConfig
from agentrl.tune.loop import record_ends
from agentrl.tune.prepare import make_tokenizer
from agentrl.tune.row_table import Prepared
from agentrl.tune.run import preview, tune
from tests.unit.tune.plans import rows_of

SFT = METHODS["sft"]
CHATS = "examples/tune/chats.jsonl"
ENDING_WITH_TOOL = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    """A template whose turns end with another token than the tokenizer's end token."""
    path = tmp_path / "own.jinja"
    path.write_text(ENDING_WITH_TOOL, encoding="utf-8")
    return str(path)


@pytest.fixture
def without_template(tmp_path: Path) -> str:
    tokenizer = load_tokenizer(str(tiny_model_path()))
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(tiny_model_path()).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def prepared(**settings: Any) -> Prepared:
    return rows_of(load_given(SFT, settings))


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_template_of_the_user_renders_the_rows_and_is_kept_by_the_tokenizer(template: str):
    found = prepared(data=CHATS, chat_template=template)
    assert found.samples[0].startswith("<|user|>What is 8-0?<|tool|><|assistant|>[[8<|tool|>]]")
    tokenizer = make_tokenizer(ModelConfig(chat_template=template), "")
    assert tokenizer.chat_template == ENDING_WITH_TOOL
    assert found.ends == [tokenizer.convert_tokens_to_ids("<|tool|>")]


def test_a_row_that_the_template_refuses_is_named_by_file_and_line(tmp_path: Path):
    good = {"messages": [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]}
    thought = {"messages": [good["messages"][0], {**good["messages"][1], "reasoning_content": "One, two, three."}]}
    data = written(tmp_path / "mixed.jsonl", good, good, thought)
    with pytest.raises(DataError, match=r"mixed.jsonl': line 3: .* leaves out the thinking of an answer: 'One, two, three.'. Give another"):
        prepared(data=data)
    with pytest.raises(ConfigError, match=r"--chat-template = 'none.jinja': cannot be read"):
        load_given(SFT, {"data": data, "chat_template": "none.jinja"})
    with pytest.raises(ConfigError, match="--chat-template-kwargs"):
        load_given(SFT, {"data": data, "chat_template_kwargs": "[1]"})


def test_a_tokenizer_without_a_template_refuses_messages_and_trains_texts(without_template: str, template: str, tmp_path: Path):
    pair = written(tmp_path / "pair.jsonl", {"prompt": "1+2=", "completion": "3"})
    text = written(tmp_path / "text.jsonl", {"text": "1+2=3"})
    for data in (CHATS, pair):
        with pytest.raises(DataError, match=r"line 1: the tokenizer has no chat template.*--chat-template FILE"):
            prepared(data=data, model=without_template)
    assert prepared(data=CHATS, model=without_template, chat_template=template).ends
    assert prepared(data=pair, model=without_template, apply_chat_template=False).samples == ["1+2=[[3<|end|>]]"]
    assert prepared(data=text, model=without_template).samples == ["[[1+2=3<|end|>]]"]


def test_an_end_token_of_the_user_ends_texts_and_turns_that_a_template_leaves_open(tmp_path: Path):
    text = written(tmp_path / "text.jsonl", {"text": "1+2=3"})
    assert prepared(data=text, eos_token="<|tool|>").samples == ["[[1+2=3<|tool|>]]"]
    open_end = tmp_path / "open.jinja"
    open_end.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant: ")
    open_end.write_text(open_end.read_text().replace("assistant: ", "{% if add_generation_prompt %}assistant: {% endif %}"))
    found = prepared(data=CHATS, chat_template=str(open_end), eos_token="<|tool|>")
    assert found.samples[0] == "user: What is 8-0?\nassistant: [[8\n<|tool|>]]"
    with pytest.raises(ConfigError, match=r"--eos-token = '<\|no\|>': is no token of the model"):
        prepared(data=text, eos_token="<|no|>")


def test_the_preview_shows_whole_rows_with_what_is_trained(tmp_path: Path):
    long = " ".join(["1+2"] * 200)
    data = written(tmp_path / "long.jsonl", *[{"prompt": long, "completion": long}] * 3)
    lines = preview(load_given(SFT, {"data": data, "batch_size": 1, "max_length": 4096}))
    assert sum(f"<|user|>{long}<|end|><|assistant|>[[{long}<|end|>]]" in line for line in lines) == 3


def test_ends_of_answers_are_recorded_and_a_template_that_writes_the_end_token_keeps_it():
    tokenizer = load_tokenizer(str(tiny_model_path()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    tool, end = tokenizer.convert_tokens_to_ids("<|tool|>"), tokenizer.eos_token_id
    record_ends(model, tokenizer, [end, tool])
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|end|>", [end, tool])
    tokenizer.chat_template = "{{ eos_token }}"
    record_ends(model, tokenizer, [tool])
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|end|>", [tool, end])
    tokenizer.chat_template = ENDING_WITH_TOOL
    record_ends(model, tokenizer, [tool])
    assert tokenizer.eos_token == "<|tool|>"
    record_ends(model, tokenizer, [end, tool])
    assert tokenizer.eos_token == "<|tool|>"  # one of several ends


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_written_model_stops_at_the_end_that_was_trained(lora_rank: int, template: str, tmp_path: Path):
    given = {"data": CHATS, "chat_template": template, "run_dir": tmp_path / "run", "num_epochs": 8, "lora_rank": lora_rank}
    result = tune("sft", **given, learning_rate=3e-3, eval_size=8)
    path = result.model
    if lora_rank:
        path = tmp_path / "merged"
        merge_into_base(result.model, path, base=str(tiny_model_path()))
    tokenizer = AutoTokenizer.from_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|tool|>", ENDING_WITH_TOOL)
    ends: Any = GenerationConfig.from_pretrained(path).eos_token_id
    assert ends[0] == end
    model = AutoModelForCausalLM.from_pretrained(path)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is 8-0?"}], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(asked, add_special_tokens=False).input_ids])
    sampled = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    assert sampled[-1] == end
    assert len(sampled) < 8

"""The proofs of a chat template in a certificate."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.certify import templates
from agentrl.certify.results import Certificate, Comparison, Verdict
from agentrl.certify.templates import DIALOGUES, compare_renderings, compare_template
from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl.core.tokenizers import load_tokenizer
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.plan import ModelConfig
from tests.unit.rollout.families import SOURCES, family
from tests.unit.rollout.templates import tokenizer


def rows(name: str) -> dict[str, Comparison]:
    return {row.name: row for row in compare_renderings(family(name), ModelConfig())}


def test_the_bundled_template_is_proven_and_what_it_does_not_write_is_named() -> None:
    found = {row.name: row for row in compare_template(str(tiny_model_path()), ModelConfig())}
    assert list(found) == ["turn ends", *DIALOGUES, "tool calls"]
    assert found["turn ends"].reason == "proven: <|end|>"
    calls = {"call and result", "two results out of order"}
    assert {name for name, row in found.items() if row.verdict is Verdict.UNTRIED} == {*calls, "tool calls"}
    assert found["tool calls"].reason == "the template describes no tools; the system message asks for JSON"
    assert all("calls as text" in found[name].reason for name in calls)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_template_of_trl_and_vllm_is_rendered_with_other_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.parsers.find_spec", lambda package: None)
    found = compare_renderings(family(name), ModelConfig())
    assert not [row for row in found if row.verdict is Verdict.WRONG]
    assert all(row.reason for row in found if row.verdict is Verdict.UNTRIED)


def test_qwen_3_writes_everything_itself() -> None:
    assert {row.verdict for row in rows("qwen3").values()} == {Verdict.EXACT}
    assert rows("qwen3")["tool calls"].reason == "read by the parser json"


@pytest.mark.slow
def test_calls_in_a_form_of_their_own_are_read_by_a_parser_of_vllm() -> None:
    row = rows("glm4moe")["tool calls"]
    assert (row.verdict, row.reason) == (Verdict.EXACT, "read by the parser glm45")


def test_calls_that_nothing_here_reads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.parsers.find_spec", lambda package: None)
    row = rows("glm4moe")["tool calls"]
    assert row.verdict is Verdict.UNTRIED
    assert "vLLM, which has parsers of other forms, is not installed; the system message asks for JSON" in row.reason


def test_a_codec_that_loses_a_token_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ChatCodec.encode_chat
    monkeypatch.setattr(templates.ChatCodec, "encode_chat", lambda self, messages: whole(self, messages)[:-1])
    found = rows("qwen3")
    assert {found[name].verdict for name in DIALOGUES} == {Verdict.WRONG}
    assert "--chat-template FILE" in found["several turns"].remedy


def test_the_users_template_and_variables_are_what_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ mark }}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}{{ mark }}assistant:", encoding="utf-8"
    )
    chosen = ModelConfig(chat_template=str(file), chat_template_kwargs='{"mark": "!"}')
    found = {row.name: row for row in compare_renderings(copy.deepcopy(tokenizer("chatml")), chosen)}
    assert found["several turns"].verdict is Verdict.EXACT
    assert "sent with" in found["call and result"].reason


@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "gpt2", "llama"])
def test_a_folder_without_a_tokenizer_has_none(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no files of a tokenizer|tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))
    (row,) = compare_template(str(tmp_path), ModelConfig())
    assert row.verdict is Verdict.UNTRIED


@pytest.mark.timeout(200)
def test_the_command_shows_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Comparison(part="learner", name="eager, padded", verdict=Verdict.EXACT, logprob=0.0)
    made = Certificate(model="M", model_type="m", layers=2, parameters=1, comparisons=(exact,), seconds=0.0)
    monkeypatch.setattr("agentrl.certify.run.certify", lambda *_, **__: made)
    assert main(["certify", str(tiny_model_path())]) == 0
    assert "proven: <|end|>" in capsys.readouterr().out

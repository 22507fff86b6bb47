"""A run whose model writes tool calls in a form of its own: the template describes the tools, and the start of the run names the parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.runs import train
from tests.unit.rollout.families import family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SUMS = '''
from agentrl import Task, ToolEnv


def add(a: int) -> int:
    """Add to two.

    Args:
        a: One.
    """
    return a + 2


class Sums(ToolEnv):
    tools = (add,)

    @classmethod
    def tasks(cls):
        return [Task("What is one plus two?", label="3")]

    def judge(self, state):
        return float(len(state.action_text) % 2)
'''


def test_the_start_of_a_run_names_the_parser_and_prompts_are_the_templates(tmp_path: Path) -> None:
    tokenizer = family("qwen3_5_nothink")
    tokenizer.save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=end, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "sums.py").write_text(SUMS)
    sizes = ("--num-steps", "1", "--max-new-tokens", "8", "--max-turns", "2", "--max-model-len", "4096", "--runtime", "local")
    run = train(tmp_path / "run", *sizes, "--model", str(tmp_path / "model"), agent=tmp_path / "sums.py")
    assert run.code == 0, run.output
    assert "tool calls in the model's own form, read by qwen3_coder" in run.output
    row = json.loads((run.directory / "trajectories.jsonl").read_text().splitlines()[0])
    assert "<function=example_function_name>" in json.dumps(row)
    assert "You may call tools" not in json.dumps(row)

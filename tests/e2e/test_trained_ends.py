"""Generation from the directory that supervised training writes stops at the token that ends trained answers, without further settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.settings import engine_environment
from agentrl.tune import tune

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

END, LIMIT = "<|tool|>", 24
TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}ENDING{% endfor %}"
TURNS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPEN, ENDED = TURNS.replace("ENDING", "\n"), TURNS.replace("ENDING", "{% if m.role == 'assistant' %}<|tool|>{% endif %}")
CASES = {"the user's end": (OPEN, {"eos_token": END}), "the template's end": (ENDED, {})}
QUESTION = [{"role": "user", "content": "1+2?"}]
ALONE = """
import json, sys
from vllm import LLM, SamplingParams

folder, ids, limit = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**26)
answer = model.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=limit))[0].outputs[0]
print("ANSWER", json.dumps([list(answer.token_ids), answer.finish_reason]))
"""


@pytest.fixture(scope="module", params=list(CASES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, taught to answer one question."""
    folder = tmp_path_factory.mktemp("ends")
    template, settings = CASES[request.param]
    (folder / "turns.jinja").write_text(template)
    chat = [*QUESTION, {"role": "assistant", "content": "three"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 16)
    given: dict[str, Any] = {"chat_template": str(folder / "turns.jinja"), "learning_rate": 3e-3, "batch_size": 8, **settings}
    return tune("sft", data=str(folder / "chats.jsonl"), run_dir=folder / "run", num_steps=24, tensorboard=False, **given).model


def prompt_of(folder: Path) -> tuple[list[int], int]:
    """The question as the written tokenizer renders it, and the end of answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids), int(tokenizer.convert_tokens_to_ids(END))


def check(answer: list[int], end: int) -> None:
    assert answer[-1] == end
    assert 1 < len(answer) < LIMIT


def test_transformers_stops(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids, end = prompt_of(trained)
    model: Any = AutoModelForCausalLM.from_pretrained(trained)
    answer = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LIMIT)[0, len(ids) :].tolist()
    check(answer, end)


def test_vllm_stops(trained: Path) -> None:
    pytest.importorskip("vllm")
    ids, end = prompt_of(trained)
    words = [sys.executable, "-c", ALONE, str(trained), json.dumps(ids), str(LIMIT)]
    environment = {**os.environ, **engine_environment("cpu", "shm")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer, reason = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER")).removeprefix("ANSWER"))
    assert reason == "stop"
    check(answer, end)

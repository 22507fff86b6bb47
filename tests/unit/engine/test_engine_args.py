"""``--engine-args``: values as vLLM takes them, and errors before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.named_args import parse_named_args
from agentrl.engine import engine_args
from agentrl.engine.engine_args import check_engine_args
from agentrl.resolve.commands import load_config


def test_values_are_json_or_text_and_a_name_alone_is_true() -> None:
    words = (
        "kv-cache-dtype=fp8",
        "--block_size=16",
        "enable_expert_parallel",
        'speculative_config={"method": "ngram"}',
        "async_scheduling=False",
    )
    assert parse_named_args(words) == {
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "enable_expert_parallel": True,
        "speculative_config": {"method": "ngram"},
        "async_scheduling": False,
    }
    check_engine_args(words)
    assert parse_named_args(["chat_template="]) == {"chat_template": ""}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kv_cache_dtyp=fp8", r"'kv_cache_dtyp': is no argument of the installed vLLM. Did you mean kv_cache_dtype\?"),
        ("pipeline_parallel_size=two", "must be int"),
        ("max_model_len=10", "Use --max-model-len"),
        ("data_parallel_size=2", "Use --num-engines"),
        ("logprobs_mode=raw_logprobs", "training relies on it"),
    ],
)
def test_what_vllm_or_training_refuses_is_refused_by_name(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--engine-args = .*{message}"):
        load_config(["--agent", "module:Name", "--engine-args", word])


@pytest.mark.vllm
def test_pipeline_stages_count_as_gpus_of_an_engine() -> None:
    config = load_config(["--agent", "module:Name", "--tensor-parallel-size", "4", "--engine-args", "pipeline_parallel_size=2"])
    assert config.engine.gpus_per_engine == 8


def test_without_vllm_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "_known", dict)
    check_engine_args(["anything=1"])
    with pytest.raises(ConfigError, match="training relies"):
        check_engine_args(["logprobs_mode=raw_logprobs"])


@pytest.mark.vllm
def test_the_list_is_read_without_importing_vllm() -> None:
    code = "import sys; from agentrl.engine.engine_args import _known; assert len(_known()) > 100; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

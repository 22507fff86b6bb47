"""Adapters that cannot be merged are refused before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.learner.merge import merge_into_base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3", "base_model_name_or_path": "m"}, "of the kind IA3 for CAUSAL_LM"),
        ({"peft_type": "LORA", "task_type": "QUESTION_ANS", "base_model_name_or_path": "m"}, "of the kind LORA for QUESTION_ANS"),
        ({"peft_type": "LORA"}, "--base = '': is not given"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as caught:
        merge_into_base(tmp_path, tmp_path / "out")
    assert message in str(caught.value)

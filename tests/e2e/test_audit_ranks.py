"""Audits beside other learner ranks: with parameters in parts, and where rows are in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from tests.learner_support import CollectingSender, make_groups, make_settings, write_model
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(300)

CASES: dict[str, dict[str, Any]] = {
    "replicas": {"zero_stage": 2},
    "parts": {"zero_stage": 3},
    "rows in parts": {"zero_stage": 2, "sequence_parallel": 2},
}


def audited(rank: int, ports: list[int], model: str, out: Path) -> None:
    from agentrl.learner.deepspeed import options
    from agentrl.learner.learner import LearnerRank

    config = options.zero_config  # parameters as small as these would never be in parts
    options.zero_config = lambda *args, **named: config(*args, **named) | {"stage3_param_persistence_threshold": 0}
    for name, case in CASES.items():
        learner = LearnerRank(replace(make_settings(model, learner=case), audit_every=1), CollectingSender())
        learner.start(rank, 2, ports.pop())
        results = [learner.train(step, *make_groups()).metrics for step in range(2)]
        learner.close()
        found = [{key: value for key, value in metrics.items() if key.startswith("audit/")} for metrics in results]
        (out / f"{name}-{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    mp.spawn(audited, args=(free_ports(len(CASES)), model, tmp_path), nprocs=2)
    for name in CASES:
        first, second = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2))
        assert first == second  # metrics are those of all ranks
        for found in first:
            if name == "rows in parts":
                assert found == {"audit/off": 1.0}
            else:
                assert found["audit/logprob_error_max"] < 1e-5, name
                assert found["audit/gradient_angle"] < 0.01, name

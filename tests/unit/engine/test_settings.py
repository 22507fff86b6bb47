import pickle

import pytest

from agentrl.config.sections import changed
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings
from agentrl.rollout.plan import ModelConfig


def settings(device: str = "cpu", **engine: object) -> EngineSettings:
    return changed(EngineSettings(model=ModelConfig(model="m"), engine=EngineConfig(), device=device), **engine)  # type: ignore[arg-type]


def test_settings_survive_pickling() -> None:
    made = settings(max_model_len=32)
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("device", "dtype", "resolved"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cpu", "bfloat16", "bfloat16"), ("cuda", "float32", "float32")],
)
def test_auto_dtype_follows_the_device(device: str, dtype: str, resolved: str) -> None:
    assert settings(device, engine_dtype=dtype).dtype == resolved


@pytest.mark.vllm
@pytest.mark.parametrize(("device", "colocate", "transport"), [("cpu", True, "shm"), ("cuda", True, "ipc"), ("cuda", False, "nccl")])
def test_the_path_of_weights_follows_device_and_placement(device: str, colocate: bool, transport: str) -> None:
    assert settings(device, colocate=colocate).transport == transport

import pickle

import pytest

from agentrl.core.errors import ConfigError
from agentrl.engine.settings import EngineSettings


def test_settings_survive_pickling() -> None:
    settings = EngineSettings(model="m", max_model_len=32, stop_strings=True)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("device", "dtype", "resolved"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cpu", "bfloat16", "bfloat16"), ("cuda", "float32", "float32")],
)
def test_auto_dtype_follows_the_device(device: str, dtype: str, resolved: str) -> None:
    assert EngineSettings(model="m", device=device, dtype=dtype).resolved_dtype == resolved  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("transport", "nccl"), ("tensor_parallel_size", 2)])
def test_what_needs_cuda_is_refused_on_the_cpu(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        EngineSettings(model="m", **{name: value})  # type: ignore[arg-type]

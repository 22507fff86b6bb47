"""GPUs are found where the driver does not list them under /proc, and one that nobody sees is not passed over in silence."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster.build import actor_environment, device
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core import process
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config
from agentrl.resolve.memory import device_sign
from agentrl.resolve.parts import cluster_plan

AGENT = ["--agent", "envs/arithmetic.py"]


class Nvml:
    """The driver's management library, on a machine with some devices."""

    def __init__(self, count: int, fails: int = 0) -> None:
        self.count, self.fails, self.open = count, fails, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.count
        return self.fails

    def nvmlShutdown(self) -> None:
        self.open -= 1


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    process._nvml_device_count.cache_clear()
    yield
    process._nvml_device_count.cache_clear()


def with_nvml(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> Nvml:
    process._nvml_device_count.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


def test_devices_are_found_by_nvml_where_proc_lists_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library = with_nvml(monkeypatch, Nvml(4))
    assert (process.cuda_device_count(), device(), library.open) == (4, "cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert process.cuda_device_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert process.cuda_device_count() == 0


def test_a_library_that_fails_and_one_that_is_not_there_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.cuda_device_count() == 0
    with_nvml(monkeypatch, Nvml(4, fails=1))
    assert process.cuda_device_count() == 0


def test_pytorch_counts_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert device() == "cuda"


def test_the_kind_of_device_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--device = 'cuda': neither the driver, nor NVML, nor PyTorch finds a GPU"):
        load_config([*AGENT, "--device", "cuda"])
    with_nvml(monkeypatch, Nvml(8))
    assert load_config([*AGENT, "--device", "cuda"]).run.device == "cuda"
    assert (device("cpu"), device("auto")) == ("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"--offload = 'optimizer': needs a GPU, and --device is cpu. Leave out one"):
        load_config([*AGENT, "--device", "cpu", "--offload", "optimizer"])
    assert actor_environment(cluster_plan(changed(TrainConfig(), device="cpu")))["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in actor_environment(cluster_plan(TrainConfig(), "cuda"))


@pytest.mark.parametrize(
    ("line", "built"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", ""), ("cuda = '12.8'", "12.8")]
)
def test_cuda_without_a_device_is_a_warning(line: str, built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n", encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert process.cuda_torch() == built
    sign = device_sign(TrainConfig())
    assert (sign.text if sign else "") == (
        f"PyTorch is built for CUDA {built}, and no GPU is seen: the run computes on the CPU" if built else ""
    )
    assert device_sign(changed(TrainConfig(), device="cpu")) is None
    assert device_sign(changed(TrainConfig(), ray_address="auto")) is None
    with_nvml(monkeypatch, Nvml(1))
    assert device_sign(TrainConfig()) is None

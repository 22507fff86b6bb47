import gc
import os
import subprocess
import sys

import pytest

from agentrl.engine.settings import Transport, engine_environment, prepare_environment, without_gc


def test_values_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in engine_environment("cpu", "shm"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    prepare_environment("cpu")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for name in engine_environment("cpu", "shm"):
        monkeypatch.delenv(name)  # what `prepare_environment` set is undone at the end, like the rest


@pytest.mark.parametrize("transport", ["shm", "nccl", "ipc"])
def test_no_path_of_weights_lets_vllm_unpickle_what_it_is_sent(transport: Transport) -> None:
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in engine_environment("cuda", transport)


def test_the_engine_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, agentrl.engine.settings, agentrl.engine.settings, agentrl.engine.vllm_engine;"
        "print([m for m in ('torch', 'vllm', 'transformers', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_as_before(before: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        with without_gc():
            assert not gc.isenabled()
        assert gc.isenabled() is before
    finally:
        gc.unfreeze()
        gc.enable() if was else gc.disable()

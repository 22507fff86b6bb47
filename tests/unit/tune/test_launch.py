from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from agentrl.config.methods import METHODS
from agentrl.core.errors import ConfigError
from agentrl.resolve import ranks
from agentrl.resolve.tune import load_given
from agentrl.tune import launch

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", launch.LAUNCHER)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)


def test_a_process_is_alone_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    assert (ranks.world_size(), ranks.is_rank(), ranks.is_first()) == (1, False, True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert (ranks.world_size(), ranks.is_rank(), ranks.is_first()) == (2, True, False)


def test_srun_makes_ranks_where_the_job_names_an_address(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "1")):
        monkeypatch.setenv(name, value)
    assert ranks.world_size() == 1  # `srun` of one command is no training on four ranks
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert (ranks.world_size(), ranks.is_first()) == (4, False)
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("3", "1")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_rank_gets_its_place(tmp_path: Path):
    code = (
        f"import os; open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in ('WORLD_SIZE', 'MASTER_PORT')))"
    )
    assert launch.run_ranks(python(code), 2) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    first, second = ((tmp_path / name).read_text().split() for name in "01")
    assert first == second
    assert first[0] == "2"


def test_when_a_rank_fails_the_others_are_ended(tmp_path: Path):
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert launch.run_ranks(python(code), 2) == 7


def test_a_signal_reaches_every_rank(tmp_path: Path):
    inner = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
open(r'{tmp_path}/' + os.environ['RANK'], 'w').close()
time.sleep(600)
"""
    outer = f"import sys; from agentrl.tune.launch import run_ranks; sys.exit(run_ranks([sys.executable, '-c', {inner!r}], 2))"
    process = subprocess.Popen(python(outer))
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path):
    inner = f"""
import os, time
from agentrl.tune.launch import follow_launcher
follow_launcher()
with open(r'{tmp_path}/' + os.environ['RANK'] + '.partial', 'w') as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix('.partial'))
time.sleep(600)
"""
    outer = f"import sys; from agentrl.tune.launch import run_ranks; sys.exit(run_ranks([sys.executable, '-c', {inner!r}], 2))"
    process = subprocess.Popen(python(outer))
    while not {"0", "1"} <= {path.name for path in tmp_path.iterdir()}:
        assert process.poll() is None
        time.sleep(0.02)
    ranks = [psutil.Process(int((tmp_path / name).read_text())) for name in "01"]
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


def test_ranks_that_others_started_must_agree_on_a_directory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    given = {"data": "examples/tune/pairs.jsonl"}
    with pytest.raises(ConfigError, match="--run-dir is required where torchrun or srun starts the ranks"):
        load_given(METHODS["dpo"], given)
    load_given(METHODS["dpo"], {**given, "run_dir": "runs/x"})


@pytest.mark.parametrize("deepspeed", [False, True])
def test_a_rank_that_is_alone_computes_with_all_cores(deepspeed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with launch.joined("cpu", deepspeed=deepspeed):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

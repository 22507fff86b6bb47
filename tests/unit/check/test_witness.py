"""The state of PyTorch, which a check compares, and the lines that change it, with a module that stands in for PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCH = """
state = {"dtype": "torch.float32", "threads": 4}
float32, float64 = "float32", "float64"

def get_default_dtype(): return state["dtype"]
def set_default_dtype(value): state["dtype"] = f"torch.{value}"
def get_num_threads(): return state["threads"]
def set_num_threads(number): state["threads"] = number
def get_default_device(): return "cpu"
def set_default_device(value): pass
def are_deterministic_algorithms_enabled(): return False
def use_deterministic_algorithms(on): pass
def get_float32_matmul_precision(): return "highest"
def set_float32_matmul_precision(value): pass
"""
USER = """
import torch
# another line
torch.set_num_threads(7)
torch.set_default_device("cpu")
"""
CHECK = """
import sys
sys.path.insert(0, sys.argv[2])
from agentrl.check import witness
if sys.argv[1] == "early": import torch
seen = witness.Witness()
before = witness.torch_state()
import user
after = witness.torch_state()
changes = witness.torch_changes(before, after)
print(changes, witness.in_words(changes, before, after), *map(seen.line, changes))
import torch
torch.set_default_dtype(torch.float64)
witness.restore_torch(before)
print(bool(before), torch.state)
"""


@pytest.mark.parametrize("loaded", ["early", "late"])
def test_a_changed_number_of_threads_is_found_also_by_code_that_loads_pytorch(loaded: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "user.py").write_text(USER)
    words = [sys.executable, "-c", CHECK, loaded, str(tmp_path)]
    first, last = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    line = "at user.py, line 4, in <module> (`torch.set_num_threads(7)`)"
    assert first == f"['number of threads'] the number of threads from 4 to 7 , {line}"
    assert last == f"{loaded == 'early'} {{'dtype': 'torch.float32', 'threads': 4}}"

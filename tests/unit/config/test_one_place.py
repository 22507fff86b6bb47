"""A setting is stated once, beside its field: a copy of the package with one more field has it everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIELD = '''\
    made_up: Annotated[int, Ge(2), Le(9), Alias("--fictional")] = 3
    """Something that nothing reads."""
'''
LOOSE = FIELD.replace("made_up", "made_up_too").replace('Alias("--fictional")', "ResumeMayChange")
PROGRAM = """
import json, sys
from pathlib import Path
from tests.given import train_settings
from agentrl.config.mapping import differences, to_json
from agentrl.core.errors import ConfigError
from tests import reference

config = train_settings("envs/calculator.py", {"made_up": 5, "made_up_too": 4})
saved = json.loads(to_json(config))
other = train_settings("envs/calculator.py", {"fictional": 6, "made_up_too": 8})
try:
    train_settings("envs/calculator.py", {"made_up": 1})
except ConfigError as error:
    refused = str(error)
print(json.dumps({
    "saved": saved["flow"]["made_up"],
    "alias": other.flow.made_up,
    "resumed": differences(saved, other),
    "refused": refused,
    "page": [line for line in reference.render().splitlines() if "--made-up" in line],
}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "agentrl", root / "agentrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "envs"):
        (root / name).symlink_to(ROOT / name)
    file = root / "agentrl" / "flow" / "plan.py"
    text = file.read_text().replace("    oversample:", f"{FIELD}{LOOSE}    oversample:")
    file.write_text(text.replace("settings import Count", "settings import Alias, Count"))
    return root


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True, check=False)


def test_python_files_docs_and_resumption_have_it(package: Path) -> None:
    done = run(package, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["saved"], found["alias"]) == (5, 6)
    assert found["resumed"] == ["--made-up (was 5, now 6)"]
    assert found["refused"].startswith("--made-up = 1: must be greater than or equal to 2")
    cells = "| integer from 2 to 9 | `3` | stays | Something that nothing reads. Also: `--fictional`. |"
    assert found["page"] == [
        f"| `--made-up` {cells}",
        "| `--made-up-too` | integer from 2 to 9 | `3` | may differ | Something that nothing reads. |",
    ]


def test_the_command_line_has_it(package: Path) -> None:
    command = ("-m", "agentrl", "train")
    assert "--made-up N" in run(package, *command, "--help", "flow").stdout
    dry = run(package, *command, "envs/calculator.py", "--fictional", "7", "--dry-run")
    assert json.loads(dry.stdout)["flow"]["made_up"] == 7
    wrong = run(package, *command, "envs/calculator.py", "--made-up", "12")
    assert (wrong.returncode, "--made-up = 12: must be less than or equal to 9" in wrong.stderr) == (2, True)
    assert "did you mean --made-up?" in run(package, *command, "envs/calculator.py", "--made-upp", "3").stderr

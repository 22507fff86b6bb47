"""Models from packages: what is refused, what is downloaded, and that the pinned versions are those of the tests."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import zipfile
from pathlib import Path

import pytest

from agentrl.api.pretrained import MODELS, READER, get_model, packages
from agentrl.cli.get_model import GetModelArgs
from agentrl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"NAME = 'gpt9'.*Models: smollm2\."):
        get_model("gpt9", tmp_path / "out")


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use it with --model"):
        get_model("smollm2", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_versions_are_those_of_the_requirements() -> None:
    pinned = set(re.findall(r"^[\w-]+==[\w.]+", (ROOT / "requirements" / "real-model.txt").read_text(), re.MULTILINE))
    assert pinned - {"bitsandbytes==0.50.2", "skyrl-gym==0.4.0"} == {READER, *(model.package for model in MODELS.values())}
    assert all(name in (GetModelArgs.__doc__ or "") for name in MODELS)


def wheel(folder: Path, name: str) -> Path:
    """A package of one module without dependencies."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 7\n")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def test_a_package_that_is_missing_is_there_for_the_time_of_the_call(tmp_path: Path) -> None:
    before = list(sys.path)
    with packages(str(wheel(tmp_path, "carried_model")), modules=("carried_model",)):
        assert importlib.import_module("carried_model").VALUE == 7
    assert sys.path == before
    sys.modules.pop("carried_model")
    assert importlib.util.find_spec("carried_model") is None


def test_a_package_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing-1.0-py3-none-any.whl")
    with (
        pytest.raises(ConfigError, match=r"cannot be downloaded: .*missing.*Install them yourself: pip install"),
        packages(missing, modules=("missing",)),
    ):
        pass

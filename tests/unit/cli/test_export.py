from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli.export import find_checkpoint, main
from agentrl.core.errors import CheckpointError, ConfigError
from tests.unit.resolve.test_saved import save

pytestmark = pytest.mark.anyio


async def test_the_newest_checkpoint_of_a_run_or_the_one_that_is_named(tmp_path: Path) -> None:
    await save(tmp_path, 2, 4, 12)
    folders = [tmp_path / "checkpoints" / f"step-{step:08d}" for step in (4, 12)]
    assert find_checkpoint(tmp_path, None) == folders[1]
    assert [find_checkpoint(tmp_path, step) for step in (4, 12)] == folders
    assert find_checkpoint(folders[0], None) == folders[0]
    with pytest.raises(ConfigError, match=r"--step = 3: has no checkpoint. There are those of the steps 4, 12."):
        find_checkpoint(tmp_path, 3)
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        find_checkpoint(folders[0], 4)
    with pytest.raises(ConfigError, match=r"holds no checkpoint. .*--save-every"):
        find_checkpoint(folders[0] / "learner", None)


async def test_a_damaged_checkpoint_is_refused_although_there_is_an_older_one(tmp_path: Path) -> None:
    await save(tmp_path / "run", 2, 4)
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "progress.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-00000004/progress.json is not what manifest.json says"):
        main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


async def test_nothing_is_written_over(tmp_path: Path) -> None:
    await save(tmp_path / "run", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"OUT = .*: exists"):
        main([str(tmp_path / "run"), str(tmp_path / "out")])


def test_a_run_with_a_model_is_said_to_have_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"OUT is not given"):
        main([str(tmp_path)])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert main([str(tmp_path)]) == 0
    assert f"{tmp_path / 'model'} is a Hugging Face directory already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"holds no checkpoint. .*model is a Hugging Face directory already: copy it"):
        main([str(tmp_path), str(tmp_path / "out")])

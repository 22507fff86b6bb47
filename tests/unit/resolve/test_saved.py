from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.rewinding import rewind_records
from agentrl.config.mapping import from_mapping, to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.plugins import copy_plugins
from agentrl.core.recording import RecordBudget
from agentrl.flow.checkpoint import Progress, latest_checkpoint
from agentrl.flow.saving import Checkpoints
from agentrl.flow.uploads import send_copy
from agentrl.resolve.saved import chosen_engine, resume_point, resumed_run_dir, with_saved_settings
from agentrl.suites.load import load_agent
from tests.run_files import MadeRun
from tests.unit.flow.fakes import ScriptedLearner

AGENT = load_agent("envs/arithmetic.py")

pytestmark = pytest.mark.anyio


def config_of(run_dir: Path, **settings: Any) -> TrainConfig:
    return from_mapping(TrainConfig, {"agent": "a.py", "run_dir": str(run_dir), "resume": str(run_dir), **settings})


ESTIMATOR = "import agentrl\n\n@agentrl.advantage_estimator\ndef estimator(inputs, options):\n    return inputs.token_rewards\n"


async def save(run_dir: Path, *steps: int, keep: int = 2, learner: ScriptedLearner | None = None, **settings: Any) -> None:
    config = to_json(config_of(run_dir, **settings))
    checkpoints = Checkpoints(run_dir, learner or ScriptedLearner(), every=2, num_steps=9, keep=keep, config=config)
    for step in steps:
        async with checkpoints.saving(Progress(step=step, next_group_id=4 * step, open_groups=((3, 0, 3),))):
            assert latest_checkpoint(run_dir) != run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


async def test_the_newest_are_kept(tmp_path: Path) -> None:
    await save(tmp_path, 2, 4, 6, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
    assert resume_point(config_of(tmp_path)).progress == Progress(step=6, next_group_id=24, open_groups=((3, 0, 3),))


def test_checkpoints_are_due_every_few_steps_and_at_the_end(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, ScriptedLearner(), every=4, num_steps=10, keep=1, config="")
    assert [step for step in range(1, 11) if checkpoints.due(step)] == [4, 8, 10]


async def test_a_damaged_checkpoint_is_passed_over_and_later_replaced(tmp_path: Path) -> None:
    await save(tmp_path, 2, 4)
    (tmp_path / "checkpoints" / "step-00000004" / "progress.json").write_text("{")
    assert resume_point(config_of(tmp_path)).progress.step == 2
    await save(tmp_path, 4)
    assert resume_point(config_of(tmp_path)).progress.step == 4


async def test_a_failed_save_leaves_the_older_checkpoint_alone(tmp_path: Path) -> None:
    class FullDisk(ScriptedLearner):
        async def save_checkpoint(self, path: str, step: int) -> None:
            (Path(path) / "half").write_text("x")
            raise CheckpointError("no space left on device")

    await save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="no space"):
        await save(tmp_path, 4, learner=FullDisk())
    assert names(tmp_path) == ["step-00000002"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


async def test_changed_settings_are_named(tmp_path: Path) -> None:
    await save(tmp_path, 2)
    assert resume_point(config_of(tmp_path, num_steps=99, debug=True)).progress.step == 2
    with pytest.raises(ConfigError, match=r"--seed \(was 0, now 5\), --learning-rate \(was [^ ]+, now 0.5\)"):
        resume_point(config_of(tmp_path, seed=5, learning_rate=0.5))


@pytest.mark.parametrize("recorded", ["vllm", "transformers", "auto"])
async def test_the_command_that_began_a_run_resumes_it_with_its_engine(tmp_path: Path, recorded: str) -> None:
    run_dir, address = tmp_path / "run", tmp_path / "copies"
    await save(run_dir, 2, engine=recorded)
    (run_dir / "config.json").write_text(to_json(config_of(run_dir)))
    again = config_of(run_dir, resume="auto")
    assert again.engine.engine == "auto"
    assert chosen_engine(again, AGENT) == (recorded, "")
    assert resume_point(changed(again, engine=recorded)).progress.step == 2
    await send_copy(run_dir / "checkpoints" / "step-00000002", str(address), ScriptedLearner(), keep=9)
    elsewhere = config_of(tmp_path / "other", resume="auto", checkpoint_upload=f"file://{address}")
    assert chosen_engine(elsewhere, AGENT) == (recorded, "")


def test_a_run_that_may_go_on_but_has_not_begun_chooses_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.resolve.saved.settled_engine", lambda config: ("transformers", "why"))
    for resume in ("auto", ""):
        assert chosen_engine(config_of(tmp_path, resume=resume), AGENT) == ("transformers", "why")


async def test_the_layout_of_learner_and_engines_may_change(tmp_path: Path) -> None:
    await save(tmp_path, 2)
    assert resume_point(config_of(tmp_path, num_learners=2, zero_stage=3, num_engines=4)).progress.step == 2


async def test_the_length_of_a_schedule_may_not_change(tmp_path: Path) -> None:
    await save(tmp_path, 2, lr_schedule="cosine")
    with pytest.raises(ConfigError, match="--num-steps"):
        resume_point(config_of(tmp_path, lr_schedule="cosine", num_steps=99))


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--save-every"):
        resume_point(config_of(tmp_path))
    assert resume_point(config_of(tmp_path, resume="auto")).progress == Progress()
    assert resumed_run_dir(config_of(tmp_path, resume="auto")) is None
    with pytest.raises(ConfigError, match="--run-dir"):
        resumed_run_dir(from_mapping(TrainConfig, {"resume": "auto"}))
    with pytest.raises(ConfigError, match="holds no run"):
        with_saved_settings(["--resume", str(tmp_path)])


@pytest.mark.parametrize("words", [["--resume", "{}"], ["--resume={}"]])
def test_a_run_brings_its_settings(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = [word.format(tmp_path) for word in words]
    assert with_saved_settings(words) == ["--config", str(tmp_path / "config.json"), *words]
    assert with_saved_settings(["--resume", "auto"]) == ["--resume", "auto"]


def test_records_after_the_checkpoint_are_taken_back(tmp_path: Path) -> None:
    metrics, trajectories = tmp_path / "metrics.jsonl", tmp_path / "trajectories.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5)) + '{"step": 5')
    trajectories.write_text("".join(json.dumps({"group_id": group_id}) + "\n" for group_id in range(8)))
    (tmp_path / "requests.jsonl").write_bytes(trajectories.read_bytes())
    evaluated = tmp_path / "eval_trajectories.jsonl"
    evaluated.write_text("".join(json.dumps({"group_id": 7, "version": step}) + "\n" for step in range(4)))
    progress = Progress(step=2, next_group_id=6, open_groups=((3, 0, 3), (5, 0, 5)))
    assert [row["step"] for row in rewind_records(tmp_path, progress)] == [1, 2]
    assert len(metrics.read_text().splitlines()) == 2
    assert [json.loads(line)["group_id"] for line in trajectories.read_text().splitlines()] == [0, 1, 2, 4]
    assert (tmp_path / "requests.jsonl").read_bytes() == trajectories.read_bytes()
    assert [json.loads(line)["version"] for line in evaluated.read_text().splitlines()] == [0, 1, 2]  # whatever their groups are


def test_the_account_of_records_is_that_of_the_groups_that_stay(tmp_path: Path) -> None:
    def write(groups: Iterable[int], begin: RecordBudget) -> RecordBudget:
        made = MadeRun(tmp_path / "run", budget=begin)
        for made.groups in groups:
            made.group(1 + made.groups // 4, members=1 + made.groups % 3, turns=1 + made.groups % 2)
        return begin

    def budget() -> RecordBudget:
        return RecordBudget(samples=3, least=1, budget_bytes=1e6)

    killed = write(range(9), budget())
    (tmp_path / "run" / "trajectories.jsonl").open("ab").write(b'{"group_id": 9, "trajec')
    rewind_records(tmp_path / "run", Progress(step=1, next_group_id=7, open_groups=((3, 0, 3), (5, 0, 5))))
    resumed = write((), budget())
    assert (resumed.episodes, resumed.played) == (9, 9)  # of the groups 0, 1, 2, 4, 6
    assert resumed.bytes == (tmp_path / "run" / "trajectories.jsonl").stat().st_size
    whole = write((3, 5, 7, 8), resumed)
    assert (whole.episodes, whole.played) == (killed.episodes, killed.played)
    assert whole.bytes == (tmp_path / "run" / "trajectories.jsonl").stat().st_size


def test_what_was_measured_before_the_first_step_stays_only_with_a_checkpoint(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    assert [row["step"] for row in rewind_records(tmp_path, Progress(step=2, next_group_id=6))] == [0, 1, 2]
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 3
    assert rewind_records(tmp_path, Progress()) == []
    assert (tmp_path / "evaluations.jsonl").read_text() == ""


async def test_a_changed_file_of_an_own_estimator_is_refused_with_two_ways_on(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ESTIMATOR)
    run_dir, setting = tmp_path / "run", f"{file}:estimator"
    await save(run_dir, 2, advantage_estimator=setting)
    config = config_of(run_dir, advantage_estimator=setting)
    copy_plugins([setting], run_dir)
    assert resume_point(config).progress.step == 2
    file.write_text(f"{ESTIMATOR}# another\n")
    copy = run_dir / "plugins" / "own.py"
    with pytest.raises(ConfigError, match=f"Restore it: cp {copy} {file}. To go on with the changed file, remove the copy"):
        resume_point(config)
    copy.unlink()
    assert resume_point(config).progress.step == 2


async def test_a_missing_file_of_an_own_estimator_is_restored_from_the_copy(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ESTIMATOR)
    setting = f"{file}:estimator"
    copy_plugins([setting], tmp_path / "run")
    file.unlink()
    with pytest.raises(ConfigError, match=f"there is no such file any more. Restore it: cp {tmp_path}/run/plugins/own.py {file}"):
        config_of(tmp_path / "run", advantage_estimator=setting)


async def test_a_finished_run_and_one_without_a_checkpoint_are_answered_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"before its first one.*Start it again without --resume"):
        resume_point(config_of(tmp_path))
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "steps": 4}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"the run has finished.*--model .*/model"):
        resume_point(config_of(tmp_path))
    await save(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"has finished: it did its 4 steps. Give --num-steps more than 4"):
        resume_point(config_of(tmp_path, num_steps=4))
    assert resume_point(config_of(tmp_path, num_steps=5)).progress.step == 4
    assert resume_point(config_of(tmp_path, num_steps=4, resume="auto")).progress.step == 4


async def copied(run_dir: Path, address: Path, *steps: int, **settings: Any) -> None:
    """A run with checkpoints of these steps, and copies of them."""
    await save(run_dir, *steps, keep=9, **settings)
    for step in steps:
        await send_copy(run_dir / "checkpoints" / f"step-{step:08d}", str(address), ScriptedLearner(), keep=9)


def seed_in(file: str) -> int:
    seed: int = json.loads(Path(file).read_text())["run"]["seed"]
    return seed


async def test_the_address_of_copies_brings_settings_and_checkpoint(tmp_path: Path) -> None:
    address = tmp_path / "copies"
    await copied(tmp_path / "run", address, 2, 4, seed=7)
    for place in (str(address), f"file://{address}"):
        _, file, *words = with_saved_settings(["--resume", place])
        assert words == ["--resume", place]
        assert seed_in(file) == 7
        config = config_of(tmp_path / "other", resume=place, seed=7)
        assert resumed_run_dir(config) == tmp_path / "other"
        point = resume_point(config)
        assert (point.progress.step, point.checkpoint) == (4, None)
        assert point.copy is not None
        assert point.copy.address.removeprefix("file://") == f"{address}/step-00000004"
        with pytest.raises(ConfigError, match=r"--seed \(was 7, now 8\)"):
            resume_point(config_of(tmp_path / "other", resume=place, seed=8))
    assert resume_point(config_of(tmp_path / "other", resume=f"{address}/step-00000002", seed=7)).progress.step == 2


async def test_the_newest_counts_wherever_it_is(tmp_path: Path) -> None:
    address, run_dir = tmp_path / "copies", tmp_path / "run"
    await copied(run_dir, address, 2, 4)
    settings = {"checkpoint_upload": str(address), "save_every": 2}
    for resume in ("auto", str(run_dir)):
        point = resume_point(config_of(run_dir, resume=resume, **settings))
        assert (point.checkpoint, point.copy) == (run_dir / "checkpoints" / "step-00000004", None)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000004")
    for resume in ("auto", str(run_dir)):
        point = resume_point(config_of(run_dir, resume=resume, **settings))
        assert point.copy is not None
        assert point.progress.step == point.copy.step == 4
    (address / "step-00000004" / "manifest.json").unlink()
    assert resume_point(config_of(run_dir, resume="auto", **settings)).checkpoint == run_dir / "checkpoints" / "step-00000002"
    shutil.rmtree(run_dir)
    shutil.rmtree(address)
    assert resume_point(config_of(run_dir, resume="auto", **settings)).progress == Progress()


async def test_a_new_run_does_not_take_the_address_of_another(tmp_path: Path) -> None:
    await copied(tmp_path / "run", tmp_path / "copies", 2)
    config = config_of(tmp_path / "other", resume="", checkpoint_upload=str(tmp_path / "copies"), save_every=2)
    with pytest.raises(ConfigError, match=r"--checkpoint-upload .* already holds the checkpoints of a run"):
        resume_point(config)


async def test_a_copy_with_a_flipped_bit_in_its_settings_is_refused(tmp_path: Path) -> None:
    address = tmp_path / "copies"
    await copied(tmp_path / "run", address, 2)
    progress = address / "step-00000002" / "progress.json"
    progress.write_text(progress.read_text().replace("2", "3", 1))
    with pytest.raises(CheckpointError, match=r"progress.json is not what manifest.json says"):
        resume_point(config_of(tmp_path / "other", resume=str(address)))


def test_an_address_without_a_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--resume = 'file://{tmp_path}': holds no complete checkpoint"):
        with_saved_settings(["--resume", f"file://{tmp_path}"])
    with pytest.raises(ConfigError, match=r"--resume = 'nowhere://x'"):
        with_saved_settings(["--resume", "nowhere://x"])

"""Episodes of every ready-made environment, played by random text on the tiny model's tokenizer, replay from their records."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.mapping import from_mapping, to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import EnvLoadError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import GroupRequest
from agentrl.inspect.compare import Verdict
from agentrl.inspect.directory import RunDirectory
from agentrl.inspect.replay import open_replayer
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.tasks import open_tasks
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import keep_environment, load_agent
from agentrl.track.sinks import TrajectoryRecorder
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

ENVS = Path(__file__).parents[3] / "envs"
CODEC = ChatCodec(load_tokenizer(str(tiny_model_path())))
SAYINGS = (
    *('{"tool":"add","args":[3,4]}', '{"name": "query", "arguments": {"sql": "select 1"}}', "7", "50", "left", "down", "hit", "stick"),
    *("[apple]", "offer 3", "accept", "The answer is 12.", "\x00 odd \u202e", ""),
)
AGENTS = [*map(str, sorted(ENVS.glob("*.py"))), "gym:FrozenLake-v1", "gym:Taxi-v4", "gym:Blackjack-v1"]


def at_random(request: GenerationRequest) -> list[int]:
    chance = random.Random(request.request_id)
    return CODEC.encode_text(chance.choice(SAYINGS)) + [CODEC.end_token_ids[0]] * (chance.random() < 0.9) or [9]


SLOW = {"swe": pytest.mark.slow}  # its episodes run tests in sandboxes
PLAYED = [pytest.param(agent, id=Path(agent).stem, marks=SLOW.get(Path(agent).stem, ())) for agent in AGENTS]


@pytest.mark.parametrize("agent", PLAYED)
async def test_recorded_episodes_replay(agent: str, tmp_path: Path) -> None:
    config = from_mapping(TrainConfig, {"agent": agent, "run_dir": str(tmp_path), "max_turns": 5, "n_samples_per_prompt": 3})
    try:
        spec = load_agent(agent)
        tasks = open_tasks(config.data, spec, seed=config.run.seed)
    except EnvLoadError as error:
        if "package" not in str(error) and "Install" not in str(error):
            raise
        pytest.skip(f"an optional package is missing: {error}")
    settings = episode_plan(config).with_model(str(tiny_model_path()))
    worker = EpisodeWorker(ScriptedEngine(answer=at_random, max_model_len=2048, end_token_ids=()), spec, changed(settings, seed=0))
    recorder = TrajectoryRecorder(tmp_path / "trajectories.jsonl")
    (tmp_path / "config.json").write_text(to_json(config))
    await worker.start()
    try:
        for number, task in enumerate(islice(tasks, 4)):
            summary, _ = await worker.run_group(GroupRequest(group_id=number, task=task, n_samples_per_prompt=3, version=0, record=3))
            recorder.write(summary)
    finally:
        await worker.close()
    replayer = open_replayer(RunDirectory(tmp_path))
    await replayer.start()
    try:
        outcomes = [outcome async for outcome in replayer.replay_all(RunDirectory(tmp_path).episodes(), jobs=4)]
    finally:
        await replayer.close()
    assert len(outcomes) == 12
    assert [(outcome.episode_id, outcome.difference, outcome.reason) for outcome in outcomes if outcome.verdict is not Verdict.SAME] == []


async def test_a_run_is_replayed_from_another_folder_in_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(to_json(from_mapping(TrainConfig, {"agent": "envs/calculator.py", "run_dir": str(run_dir)})))
    keep_environment("envs/calculator.py", run_dir)
    (run_dir / "trajectories.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    await open_replayer(RunDirectory(run_dir)).close()
    assert f"replaying in the run's copy of it, {run_dir}/environment/calculator.py" in caplog.text
    (run_dir / "environment" / "calculator.py").unlink()
    with pytest.raises(EnvLoadError, match="Replay from the folder that the run was started in"):
        open_replayer(RunDirectory(run_dir))

"""Rules of reward servers."""

from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config

URL = "http://127.0.0.1:5000/get_reward"
PROMPTS = ["--prompts", "org/name"]


def refuse(*args: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(list(args))
    return caught.value


def test_reward_servers_take_the_place_of_an_agent() -> None:
    config = load_config(["--remote-rm-url", f"{URL}, {URL}2", "--reward-timeout-s", "20", *PROMPTS])
    assert config.run.agent == f"reward:{URL},{URL}2#timeout_s=20&batch_size=64"
    again = load_config(["--agent", config.run.agent, "--remote_rm_url", f"{URL},{URL}2", *PROMPTS])
    assert again.run.agent.endswith("#timeout_s=45&batch_size=64")


def test_a_reward_file_does_too(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("")
    assert load_config(["--remote_rm_url", str(path)]).run.agent == str(path)
    assert refuse("--remote-rm-url", str(tmp_path / "missing.py")).problem == "no such file"


def test_what_does_not_go_together() -> None:
    assert refuse("--remote-rm-url", URL, "--agent", "a.b:C", *PROMPTS).field == "--remote-rm-url"
    assert refuse("--remote-rm-url", URL).field == "--prompts"
    assert refuse("--remote-rm-url", f"{URL},localhost:80", *PROMPTS).remedy.startswith("Write http://")
    error = refuse("--remote-rm-url", URL, "--step-timeout-s", "30", *PROMPTS)
    assert error.field == "--reward-timeout-s"
    assert "--step-timeout-s 30" in error.problem

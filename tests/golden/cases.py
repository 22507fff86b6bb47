"""Cases of the golden files: command lines, each with the machine that it runs on and what it needs.

Cases by hand stand in ``named.txt`` and below. Those of the documentation and those that were drawn stand in ``data``, word for word, so
that they stay the same when pages and settings change; `tests.golden.documented` and `tests.golden.drawing` have written them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
NAMED = HERE / "named.txt"
DOCUMENTED, DRAWN = HERE / "data" / "documented.jsonl", HERE / "data" / "drawn.jsonl"
CALC = "train --agent envs/calculator.py"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line on a simulated machine.

    Attributes:
        name: Name of the case; what stands before its first blank is its kind.
        words: Words after ``agentrl``, the command first; ``loop`` stands for `agentrl.open_runtime` with ``name=value`` words.
        machine: Name of a machine of `MACHINES`.
        files: Text of files that are written before, by their names.
        before: Commands that run before, whose runs the case reads.
        begun_on: Name of the machine that these run on; empty: that of the case.
        deaths: Times that a learner rank dies in the run, each time after a checkpoint if there is one.
    """

    name: str
    words: tuple[str, ...]
    machine: str = "cpu"
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[tuple[str, ...], ...] = ()
    begun_on: str = ""
    deaths: int = 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text.replace("CALC", CALC)))


BEGUN = (_words("CALC --run-dir runs/begun --save-every 10"),)
SETTINGS = {
    "settings/short.toml": 'agent = "envs/calculator.py"\nnum_steps = 7\nasync = true\n[learner]\nlearning_rate = 2e-4\n',
    "settings/long.yaml": "agent: envs/calculator.py\nengine:\n  max_num_seqs: 8\nlora_rank: 4\n",
    "settings/shared.json": '{"agent": "envs/calculator.py", "weights": {"colocate": true}, "num_engines": 2}',
}
LEVELED = """from agentrl import AgentInstance, StepResult, Task


class Leveled(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"{number}?", id=str(number), metadata={"level": number % 3}) for number in range(12)]

    def step(self, state):
        return StepResult(1.0, terminated=True)
"""
OWN_FILES = {"settings/own.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}", "settings/own.pem": "a certificate"}
TINY_RATE = {"settings/tiny.toml": 'agent = "envs/calculator.py"\nlearning_rate = 5e-4\n'}
PREPARED = (
    Case(name="file toml", words=_words("train --config settings/short.toml"), files=SETTINGS),
    Case(name="file toml and flags", words=_words("train --config settings/short.toml --num-steps 9 --max-staleness 2"), files=SETTINGS),
    Case(name="file yaml", words=_words("train --config settings/long.yaml"), files=SETTINGS),
    Case(name="file json gpu2", words=_words("train --config settings/shared.json"), files=SETTINGS, machine="gpu2"),
    Case(name="file rate of a tiny model", words=_words("train --config settings/tiny.toml --model models/qwen2.5-7b"), files=TINY_RATE),
    Case(name="file eval", words=_words("eval --config settings/short.toml --eval-size 4"), files=SETTINGS),
    Case(name="file unknown", words=_words("train --config settings/never.toml")),
    Case(name="file wrong key", words=_words("train --config settings/wrong.toml"), files={"settings/wrong.toml": "learning_rat = 1\n"}),
    Case(
        name="file twice", words=_words("train --config settings/twice.toml"), files={"settings/twice.toml": "seed = 1\n[run]\nseed = 2\n"}
    ),
    Case(name="file chat template", words=_words("CALC --chat-template settings/own.jinja"), files=OWN_FILES),
    Case(
        name="file certificate",
        words=_words("train --agent examples/openai_agent.py --endpoint-certificate settings/own.pem --endpoint-url https://here:{port}"),
        files=OWN_FILES,
    ),
    Case(
        name="file curriculum",
        words=_words("train --agent leveled.py --task-sampling curriculum:level"),
        files={"leveled.py": LEVELED},
    ),
    Case(name="dying once", words=_words("CALC --save-every 10 --run-dir runs/dying"), deaths=1),
    Case(name="dying once gpu1", words=_words("CALC --save-every 10 --run-dir runs/dying"), deaths=1, machine="gpu1"),
    Case(name="dying once gpu1-24", words=_words("CALC --save-every 10 --model models/qwen2.5-0.5b"), deaths=1, machine="gpu1-24"),
    Case(
        name="dying once in many processes",
        words=_words("CALC --save-every 10 --max-staleness 3 --n-samples-per-prompt 128 --groups-per-step 64"),
        deaths=1,
        machine="cpu16",
    ),
    Case(name="dying once in a cluster", words=_words("CALC --ray-address HEAD:6379 --save-every 10"), deaths=1, machine="cluster-gpu"),
    Case(name="dying without a checkpoint", words=_words("CALC"), deaths=1),
    Case(name="dying too often", words=_words("CALC --save-every 10"), deaths=4),
    Case(name="resume", words=_words("train --resume runs/begun"), before=BEGUN),
    Case(name="resume longer", words=_words("train --resume runs/begun --num-steps 200"), before=BEGUN),
    Case(name="resume auto", words=(*BEGUN[0], "--resume", "auto"), before=BEGUN),
    Case(name="resume with other ranks", words=_words("train --resume runs/begun --num-learners 2 --zero-stage 3"), before=BEGUN),
    Case(name="resume with other engines", words=_words("train --resume runs/begun --num-engines 4"), before=BEGUN),
    Case(name="resume on gpu1", words=_words("train --resume runs/begun"), before=BEGUN, begun_on="cpu", machine="gpu1"),
    Case(name="resume on gpu2", words=_words("train --resume runs/begun"), before=BEGUN, begun_on="cpu", machine="gpu2"),
    Case(name="resume on a cpu", words=_words("train --resume runs/begun"), before=BEGUN, begun_on="gpu1"),
    Case(name="resume on bare", words=_words("train --resume runs/begun"), before=BEGUN, begun_on="cpu", machine="bare"),
    Case(name="resume from bare", words=_words("train --resume runs/begun"), before=BEGUN, begun_on="bare"),
    Case(name="resume with another setting", words=_words("train --resume runs/begun --gamma 0.9"), before=BEGUN),
    Case(name="resume with another loss", words=_words("train --resume runs/begun --policy-loss gspo"), before=BEGUN),
    Case(name="resume elsewhere", words=_words("train --resume runs/begun --run-dir runs/other"), before=BEGUN),
    Case(
        name="resume a copy",
        words=_words("train --resume runs/copies --run-dir runs/again"),
        before=(_words("CALC --run-dir runs/begun --save-every 10 --checkpoint-upload runs/copies"),),
    ),
    Case(
        name="resume in many processes",
        words=_words("train --resume runs/begun"),
        before=(_words("CALC --run-dir runs/begun --save-every 10 --max-staleness 3 --n-samples-per-prompt 128 --groups-per-step 64"),),
        begun_on="cpu16",
    ),
    Case(
        name="resume plug-ins",
        words=_words("train --resume runs/begun"),
        before=(_words("CALC --run-dir runs/begun --save-every 10 --group-filter examples/own_algorithm.py:mixed_results"),),
    ),
    Case(
        name="resume lora 7b",
        words=_words("train --resume runs/begun"),
        before=(_words("CALC --run-dir runs/begun --save-every 10 --model models/qwen2.5-7b --lora-rank 8"),),
        machine="gpu2",
    ),
    Case(name="taken run dir", words=_words("CALC --run-dir runs/begun"), before=BEGUN),
    Case(name="eval run", words=_words("eval --run runs/begun --baseline start --eval-size 4"), before=BEGUN),
    Case(name="eval run from gpu1", words=_words("eval --run runs/begun --eval-size 4"), before=BEGUN, begun_on="gpu1"),
    Case(
        name="eval run with settings",
        words=_words("eval --run runs/begun --eval-size 4"),
        before=(_words("CALC --run-dir runs/begun --temperature 0.7 --max-new-tokens 32 --overlong-buffer 8 --env-isolation process"),),
    ),
    Case(name="sample run", words=_words("sample --run runs/begun --num-tasks 4 --output runs/sampled"), before=BEGUN),
    Case(name="plan run", words=_words("plan --measured runs/begun --gpus 2"), before=BEGUN),
    Case(name="replay run", words=_words("replay runs/begun --all"), before=BEGUN),
    Case(name="export run", words=_words("export runs/begun runs/exported"), before=BEGUN),
    Case(
        name="export adapter",
        words=_words("export runs/begun runs/exported --merge"),
        before=(_words("CALC --run-dir runs/begun --save-every 10 --lora-rank 8 --publish adapter"),),
    ),
)
"""Cases with files, or with runs that went before."""


def named_cases() -> Iterator[Case]:
    """Yield the cases of ``named.txt``."""
    for line in NAMED.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, machine, text = line.split(" | ", 2)
            yield Case(name=name, machine=machine, words=_words(text))


def stored_cases(path: Path) -> Iterator[Case]:
    """Yield the cases of a file in ``data``."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        before = tuple(tuple(words) for words in row.get("before", ()))
        yield Case(name=row["name"], words=tuple(row["words"]), machine=row["machine"], before=before)


def all_cases() -> list[Case]:
    """Return every case.

    Raises:
        ValueError: If two have one name.
    """
    cases = [*named_cases(), *PREPARED, *stored_cases(DOCUMENTED), *stored_cases(DRAWN)]
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"cases with one name: {', '.join(sorted(twice))}")
    return cases

"""Every defect is found, and nothing else is said of the environment that has it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.check.findings import Severity
from tests.unit.check.support import BROKEN, checked, ids

DEFECTS = {
    "bad_tasks:NoTasks": "tasks-empty",
    "bad_tasks:TasksRaise": "tasks-broken",
    "bad_tasks:TasksArePairs": "tasks-broken",
    "bad_tasks:IdsTwice": "tasks-broken",
    "bad_tasks:MessagesWithoutRole": "tasks-broken",
    "bad_tasks:SingleUseIterator": "tasks-single-use",
    "bad_tasks:TasksUnseeded": "tasks-unstable",
    "bad_tasks:SameTaskTwice": "tasks-duplicate",
    "bad_tasks:LabelHoldsLock": "task-not-picklable",
    "bad_tasks:MutatesMetadata": "task-mutated",
    "bad_tasks:PromptTooLong": "prompt-too-long",
    "bad_tasks:PromptNearLimit": "prompt-near-limit",
    "bad_results:NeedsArguments": "init-raises",
    "bad_results:ResetRaises": "reset-raises",
    "bad_results:StepRaisesOnText": "step-raises",
    "bad_results:CloseRaises": "close-raises",
    "bad_results:GymnasiumTuple": "result-type",
    "bad_results:RewardKeyMisspelt": "result-key",
    "bad_results:RewardIsNone": "reward-type",
    "bad_results:RewardIsNaN": "reward-not-finite",
    "bad_results:ScoreInPercent": "score-range",
    "bad_results:InfoIsText": "info-type",
    "bad_results:NoObservation": "observation-missing",
    "bad_results:ObservationIsNumber": "observation-type",
    "bad_results:MessageWithoutContent": "observation-type",
    "bad_results:MegabytesOfText": "observation-too-long",
    "bad_results:SamplingOutOfRange": "sampling-invalid",
    "bad_results:DoneIsText": "flag-type",
    "bad_results:ImagesAreOneText": "images-type",
    "bad_results:ImagesForTextModel": "images-unread",
    "bad_random:GlobalRandomInReset": "group-differs",
    "bad_random:UnseededGenerator": "group-differs",
    "bad_random:GlobalRandomInStep": "nondeterministic",
    "bad_random:ClockInReward": "nondeterministic",
    "bad_random:ReseedsGlobal": "global-reseed",
    "bad_random:ReseedsNumpy": "global-reseed",
    "bad_snapshot:ForgetsRandomNumbers": "snapshot-differs",
    "bad_snapshot:ForgetsAnswers": "snapshot-differs",
    "bad_snapshot:SharesHistory": "snapshot-differs",
    "bad_snapshot:RestoreRaises": "snapshot-differs",
    "bad_snapshot:StateOutsideOfPython": "snapshot-differs",
    "bad_random:HistoryInClass": "shared-state",
    "bad_random:AnswerInClass": "shared-state",
    "bad_random:HistoryInModule": "shared-state",
    "bad_random:AnswerInSharedObject": "shared-state",
    "bad_resources:LeavesFilesOpen": "leaks-files",
    "bad_resources:LeavesSocketsOpen": "leaks-sockets",
    "bad_resources:LeavesThreads": "leaks-threads",
    "bad_resources:LeavesTasks": "leaks-tasks",
    "bad_resources:LeavesFilesWhenCancelled": "leaks-files",
    "bad_resources:SwallowsCancellation": "ignores-cancellation",
    "bad_speed:SleepsInAsync": "blocks-loop",
    "bad_speed:ComputesInAsync": "blocks-loop",
    "bad_speed:QuadraticInText": "slow-on-long-text",
    "bad_text:ControlTokensInPrompt": "control-tokens",
    "bad_text:ControlTokensInFeedback": "control-tokens",
    "bad_text:RawWithoutTemplate": "raw-observation",
    "bad_text:RepeatsHistory": "repeats-history",
    "bad_text:HugeObservation": "observation-huge",
    "bad_learning:RewardsNothing": "reward-constant",
    "bad_learning:RewardsEverything": "reward-constant",
    "bad_learning:LooksForLabelInText": "constant-solves",
    "bad_learning:LooksForOneLabelOfMany": "label-contained",
    "bad_learning:TakesAnyNumber": "label-contained",
    "bad_learning:WrongSign": "label-loses",
    "bad_learning:JudgeIgnoresLabel": "label-loses",
    "bad_learning:PaysEveryLook": "reward-repeats",
    "bad_learning:PaysLookWithoutSolve": "reward-repeats",
    "bad_learning:NearlyAlwaysYes": "constant-solves",
    "bad_learning:RewardsSilence": "constant-solves",
    "bad_learning:AnswerInPrompt": "copy-solves",
    "bad_learning:NeverEnds": "never-ends",
    "bad_effects:ChangesDirectory": "changes-cwd",
    "bad_effects:ChangesEnviron": "changes-environ",
    "bad_effects:SetsAlarmHandler": "changes-signals",
    "bad_effects:LeavesTimer": "changes-signals",
    "bad_effects:ReplacesJson": "changes-modules",
    "bad_effects:ReplacesCalls": "changes-modules",
    "bad_effects:ClearsModules": "changes-modules",
    "bad_effects:CallsExit": "step-raises",
    "bad_resources:LeavesProcesses": "leaks-processes",
    "bad_resources:LeavesDaemons": "leaks-processes",
    "bad_resources:LeavesForks": "leaks-processes",
    "bad_resources:KeepsPages": "leaks-memory",
    "bad_subtle:DebugLineInPrompt": "label-leaks",
    "bad_subtle:TellsAfterAnEmptyAnswer": "label-leaks",
    "bad_subtle:SharedDefaultArgument": "shared-state",
    "bad_subtle:ForgetsAwait": "never-awaited",
    "bad_subtle:JudgeFailsInBackground": "background-error",
    "bad_subtle:NumberNeverEqualsText": "solve-fails",
    "bad_subtle:SolveRaises": "solve-raises",
    "bad_import_thread:Sums": "import-effects",
    "bad_import_folder:Sums": "import-effects",
    "bad_import_timer:Sums": "import-effects",
    "bad_effects:ClosesOutput": "closes-streams",
    "bad_effects:ClosesInput": "closes-streams",
    "bad_effects:ReadsInput": "reads-input",
    "bad_effects:ReadsLine": "reads-input",
}
SECOND = {
    "bad_subtle:TasksFromSet": "tasks-unstable",
    "bad_subtle:PromptOrderFromSet": "hash-order",
    "bad_subtle:HintsByHash": "hash-order",
    "bad_subtle:HigherOnWeekends": "clock-dependent",
    "bad_subtle:NightShift": "clock-dependent",
    "bad_import_seed:Sums": "import-reseeds",
}
"""What only a second process shows."""

LINUX = ("bad_resources:LeavesDaemons", "bad_resources:LeavesSocketsOpen", "bad_resources:KeepsPages")
"""What only Linux tells: processes whose parents are gone, sockets among open files, memory that a process holds alone."""
ENVS = BROKEN.parents[3] / "envs"
SHORT = {"bad_speed:SleepsInAsync": 5.0, "bad_speed:ComputesInAsync": 5.0, "bad_speed:BacktracksWithGil": 1.0}
"""Seconds for environments that are found to be slow, and would be played for longer."""
SOUND = (
    "sound:Sums",
    "sound:Tries",
    "sound:AsyncTries",
    "bad_subtle:Solves",
    "bad_tasks:CopiesMetadata",
    "bad_learning:TakesTheLastNumber",
    "bad_learning:PaysLookALittle",
    "bad_random:SeededGenerator",
    "bad_snapshot:Copies",
    "bad_resources:ClosesAll",
    "bad_resources:ReplacesServer",
)
NOTES = {"bad_random:CacheInClass": "class-state", "bad_effects:Prints": "writes-output"}
LOST = {
    "bad_results:StepNeverReturns": "timeout",
    "bad_subtle:CloseNeverReturns": "timeout",
    "bad_speed:HangsInAsync": "hangs",
    "bad_speed:HangsInTasks": "hangs",
    "bad_speed:BacktracksWithGil": "hangs",
    "bad_effects:OpensAllFiles": "leaks-files",
    "bad_effects:ExitsProcess": "crashes",
    "bad_effects:Segfaults": "crashes",
}


def spec(name: str) -> str:
    file, _, cls = name.partition(":")
    return f"{BROKEN / file}.py:{cls}"


def here(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; those of `LINUX` are skipped elsewhere."""
    return [pytest.param(name, marks=pytest.mark.linux if name in LINUX else ()) for name in names]


@pytest.mark.parametrize("name", here(DEFECTS))
def test_exactly_this_is_found(name: str) -> None:
    report = checked(spec(name), budget_s=SHORT.get(name, 60.0))
    assert ids(report) == {DEFECTS[name]}, [finding.seen for finding in report.findings]


LINES = {
    "bad_effects:ChangesDirectory": ("bad_effects.py, line 15", "os.chdir"),
    "bad_effects:SetsAlarmHandler": ("bad_effects.py, line 25", "signal.signal"),
    "bad_resources:LeavesDaemons": ("bad_resources.py, line 50", "setsid sleep 3600"),
    "bad_snapshot:RestoreRaises": ("RestoreRaises.restore", "KeyError: 'history'"),
    "bad_import_folder:Sums": ("bad_import_folder.py, line 5", "os.chdir"),
    "bad_resources:KeepsPages": ("bad_resources.py, line 73", r"\b9[6-9] KiB more with each"),
}


@pytest.mark.parametrize("name", here(LINES))
def test_the_line_is_named(name: str) -> None:
    (finding,) = (finding for finding in checked(spec(name), episodes=1).findings if finding.id == DEFECTS[name])
    for words in LINES[name]:
        assert re.search(words, finding.seen)


@pytest.mark.linux
def test_memory_beyond_the_limit_is_found() -> None:
    report = checked(spec("bad_resources:NeedsGigabytes"), memory_mib=500, episodes=1)
    assert ids(report) == {"exceeds-memory"}, [finding.seen for finding in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("SetsDefaultType", r"reset changed the default dtype from torch.float32 to torch.float64, at bad_effects.py, line"),
        ("SetsThreads", r"step changed the number of threads from \d+ to 77, at bad_effects.py, line .*set_num_threads\(77\)"),
    ],
)
def test_a_changed_default_of_pytorch_is_found(name: str, seen: str) -> None:
    report = checked(spec(f"bad_effects:{name}"), episodes=1)
    assert ids(report) == {"changes-torch"}, [finding.seen for finding in report.findings]
    assert re.search(seen, report.findings[0].seen)


@pytest.mark.parametrize("name", SECOND)
def test_a_second_process_shows_this(name: str) -> None:
    report = checked(spec(name), elsewhere=True, episodes=2)
    assert ids(report) == {SECOND[name]}, [finding.seen for finding in report.findings]


def test_a_file_that_can_be_loaded_only_once_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "locks.py"
    file.write_text("import os\n\nos.mkdir(__file__ + '.lock')\n" + (BROKEN / "bad_subtle.py").read_text().partition("annotations\n")[2])
    assert ids(checked(f"{file}:Sums", elsewhere=True, episodes=2)) == {"loads-only-here"}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found(name: str) -> None:
    report = checked(spec(name))
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    assert report.skipped == []


def test_an_environment_that_cannot_be_copied_is_not_blamed() -> None:
    report = checked(spec("bad_snapshot:SaysItCannot"), episodes=1)
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    (skipped,) = report.skipped
    assert skipped.startswith("snapshots: bad_snapshot.py: SaysItCannot.snapshot raised RuntimeError: a connection is open")
    assert "\n" not in skipped


@pytest.mark.parametrize("name", NOTES)
def test_only_a_note(name: str) -> None:
    report = checked(spec(name))
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    assert NOTES[name] in ids(report, Severity.NOTE)


@pytest.mark.parametrize("name", LOST)
def test_what_hangs_or_crashes_is_found_in_time(name: str) -> None:
    report = checked(spec(name), timeout_s=0.3, budget_s=SHORT.get(name, 3.0))
    assert ids(report) == {LOST[name]}, [finding.seen for finding in report.findings]
    assert report.seconds < 20


def test_a_step_that_is_too_slow_for_so_many_episodes() -> None:
    assert ids(checked(spec("bad_speed:SlowStep"), concurrency=2048, budget_s=4.0)) == {"slow-calls"}


def test_notes_on_what_cannot_be_learned_from_chance() -> None:
    assert ids(checked(spec("bad_learning:NoLabels")), Severity.NOTE) == {"reward-unseen"}
    assert ids(checked(str(ENVS / "calculator.py")), Severity.NOTE) == {"flat-groups"}


def test_a_share_of_few_tasks_is_no_finding() -> None:
    report = checked(str(ENVS / "calculator.py"), episodes=1)
    assert "flat-groups" not in ids(report, Severity.NOTE)
    seen = next(finding.seen for finding in checked(str(ENVS / "calculator.py")).findings if finding.id == "flat-groups")
    assert seen == "100% of 4 tasks"


def test_an_episode_that_never_ends_is_an_error() -> None:
    assert ids(checked(spec("bad_learning:NeverEnds"), budget_s=10.0), Severity.ERROR) == {"never-ends"}
    assert ids(checked(spec("bad_learning:HasALimit"), budget_s=10.0), Severity.ERROR) == set()


def test_a_note_on_rewards_above_one_without_a_score() -> None:
    assert "score-clipped" in ids(checked(spec("bad_learning:RewardsFive")), Severity.NOTE)


def test_messages_that_the_chat_template_refuses(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    template = model / "chat_template.jinja"
    template.write_text(
        "{% for message in messages %}{% if 'No. Again?' in message['content'] %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
        + template.read_text()
    )
    report = checked(spec("bad_text:AnswersAsTool"), model=str(model))
    assert ids(report) == {"template-refuses"}, [finding.seen for finding in report.findings]
    assert ids(checked(spec("bad_text:AnswersAsTool"))) == set()

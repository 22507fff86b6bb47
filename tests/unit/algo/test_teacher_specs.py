"""Forms of --teacher, and what does not go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.algo.teacher_specs import TeacherSpec, learner_teacher, served_teachers, teacher_of, teacher_specs, with_absolute_folders
from agentrl.config.places import with_absolute_paths
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config


def test_the_forms_of_a_teacher() -> None:
    url = "https://host:8000/v1/#model=big%20one&tokenizer=org/name"
    assert teacher_specs("") == ()
    assert teacher_specs("org/name") == (TeacherSpec(kind="learner", where="org/name"),)
    assert teacher_specs("engine:org/name") == (TeacherSpec(kind="engine", where="org/name"),)
    endpoint = TeacherSpec(kind="endpoint", where="https://host:8000/v1", options={"model": "big one", "tokenizer": "org/name"})
    assert teacher_specs(url) == (endpoint,)
    math, code = teacher_specs(f"math=engine:a, code={url}")
    assert (math.name, math.kind, code.name, code.kind) == ("math", "engine", "code", "endpoint")
    assert (endpoint.tokenizer, teacher_specs("http://h/v1#model=m")[0].tokenizer, math.tokenizer) == ("org/name", "", "a")
    assert (learner_teacher("a/b"), learner_teacher("engine:a"), served_teachers("a/b")) == ("a/b", "", ())
    assert [spec.where for spec in served_teachers("math=engine:a,code=engine:b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine:a,engine:b", "does not say which tasks"),
        ("x=engine:a,x=engine:b", "does not say which tasks"),
        ("x=engine:a,org/name", "does not say which tasks"),
        ("http://host/v1", "with the name of its model"),
        ("http://host/v1#model=m&other=1", "with the name of its model"),
        ("engine:", "names no model"),
        ("self,x=engine:a", "does not say which tasks"),
        ("x=engine:a,y=self", "does not say which tasks"),
        ("engine:./nowhere", "is not a directory"),
        ("./nowhere", "is not a directory"),
    ],
)
def test_other_forms_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--teacher.*{problem}"):
        teacher_specs(text)


def test_folders_of_teachers_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").mkdir()
    (tmp_path / "template.txt").write_text("{prompt} {label}")
    assert with_absolute_folders("big") == str(tmp_path / "big")
    text = "math=engine:./big, code=http://h/v1#model=big,art=engine:org/name"
    assert with_absolute_folders(text) == f"math=engine:{tmp_path / 'big'},code=http://h/v1#model=big,art=engine:org/name"
    config = load_config(["--agent", "module:Name", "--teacher", "self", "--teacher-template", "template.txt"])
    found = with_absolute_paths(config).algo
    assert (found.teacher, found.teacher_template) == ("self", str(tmp_path / "template.txt"))
    own = ["--agent", "module:Name", "--teacher", "self", "--teacher-template", "template.txt", "--teacher-loss", "forward"]
    assert load_config([*own, "--teacher-top-k", "50", "--temperature", "0.7"]).algo.teacher_top_k == 50


def test_the_teacher_of_a_task() -> None:
    assert [teacher_of([""], "any"), teacher_of(["a", "b"], "b"), teacher_of(["a", "b"], "c"), teacher_of(["a"], "")] == [0, 1, None, None]


SERVED = ["--teacher", "engine:org/name"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--teacher-loss", "forward"], "--teacher-loss.*no effect without a teacher"),
        (["--teacher-top-k", "5"], "--teacher-top-k.*no effect without a teacher"),
        (["--teacher-by", "kind"], "--teacher-by.*no effect without a teacher"),
        ([*SERVED, "--teacher-top-k", "5"], "--teacher-top-k.*no effect on sampled tokens"),
        ([*SERVED, "--temperature", "0.7"], "--temperature.*at temperature 1"),
        ([*SERVED, "--old-logprobs", "interpolated", "--mini-batches", "2"], "--old-logprobs = 'interpolated'.*too late"),
        (["--teacher", "engine:"], "--teacher.*names no model"),
        (["--teacher", "self"], "--teacher.*nothing to read that the policy does not.*--teacher-template FILE"),
        (["--teacher", "org/name", "--teacher-template", "README.md"], "--teacher.*takes no --teacher-template"),
        ([*SERVED, "--teacher-template", "README.md"], "--teacher-template.*is for --teacher self"),
        (["--teacher-template", "README.md"], "--teacher-template.*no effect without a teacher"),
        (["--teacher", "self", "--teacher-template", "no.txt"], "--teacher-template.*cannot be read"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(args: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(["--agent", "module:Name", *args])


@pytest.mark.parametrize(
    "args",
    [
        ["--temperature", "0.7", "--teacher", "org/name"],
        [*SERVED, "--teacher-loss", "forward", "--teacher-top-k", "5", "--mini-batches", "2", "--old-logprobs", "interpolated"],
        [*SERVED, "--teacher-loss", "forward", "--learner-tensor-parallel", "2", "--num-learners", "2"],
        ["--teacher", "org/name", "--teacher-loss", "reverse", "--sequence-parallel", "2", "--num-learners", "2"],
        ["--teacher", "org/name", "--learner-tensor-parallel", "2", "--num-learners", "2"],
    ],
)
def test_what_goes_with_a_teacher_is_taken(args: list[str]) -> None:
    assert load_config(["--agent", "module:Name", *args]).algo.teacher.endswith("org/name")

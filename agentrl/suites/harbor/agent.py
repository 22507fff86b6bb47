"""Task folders of Harbor: as environments of a program of this machine, ``--agent 'harbor:FOLDER#agent=CMD {prompt}'``, and the other ways.

Without ``#agent`` there are containers. With it there are none: the program, and then ``tests/test.sh``, run in the sandbox of the episode,
in its folder and with the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import string
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

from agentrl.core.errors import EnvError, EnvLoadError
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.sandbox.files import copy_beneath, make_beneath, remove_beneath
from agentrl.env.sandbox.spec import current_choice
from agentrl.suites.command import CommandAgent, check_end, command_words, files_of
from agentrl.suites.harbor.env import COMMAND_S, HarborEnv
from agentrl.suites.harbor.folders import FOLDER, ContainerTasks
from agentrl.suites.harbor.own import PYTHON, HarborOwnAgent, own_members
from agentrl.suites.harbor.tasks import (
    DOCKERFILE,
    REWARDS,
    TEST,
    TESTS,
    VERIFIER,
    HarborTask,
    copy_step,
    copy_tests,
    read_rewards,
    read_task,
    resolved,
    task_folders,
    with_paths,
)
from agentrl.suites.harbor.trial import Trial, judged
from agentrl.suites.harness import InstalledHarness, find_harness
from agentrl.suites.scheme import FLAG, Programs, Scheme
from agentrl.suites.specs import class_name, split_spec


class HarborProgram(ContainerTasks, BlackBoxAgent):
    """One trial: a program of the table works in the task's container until it ends or its time is over; the task's tests judge.

    Attributes:
        installed: The program.
        process_limits: Those of the run, of which the names of variables that are passed hold.
    """

    installed: ClassVar[InstalledHarness]
    process_limits = ProcessLimits()

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Run the program and the tests.

        Raises:
            EnvError: If the program fails, or the tests do not end or give no reward.
            SandboxError: If a container does not start, or its memory or disk is used up.
        """
        read = await asyncio.to_thread(self.read_task, str(task.metadata[FOLDER]))
        passed = {name: os.environ[name] for name in self.process_limits.passed if name in os.environ}
        network = self.network or current_choice().network == "all"
        async with Trial(read, network=network, installed=self.installed) as trial:
            ended = await trial.act(task, llm, passed)
            # A program that is ended by its time has an exit code that says nothing; what it has done is judged.
            if ended.ended != "timeout":
                check_end((self.installed.path,), ended, self.process_limits)
            rewards = await trial.verify()
        return judged(rewards, self.rewarded, task.id, truncated=ended.ended == "timeout")


AGENT, HARNESS, OWN = "#agent=", "#harness=", "?python="
"""Words before a program of this machine, before one of the table, and before an interpreter with Harbor itself."""
FORM = "Write harbor:FOLDER#agent=CMD {prompt}, where FOLDER is a task or holds tasks."
RUNS = ("refuse", "shell", "skip")
"""Treatments of the commands of a Dockerfile; the first is the default."""
FORMS = {
    AGENT: f"There is run={'|'.join(RUNS)} and reward=NAME.",
    HARNESS: "Write harbor:FOLDER[?network=True&reward=NAME]#harness=NAME[?brief=True&dialect=chat&program=PATH].",
    "": "There is network=True, command_s=SECONDS and reward=NAME; run= needs #agent=CMD.",
    OWN: "With python=INTERPRETER there is agent=NAME, environment=podman|docker and reward=NAME.",
}
"""Options by what works on the tasks."""


class HarborAgent(CommandAgent):
    """One trial: the program works in the folder of the task until it ends, and the task's tests write the reward.

    Attributes:
        folders: Folders of the tasks.
        runs: What is done with the commands of Dockerfiles, one of `RUNS`.
        rewarded: Name of the reward, for tests that write several.
        spec: What ``--agent`` said, for messages.
    """

    folders: ClassVar[tuple[str, ...]] = ()
    runs: ClassVar[str] = RUNS[0]
    rewarded: ClassVar[str] = ""
    spec: ClassVar[str] = ""

    _trial: HarborTask
    _is_late = False

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per folder; the prompt is its instruction, in which paths are relative to the working folder."""
        read = [read_task(cls.spec, Path(folder)) for folder in cls.folders]
        if cls.runs == "refuse" and (found := next((task for task in read if task.has_commands), None)):
            problem = f"{found.folder.name}/{DOCKERFILE} runs commands, and no image is built here"
            remedy = "Write harbor:FOLDER?run=shell to run them in each episode, or ?run=skip if this machine has what they install."
            raise EnvLoadError(FLAG, cls.spec, problem, remedy)
        return [Task(task.shown(), id=task.folder.name, metadata={FOLDER: str(task.folder)}) for task in read]

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Run the program and the tests; `EnvError` if the program fails or the tests give no reward."""
        self._trial = await asyncio.to_thread(read_task, self.spec, Path(str(task.metadata[FOLDER])))
        return await super().run(task, llm)

    async def _prepare(self, task: Task, folder: Path) -> Path:
        trial, work = self._trial, folder / self._trial.workdir.strip("/")
        for step in trial.steps:
            place = folder / step.folder.strip("/")
            await asyncio.to_thread(place.mkdir, parents=True, exist_ok=True)
            if step.sources:
                await asyncio.to_thread(copy_step, step, folder)
            elif self.runs == "shell":
                await self._run(["sh", "-c", with_paths(step.command, self._paths(folder))], place, self._variables(folder))
        for name in (work, folder / "logs" / "agent", folder / VERIFIER.strip("/")):
            await asyncio.to_thread(name.mkdir, parents=True, exist_ok=True)
        return work

    async def _act(self, task: Task, llm: ModelEndpoint, work: Path) -> str:
        """Run the program for as long as the task allows; what it has done by then is judged."""
        try:
            async with asyncio.timeout(self._trial.agent_timeout_s):
                llm, network = self._reached(llm)
                variables = {**self._variables(self._folder), **llm.env(), "HOME": str(self._folder / "home")}
                return await self._run(self._words(task, llm, work), work, variables, read=files_of(self.command), network=network)
        except TimeoutError:
            self._is_late = True
            return ""

    async def _judge(self, task: Task, work: Path, output: str) -> StepResult:
        root, trial = self._folder, self._trial
        await asyncio.to_thread(self._lay_out, work)
        variables = {**self._variables(root), **resolved(trial.verifier_env, os.environ), "HOME": str(root / "home")}
        try:
            async with asyncio.timeout(trial.verifier_timeout_s):
                printed = await self._run(["bash", str(root / TEST)], work, variables, may_fail=True)
        except TimeoutError:
            raise EnvError(
                f"{trial.folder.name}/{TEST} did not end within {trial.verifier_timeout_s:g} s ([verifier] timeout_sec)"
            ) from None
        rewards = read_rewards(await self._reward_files(), printed)
        return judged(rewards, self.rewarded, trial.folder.name, truncated=self._is_late)

    def _lay_out(self, work: Path) -> None:
        """Bring in the tests, and empty the folder of rewards; whatever the agent has put in their places, also a link, is removed."""
        root, tests = self._folder, TESTS.strip("/")
        # Beside the folder of the episode, where its programs do not get.
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
            copy_tests(self._trial, Path(scratch, "tests"), self._paths(root))
            copy_beneath(root, tests, Path(scratch, "tests"))
        for folder in (VERIFIER.strip("/"), str(work.relative_to(root))):
            make_beneath(root, folder)
        remove_beneath(root, VERIFIER.strip("/"))
        make_beneath(root, VERIFIER.strip("/"))

    async def _reward_files(self) -> dict[str, str]:
        files = {}
        for name in REWARDS:
            with contextlib.suppress(FileNotFoundError):
                files[name] = (await self._sandbox.read(f"{VERIFIER.strip('/')}/{name}")).decode(errors="replace")
        return files

    def _paths(self, root: Path) -> dict[str, str]:
        return {place: str(root / place.strip("/")) for place in self._trial.places}

    def _variables(self, root: Path) -> dict[str, str]:
        """Variables of the container, which may use those of this machine."""
        values: dict[str, str] = {}
        for name, value in self._trial.env.items():
            known = {"PATH": os.environ.get("PATH", ""), **values}
            values[name] = with_paths(string.Template(value).safe_substitute(known), self._paths(root))
        return values


_BASES: Mapping[str, type[Any]] = {AGENT: HarborAgent, HARNESS: HarborProgram, OWN: HarborOwnAgent, "": HarborEnv}


def load_harbor(spec: str) -> type[HarborAgent] | type[HarborEnv] | type[HarborProgram] | type[HarborOwnAgent]:
    """Return the class for one of the forms of `FORMS`."""
    place, way, rest = _parted(spec)
    name, options = split_spec(place)
    way = OWN if not way and PYTHON in options else way
    folder = Path(name).expanduser().absolute()
    members: dict[str, Any] = {"rewarded": str(options.pop("reward", "")), "__module__": __name__, "__doc__": f"Tasks of {folder}."}
    _, query, asked = place.partition("?")
    whole, base = f"harbor:{folder}{query}{asked}", _BASES[way]
    if way == AGENT:
        runs, words = str(options.pop("run", RUNS[0])), command_words(spec, rest, FORM)
        whole += f"{AGENT}{shlex.join(words)}"
        members |= {"command": words, "runs": runs}
        if runs not in RUNS:
            raise EnvLoadError(FLAG, spec, f"run = {runs!r} is unknown", f"Choose {', '.join(RUNS)}.")
    elif way == OWN:
        own = own_members(spec, options)
        members |= own
        whole = f"harbor:{folder}?{urlencode({**own, 'reward': members['rewarded']}, safe='/:')}"
    else:
        members["network"] = bool(options.pop("network", False))
    if way == HARNESS:
        program, installed = find_harness(spec, rest, FORMS[HARNESS])
        whole += f"{HARNESS}{program}?{installed.options}"
        members["installed"] = installed
    if not way:
        members["command_s"] = float(options.pop("command_s", COMMAND_S))
    if options:
        raise EnvLoadError(FLAG, spec, f"there is no option {next(iter(options))!r}", FORMS[way])
    members |= {"folders": tuple(str(path) for path in task_folders(spec, folder)), "spec": whole, "agent_spec": whole}
    return type(class_name(folder.name, "Harbor"), (base,), members)


def _parted(spec: str) -> tuple[str, str, str]:
    """Return a specification up to what works on the tasks, the word for that, empty for our own turns, and what follows the word."""
    for word in (AGENT, HARNESS):
        place, found, rest = spec.partition(word)
        if found:
            return place, word, rest
    return spec, "", ""


def _programs(spec: str) -> Programs:
    """A program of this machine works in a sandbox of the run's kind, everything else in containers, an agent program among it."""
    return Programs() if AGENT in spec else Programs(needs_container=True, calls_model=HARNESS in spec)


HARBOR = Scheme(
    name="harbor",
    load=load_harbor,
    programs=_programs,
    form="harbor:FOLDER",
    about="tasks in the form of [Harbor](https://harborframework.com/docs/tasks), in containers ([below](#harbor)), also with an "
    "[agent program](#harbor-with-an-agent-program), or [without containers](#harbor-without-containers)",
    needs="podman or docker; without containers bubblewrap",
)

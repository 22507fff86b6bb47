"""``--agent command:'CMD {prompt}#judge=CMD'``: a program as a black-box agent, in a process and a working folder of its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from agentrl.core.errors import EnvError, EnvLoadError, EnvResultError
from agentrl.core.process import LOOPBACK
from agentrl.core.types import Task
from agentrl.env.agent import AgentClass, SamplingParams, StepResult
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.env.boundary import EnvLimits, EnvSession
from agentrl.env.isolation.system import ProcessLimits, child_environment, describe_end
from agentrl.env.sandbox.files import make_beneath
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import ExecResult, SandboxSpec, current_choice
from agentrl.env.states import make_step_state
from agentrl.env.threads import Threads
from agentrl.suites.load import load_agent
from agentrl.suites.scheme import FLAG, JUDGE, REWARD, Scheme, in_sandbox

OPTIONS = ("judge", "reward", "files")
FORM = "Write command:'CMD {prompt}#judge=CMD' or command:'CMD {prompt}#reward=file.py', and #files=FOLDER for files to begin with."
FIELDS = ("prompt", "task_id", "folder", "model", "base_url", "anthropic_base_url", "api_key")
MAX_OUTPUT = 2**20
"""Bytes of a program's output that are kept, its last."""
SHOWN = 2000
DISK_MIB = 8192
"""Size of the folder of an episode, MiB."""


class CommandAgent(BlackBoxAgent):
    """One run of a program; its class says which, and who judges it."""

    command: ClassVar[tuple[str, ...]] = ()
    judge: ClassVar[tuple[str, ...]] = ()  # judges the working folder: the last line that it prints is the reward
    reward: ClassVar[AgentClass | None] = None  # judges what the program printed, as the environment of a reward function
    files: ClassVar[str] = ""  # folder whose content the working folder begins with
    keeps_home: ClassVar[bool] = False  # the program sees the user's folder; else its own, an empty one
    makes_sandboxes: ClassVar[bool] = False  # the program is trusted, and puts what is not into sandboxes of its own
    process_limits = ProcessLimits()  # those of the run replace it

    _sandbox: Sandbox  # of the episode
    _folder: Path  # of the sandbox, with the working folder in it

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Run the program to its end, and have it judged; `EnvError` if it fails."""
        async with Sandbox(self._spec()) as self._sandbox:
            self._folder = self._sandbox.folder
            (self._folder / "home").mkdir()
            work = await self._prepare(task, self._folder)
            return await self._judge(task, work, await self._act(task, llm, work))

    def _spec(self) -> SandboxSpec:
        limits = self.process_limits
        return SandboxSpec(
            kind="none" if self.makes_sandboxes else None,
            memory_mib=limits.memory_mib,
            cpu_s=limits.cpu_s,
            processes=limits.processes,
            open_files=limits.open_files,
            file_mib=limits.file_mib,
            disk_mib=DISK_MIB,
        )

    async def _prepare(self, task: Task, folder: Path) -> Path:
        """Fill the working folder, which is below the folder of the episode, and return it."""
        work = folder / "work"
        if self.files:
            # The history of a repository may hold the solution.
            await asyncio.to_thread(shutil.copytree, self.files, work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        work.mkdir(exist_ok=True)
        return work

    async def _act(self, task: Task, llm: ModelEndpoint, work: Path) -> str:
        """Run the program to its end, and return what it printed."""
        llm, network = self._reached(llm)
        words = self._words(task, llm, work)
        return await self._run(words, work, {**llm.env(), **self._own_places()}, read=files_of(self.command), network=network)

    def _own_places(self) -> dict[str, str]:
        """Variables for folders that are the program's own; temporary files of one that is killed are removed with its sandbox."""
        home = str(Path.home() if self.keeps_home else self._folder / "home")
        return {"HOME": home, **({"TMPDIR": tempfile.mkdtemp(dir=self._folder)} if self.makes_sandboxes else {})}

    def _reached(self, llm: ModelEndpoint) -> tuple[ModelEndpoint, bool | str]:
        """Return the endpoint as the program finds it, and the network that the program is given."""
        return (llm, True) if self._sandbox.kind == "none" or current_choice().network == "all" else as_only_address(llm)

    def _words(self, task: Task, llm: ModelEndpoint, work: Path) -> list[str]:
        values = values_of(task, llm, work)
        return [filled(word, values) for word in self.command]

    async def _judge(self, task: Task, work: Path, output: str) -> StepResult:
        if self.reward is not None:
            return await self._reward(self.reward, task, output)
        # What stands there now may be a link, which only the judge's own sandbox may follow.
        await asyncio.to_thread(make_beneath, self._folder, str(work.relative_to(self._folder)))
        label = task.label if isinstance(task.label, str) else json.dumps(task.label, default=str)
        home = Path(tempfile.mkdtemp(dir=self._folder))  # a new one: Python runs files that a program leaves in its home
        variables = {"AGENTRL_LABEL": label, "AGENTRL_TASK_ID": task.id, "HOME": str(home)}
        verdict = await self._run(list(self.judge), work, variables, read=files_of(self.judge), network=False)
        last = (verdict.strip().splitlines() or [""])[-1]
        try:
            reward = float(last)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise EnvResultError(
                f"{shlex.join(self.judge)}: the last line that it printed is {last[:80]!r}; it must be the reward, a number"
            )
        return StepResult(reward)

    async def _reward(self, cls: AgentClass, task: Task, output: str) -> StepResult:
        threads = Threads(1)
        session = EnvSession(cls, shlex.join(self.command), threads, EnvLimits(sandbox=current_choice()))
        prompt = task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt)
        state = make_step_state(
            task=task,
            agent="",
            turn=0,
            turns_left=0,
            observation_text=prompt,
            action_text=output,
            finish_reason="stop",
            sampling_params=SamplingParams(),
        )
        try:
            await session.reset(task, 0)
            result = await session.step(state)
            return StepResult(result.reward, score=result.score, info=result.info, reward_parts=result.reward_parts)
        finally:
            await session.close()
            threads.close()

    def _passed(self) -> dict[str, str]:
        """Variables of this process that its programs are given; in a container those of its image take the place of most."""
        passed = self.process_limits.passed
        if self._sandbox.kind == "container":
            return {name: os.environ[name] for name in passed if name in os.environ}
        return child_environment(os.environ, passed)

    async def _run(
        self,
        words: list[str],
        work: Path,
        variables: dict[str, str],
        *,
        may_fail: bool = False,
        read: Sequence[str] = (),
        network: bool | str = True,
    ) -> str:
        """Run a program to its end and return what it printed; nothing that it started is left. `EnvError` if it fails and must not."""
        limits = self.process_limits
        environment = {**self._passed(), **variables, "PWD": str(work)}
        # Without a limit of its own: at the deadline of the episode it is cancelled.
        ended = await self._sandbox.exec(
            *words, timeout_s=math.inf, env=environment, cwd=work, read=read, network=network, output=MAX_OUTPUT, keep="last"
        )
        ended.check()
        if not may_fail:
            check_end(words, ended, limits)
        return ended.output


def as_only_address(llm: ModelEndpoint) -> tuple[ModelEndpoint, str]:
    """Return the endpoint as a program finds it that reaches nothing else, and the ``HOST:PORT`` for `Sandbox.exec`."""
    address = urlsplit(llm.root)
    inside = address._replace(netloc=f"{LOOPBACK}:{address.port}").geturl()
    return replace(llm, root=inside), f"{address.hostname}:{address.port}"


def check_end(words: Sequence[str], ended: ExecResult, limits: ProcessLimits) -> None:
    """Raise `EnvError` with what a program printed last, if it ended with another code than 0."""
    if ended.code:
        told = f" It printed last:\n{ended.output[-SHOWN:]}" if ended.output else ""
        raise EnvError(f"{shlex.join(words)[:SHOWN]}: {describe_end(ended.code, limits)}.{told}")


def values_of(task: Task, llm: ModelEndpoint, work: Path) -> dict[str, str]:
    """Return what the names of `FIELDS` stand for in an episode."""
    text = task.prompt if isinstance(task.prompt, str) else "\n\n".join(str(message["content"]) for message in task.prompt)
    addresses = (llm.model, llm.base_url, llm.anthropic_base_url, llm.api_key)
    return dict(zip(FIELDS, (text, task.id, str(work), *addresses), strict=True))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values in place of their names in braces; other braces stay."""
    # All in one pass, so that braces in a value, such as a prompt, are not filled again.
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def files_of(words: Sequence[str]) -> list[str]:
    """Return the words of a program that are files, which it has to see."""
    return [word for word in words if Path(word).is_absolute() and Path(word).is_file()]


def load_command(spec: str) -> type[CommandAgent]:
    """Return the agent that ``command:CMD#judge=CMD`` or ``command:CMD#reward=file.py`` names."""
    command, options = split_options(spec)
    words = command_words(spec, command, FORM)
    if ("judge" in options) == ("reward" in options):
        raise EnvLoadError(FLAG, spec, "needs either a judge or a reward", FORM)
    members, rest = judged_members(spec, options, FORM)
    members |= {"command": words, "agent_spec": f"command:{shlex.join(words)}{rest}", "__doc__": command}
    return type("".join(part.capitalize() for part in re.findall(r"\w+", Path(words[0]).stem)) or "Command", (CommandAgent,), members)


def split_options(spec: str) -> tuple[str, dict[str, str]]:
    """Return what stands between the scheme and the first of `OPTIONS`, and the options by name."""
    # Only before an option, as a command may have the sign itself.
    first, *parts = re.split(rf"#(?={'|'.join(OPTIONS)}=)", spec.partition(":")[2])
    return first, dict(part.split("=", 1) for part in parts)


def judged_members(spec: str, options: Mapping[str, str], form: str) -> tuple[dict[str, Any], str]:
    """Return the members of a class that say who judges and which files are there, and the options with absolute paths, as text."""
    files = options.get("files", "")
    if files and not Path(files).is_dir():
        raise EnvLoadError(FLAG, spec, f"there is no folder {files!r}", form)
    members: dict[str, Any] = {"files": str(Path(files).absolute()) if files else ""}
    rest = f"#files={members['files']}" if files else ""
    if "judge" in options:
        members["judge"] = _words_of(spec, options["judge"], form)
        return members, f"{JUDGE}{shlex.join(members['judge'])}{rest}"
    if "reward" in options:
        found = load_agent(options["reward"])
        members["reward"] = found.load()
        return members, f"{REWARD}{found.spec}{rest}"
    return members, rest


def command_words(spec: str, command: str, form: str) -> tuple[str, ...]:
    """Return the words of a program; `EnvLoadError` with the right form if there is none, or if it is not told its task."""
    words = _words_of(spec, command, form)
    if not any("{prompt}" in word or "{task_id}" in word for word in words):
        raise EnvLoadError(FLAG, spec, "the program is not told its task", "Put {prompt} where the task belongs; no quotes are needed.")
    return words


def _words_of(spec: str, command: str, form: str) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EnvLoadError(FLAG, spec, f"{command!r} cannot be split into words: {error}", form) from error
    if not words or shutil.which(words[0]) is None:
        raise EnvLoadError(FLAG, spec, f"there is no program {(words or [''])[0]!r}", form)
    return tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in words)


COMMAND = Scheme(
    name="command",
    load=load_command,
    programs=in_sandbox,
    takes_reward=True,
    form="command:CMD {prompt}#judge=CMD",
    about="[a program on the command line](black_box.md#a-program-on-the-command-line) that calls a model",
    needs="bubblewrap, or podman or docker",
)

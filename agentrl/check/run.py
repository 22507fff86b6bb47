"""All checks of one environment, in a process that may be lost to it; a supervisor reads what is found so far."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.assets import CHOSEN_VISION, VISION_MODEL
from agentrl.check.black_box import check_black_box
from agentrl.check.context import Context
from agentrl.check.determinism import check_determinism, random_states, seed_globals
from agentrl.check.elsewhere import answer, check_elsewhere
from agentrl.check.findings import NO_TIME, CheckSettings, Report
from agentrl.check.forking import check_forks
from agentrl.check.harness import check_harness
from agentrl.check.learning import check_learning
from agentrl.check.memory import check_memory, limit_memory
from agentrl.check.pictures import check_pictures
from agentrl.check.play import make_player
from agentrl.check.probe import Effects, Unanswered, Watch, importing, watch_background, watch_tasks
from agentrl.check.resources import check_resources, running_processes
from agentrl.check.results import play_standard, rehearse
from agentrl.check.speed import check_speed
from agentrl.check.supervise import GIVEN
from agentrl.check.tasks import read_tasks
from agentrl.check.text import check_leaks, check_text
from agentrl.check.tokenizer import load_codec
from agentrl.check.witness import Witness
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, EnvError
from agentrl.core.types import Task
from agentrl.env.agent_spec import AgentKind, AgentSpec, preload
from agentrl.env.isolation import launcher
from agentrl.env.isolation.guardian import stand_by
from agentrl.rollout.chat import ChatCodec
from agentrl.suites.harness import HarnessAgent
from agentrl.suites.load import check_servers, load_agent
from agentrl.track.jsonl import read_lines

SHARE = 0.7
"""Share of the time that solutions may take."""
EXACT = 1e-6


async def check_solutions(context: Context) -> None:
    """Try the solution of each task, and an agent that does nothing, if the environment can: a class method ``try_solution``."""
    attempt = getattr(context.cls, "try_solution", None)
    if attempt is None:
        return
    for number, task in enumerate(context.tasks):
        if number and context.left(SHARE) <= 0:
            context.report.skipped.append(f"the solutions of {len(context.tasks) - number} tasks: {NO_TIME}")
            return
        for solved, rule, wanted in ((True, "solution-fails", 1.0), (False, "nothing-earns", 0.0)):
            try:
                reward = await attempt(task, solved=solved)
                seen = f"the reward is {reward:g}" if abs(reward - wanted) > EXACT else ""
            except EnvError as error:
                seen = str(error)
            if seen:
                context.found(rule, "try_solution", f"task {task.id}: {seen}")


POLL_S = 0.1
HOLD_GRACE_S = 1.0
OURS = ("agentrl/env", "agentrl/suites")
"""Parts of paths of files that call user code."""

Emit = Callable[[str, Report], None]
"""Gets the phase that comes next, ``done`` at the end, and the report so far."""


def run_checks(
    settings: CheckSettings, codec: ChatCodec, recorded: Mapping[str, Sequence[str]], emit: Emit, status_fd: int, command: Sequence[str]
) -> None:
    """Check one environment; `emit` is called before every phase and at the end, `command` starts the second process.

    Raises:
        ConfigError: If the environment cannot be loaded, or has no tasks and no ``--prompts`` is given.
    """
    logging.getLogger("agentrl.env.boundary").setLevel(logging.ERROR)  # what it warns of is reported
    started = time.monotonic()
    report, watch, witness = Report(), Watch(status_fd), Witness()
    emit("load", report)
    with _Watchdog(watch, report, settings, emit):
        limit_memory(settings.check.memory_mib)
        with watch.holding("import"), importing(report, _import_of(settings.env), witness):
            spec = load_agent(settings.env)
            spec.load()
        asked, (settings, codec) = settings, _fitting(settings, codec, spec)
        with watch.holding("import"):
            check_servers(spec, settings.sandbox.mcp)
            preload(spec, ("preload",))
        cls = preload(spec, ("prepare",))
        report.env = {"spec": settings.env, "name": spec.name, "source": os.path.basename(spec.source), "tasks": None}
        if settings is not asked:
            report.env["model"] = CHOSEN_VISION
        player = make_player(settings, spec, codec, watch)
        context = Context(settings, spec, cls, player, report, watch, started, recorded, after_import=random_states())
        watch_background(report, context.where)
        is_harness = issubclass(cls, HarnessAgent)
        if is_harness:
            report.env["tasks"] = 0  # unless some are given
            emit("sessions", report)
            asyncio.new_event_loop().run_until_complete(check_harness(context))
        emit("tasks", report)
        if settings.data.prompts or not is_harness:
            read_tasks(context)
        if spec.kind is AgentKind.BLACK_BOX and (context.tasks or not is_harness):
            emit("solutions", report)
            asyncio.new_event_loop().run_until_complete(check_solutions(context))
            emit("run", report)
            asyncio.new_event_loop().run_until_complete(check_black_box(context))
        elif spec.kind is AgentKind.EXECUTOR:
            report.skipped.append("everything but the tasks: the executor calls the model itself, so there is nothing to play")
        elif context.tasks:
            asyncio.new_event_loop().run_until_complete(
                _play(context, emit, command, witness)
            )  # not closed: that would wait for threads that hang
    report.seconds = time.monotonic() - started
    emit("done", report)
    _end_children()


def run_rehearsal(settings: CheckSettings, task: Task, codec: ChatCodec, emit: Emit, status_fd: int) -> None:
    """Play one episode of a task, and report what is wrong with it; the phases are those of `run_checks`."""
    started = time.monotonic()
    report, watch, witness = Report(), Watch(status_fd), Witness()
    with _Watchdog(watch, report, settings, emit):
        with watch.holding("import"):
            with importing(report, _import_of(settings.env), witness):
                spec = load_agent(settings.env)
            report.env = {"spec": settings.env, "name": spec.name, "source": os.path.basename(spec.source), "tasks": None}
            emit("preload", report)
            check_servers(spec, settings.sandbox.mcp)
            preload(spec, ("preload",))
        cls = preload(spec, ("prepare",))
        emit("one episode", report)
        context = Context(settings, spec, cls, make_player(settings, spec, codec, watch), report, watch, started)
        watch.effects = Effects(report, context.where, witness)
        asyncio.new_event_loop().run_until_complete(rehearse(context, task))
    emit("done", report)
    _end_children()


def _fitting(settings: CheckSettings, codec: ChatCodec, spec: AgentSpec) -> tuple[CheckSettings, ChatCodec]:
    """Return settings and codec of the bundled model that reads what the environment shows, where no model is named."""
    if not settings.chooses_model or not spec.shows_images:
        return settings, codec
    fitting = changed(settings, model=VISION_MODEL)
    return fitting, load_codec(fitting)


def _import_of(env: str) -> str:
    file = os.path.basename(env.partition(".py:")[0])
    return f"{file if file.endswith('.py') else file + '.py'}: import"


async def _play(context: Context, emit: Emit, command: Sequence[str], witness: Witness) -> None:
    settings, report = context.settings, context.report
    seed_globals(settings.run.seed)
    context.watch.effects = effects = Effects(report, context.where, witness)
    watch_tasks(asyncio.get_running_loop(), report, context.where)
    # Later phases rely on earlier ones: they repeat episodes of the policies, and are left out where a finding explains them.
    phases: dict[str, Callable[[Context], Awaitable[None] | None]] = {
        "solutions": check_solutions,
        "policies": play_standard,
        "resources": check_resources,
        "memory": check_memory,
        "determinism": check_determinism,
        "snapshots": check_forks,
        "a second process": lambda context: check_elsewhere(context, command if settings.elsewhere else ()),
        "learning": check_learning,
        "pictures": check_pictures,
        "speed": check_speed,
        "text": check_text,
        "leaks": check_leaks,
    }
    for name, check in phases.items():
        emit(name, report)
        if name == "learning" and not report.has(
            "changes-modules", "changes-signals"
        ):  # hundreds of episodes; what they would do to the process is known by now
            context.watch.effects = None
        outcome = check(context)
        if outcome is not None:
            await outcome
        effects.restore_signals()
        if context.close_hangs:
            report.skipped.append("everything else: close does not return")
            break
    context.watch.effects = None
    for task in asyncio.all_tasks() - {asyncio.current_task()}:  # what the environment left behind
        task.cancel()


class _Watchdog:
    """Ends the process when user code holds the event loop for longer than a deadline, which nothing else could."""

    def __init__(self, watch: Watch, report: Report, settings: CheckSettings, emit: Emit) -> None:
        self._watch, self._report, self._settings, self._emit = watch, report, settings, emit
        self._over, self._parent = threading.Event(), os.getppid()
        # Named like the threads of the boundary, which the checks leave out when they count threads.
        self._thread = threading.Thread(target=self._look, name="agentrl-env", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=1)

    def _look(self) -> None:
        limit = self._settings.check.timeout_s + HOLD_GRACE_S
        while not self._over.wait(POLL_S):
            if os.getppid() != self._parent:  # the process that waits for the answer has ended
                _end_children()
                os._exit(1)
            holds = self._watch.holds
            if holds is None:
                continue
            method, since, thread = holds
            allowed = limit if method != "import" else max(limit, self._settings.check.budget_s / 2)
            if time.monotonic() - since > allowed:
                frame = sys._current_frames().get(thread)
                stack = traceback.extract_stack(frame) if frame else []
                lines = [line for line in stack if not any(part in line.filename for part in OURS)]
                place = f" at {os.path.basename(lines[-1].filename)}, line {lines[-1].lineno}" if lines else ""
                name = f"{self._report.env.get('source', '')}: {self._report.env.get('name', '')}.{method}"
                seen = f"{method} has not returned, nor let others run, for {time.monotonic() - since:.0f} s{place}"
                self._report.add("hangs", name, seen)
                self._report.skipped.append("everything after this")
                self._emit("done", self._report)
                _end_children()
                # No exception could interrupt the thread that user code blocks.
                os._exit(0)


def _end_children() -> None:
    for pid in running_processes():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def recorded_actions(path: str) -> dict[str, list[str]]:
    """Return the texts of the turns of each task's best episode in a run, named by its directory or its ``trajectories.jsonl``.

    Raises:
        ConfigError: If there is no such file, or it holds no episode.
    """
    file = Path(path) / "trajectories.jsonl" if Path(path).is_dir() else Path(path)
    try:
        records = read_lines(file)
    except (OSError, ValueError) as error:
        raise ConfigError("--recorded", path, f"cannot be read: {error}", "Name the directory of a run that recorded episodes.") from error
    best: dict[str, dict[str, Any]] = {}
    for record in records:
        task = str((record.get("task") or {}).get("id", ""))
        if record.get("reward") is not None and record.get("turns") and (task not in best or record["reward"] > best[task]["reward"]):
            best[task] = record
    if not best:
        raise ConfigError("--recorded", path, "holds no episode that ended well", "Record some with --record all.")
    return {task: [str(turn.get("text", "")) for turn in record["turns"]] for task, record in best.items()}


def main() -> int:
    """Read settings, check, write events; with two files as arguments, be the second process that plays some episodes again."""
    if GIVEN in os.environ:
        pickle.loads(Path(os.environ[GIVEN]).read_bytes())  # from now on `load_agent` knows it
    if len(sys.argv) == 3:
        answer(sys.argv[1], sys.argv[2])
        os._exit(0)
    settings, task = pickle.loads(sys.stdin.buffer.read())
    sys.stdin = Unanswered()
    # Processes that lose their parent become children of this one, so that `_end_children` finds them.
    with contextlib.suppress(OSError):
        launcher.adopt_orphans()
    status = os.open(os.environ.pop("AGENTRL_CHECK_STATUS"), os.O_CREAT | os.O_WRONLY)
    with open(os.environ.pop("AGENTRL_CHECK_EVENTS"), "a", encoding="utf-8") as events:

        def write(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        latest: list[Report] = []

        def emit(phase: str, report: Report) -> None:
            latest[:] = [report]
            write(phase=phase, report=report.to_dict())

        try:
            recorded = recorded_actions(settings.check.recorded) if settings.check.recorded else {}
            codec = load_codec(settings)
            if task is not None:
                run_rehearsal(settings, task, codec, emit, status)
            else:
                run_checks(settings, codec, _without_end(recorded, codec), emit, status, command=(sys.executable, "-m", __spec__.name))
        except ConfigError as error:
            write(phase="refused", field=error.field, value=str(error.value), problem=error.problem, remedy=error.remedy)
        # A bug of the check itself must not look like a crash of the environment, nor the reverse.
        except Exception as error:
            if _is_theirs(error, latest, settings):
                write(phase="done", report=latest[0].to_dict())
            else:
                write(phase="failed", error=traceback.format_exc(), report={"findings": []})
    os._exit(0)  # threads that the environment left behind must not keep it


def _is_theirs(error: Exception, latest: Sequence[Report], settings: CheckSettings) -> bool:
    """Note an exception that the environment caused outside of its own calls in the latest report; False if it is no work of its."""
    file = settings.env.partition(".py:")[0].removesuffix(".py") + ".py"
    lines = [line for line in traceback.extract_tb(error.__traceback__) if os.path.basename(line.filename) == os.path.basename(file)]
    full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if not latest or not (full or lines):
        return False
    where = f"{latest[0].env.get('source', '')}: {latest[0].env.get('name', '')}"
    if full:
        latest[0].add("leaks-files", f"{where}.close", f"the process can open no more files: {error}")
    else:
        seen = f"outside of a call, {type(error).__name__}: {error}, at {os.path.basename(lines[-1].filename)}, line {lines[-1].lineno}"
        latest[0].add("background-error", f"{where}.{lines[-1].name}", seen)
    latest[0].skipped.append("everything after this")
    return True


def _without_end(recorded: Mapping[str, Sequence[str]], codec: ChatCodec) -> dict[str, list[str]]:
    """Actions as `step` gets them: without the token that ended the turn."""
    ends = [codec.decode([token]) for token in codec.end_token_ids]

    def cut(text: str) -> str:
        return next((text.removesuffix(end) for end in ends if text.endswith(end)), text)

    return {task: list(map(cut, texts)) for task, texts in recorded.items()}


if __name__ == "__main__":
    stand_by(gently=False)
    sys.exit(main())

"""Edges of the runtime, where a recording begins: names of agentrl at which what a run decided reaches the object that uses it.

A change that moves one of these names changes this file, and nothing else of the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from tests.golden.machines import Machine
from tests.golden.ray_stub import stubbed_ray
from tests.golden.recording import Recorded, Recording
from tests.golden.standins import (
    BatchedScorer,
    Engine,
    EpisodeWorker,
    LearnerRank,
    Nothing,
    RewardModel,
    TeacherModel,
    recording_class,
)

METHODS = frozenset({"sft", "dpo", "kto", "orpo", "distill", "reward-model", "process-reward-model"})
"""Commands of supervised and preference training."""
FEW = 2
"""Tasks whose figures are computed."""
MADE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("pool", "agentrl.flow.pool", "RolloutPool", ()),
    ("pool.apart", "agentrl.flow.apart", "ApartPool", ()),
    ("learner.joint", "agentrl.flow.exports", "JointLearner", ()),
    ("learner.turns", "agentrl.flow.turns", "TimeSharedLearner", ()),
    ("sender", "agentrl.weights.sender", "SharedMemorySender", ("held",)),
    ("sender.adapter", "agentrl.weights.sender", "AdapterSender", ("held",)),
    ("sender.group", "agentrl.weights.cuda", "GroupSender", ()),
    ("evaluations", "agentrl.evaluation.evaluations", "Evaluations", ("tasks",)),
    ("evaluations.apart", "agentrl.evaluation.apart", "EvaluationsApart", ()),
    ("evaluations.best", "agentrl.evaluation.best", "BestModel", ()),
    ("checkpoints", "agentrl.flow.saving", "Checkpoints", ()),
    ("uploads", "agentrl.flow.uploads", "Uploads", ()),
    ("past_weights", "agentrl.flow.past_weights", "PastWeights", ()),
    ("record.budget", "agentrl.core.recording", "RecordBudget", ()),
    ("track.diagnosis", "agentrl.track.tracker", "Diagnosis", ("emit",)),
    ("track.callbacks", "agentrl.track.callbacks", "UserCallbacks", ("ask_stop", "clock")),
    ("tasks", "agentrl.env.tasks", "TaskSource", ("load",)),
    ("endpoint", "agentrl.rollout.endpoint.server", "EndpointServer", ()),
)
"""Part, module, class and arguments that are left out, of classes whose objects are made as usual."""


@contextmanager
def recorded_edges(recording: Recording, machine: Machine, deaths: int = 0) -> Iterator[None]:
    """Record what is received within the block; nothing heavy is started in it, and the learner of a training dies `deaths` times."""
    with ExitStack() as stack:
        stack.enter_context(stubbed_ray(machine, recording))
        # Cases were drawn while flags without effect were accepted; tests/unit/resolve/test_unused.py has them refused.
        for judge in ("refuse_unused", "unused_notes"):
            stack.enter_context(patch(f"agentrl.resolve.plan.{judge}", lambda settings, sources: ()))
        stack.enter_context(patch("agentrl.flow.driver._run_loops", _loops(recording, iter([True] * deaths))))
        for edges in (_made, _stood_in, _training, _tracking, _figures, _tools):
            for edge in edges(recording):
                stack.enter_context(edge)
        yield


def _made(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    for part, module, name, without in MADE:
        yield recording.spy(part, resolve_name(f"{module}:{name}"), without=without)


def _stood_in(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    from agentrl.engine.own import load_engine_class

    def own_engine(spec: str) -> type[Any]:
        return recording_class(Engine, recording, load_engine_class(spec).__name__)

    yield patch("agentrl.engine.vllm_engine.VllmEngine", recording_class(Engine, recording, "VllmEngine"))
    yield patch("agentrl.engine.transformers_engine.TransformersEngine", recording_class(Engine, recording, "TransformersEngine"))
    yield patch("agentrl.cluster.build.load_engine_class", own_engine)
    yield patch("agentrl.rollout.worker.EpisodeWorker", recording_class(EpisodeWorker, recording))
    yield patch("agentrl.learner.learner.LearnerRank", recording_class(LearnerRank, recording))
    yield patch("agentrl.engine.reward_model.RewardModel", RewardModel)
    yield patch("agentrl.engine.scoring.BatchedScorer", recording_class(BatchedScorer, recording))
    yield patch("agentrl.engine.teacher_model.TeacherModel", recording_class(TeacherModel, recording))
    yield patch("agentrl.cluster.runtime.BlockWatch", Nothing)
    yield patch("agentrl.cluster.runtime.Leftovers", Nothing)


def _training(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    from agentrl.api.background import run_until_signal
    from agentrl.certify.before import kernels_of

    async def refuse_wrong(plan: Any, cluster: Any) -> None:
        run, learner = plan.settings.training, cluster.learner
        decided = {"kernels": kernels_of(learner.learner, learner.device), "asked": "model" not in run.skip_checks and not run.resume}
        recording.add("proof", {"model": learner.model, "device": learner.device, **decided})

    async def rehearse(config: Any, task: Any) -> str:
        recording.add("rehearsal", {"task": task.id})
        return ""

    def check_prompts(settings: Any, tasks: Any, limit: int) -> None:
        recording.add("prompts", {"limit": limit, "tasks": len(tasks), "model": settings.model.model})

    async def check_teachers(config: Any) -> None:
        """Leave out what needs tokenizers and servers; the teachers are among the settings of a worker."""

    def push(directory: Any, name: str) -> str:
        recording.add("push", {"directory": directory, "name": name})
        return f"https://hub/{name}"

    async def load(self: Any, run_dir: Any, learner: Any) -> Any:
        recording.add("resumed", {"step": self.progress.step, "checkpoint": self.checkpoint, "copy": self.copy and self.copy.step})
        return self.checkpoint

    yield patch("agentrl.api.training._refuse_wrong", refuse_wrong)
    yield patch("agentrl.api.training.rehearse", rehearse)
    yield patch("agentrl.api.training.check_prompts", check_prompts)
    yield patch("agentrl.api.training._check_teachers", check_teachers)
    yield patch("agentrl.api.training.collect_rarely", lambda: None)
    yield patch("agentrl.api.training.check_hub", lambda config: None)
    yield patch("agentrl.api.preview.check_hub", lambda config: None)
    yield patch("agentrl.api.training.push_model", push)
    yield patch("agentrl.resolve.saved.ResumePoint.restore", load)

    def until_signal(work: Any, stop: Any = None, stop_timeout_s: float = 0.0, saved: Callable[[], str] = str) -> Any:
        recording.add("signals", {"stop_timeout_s": stop_timeout_s})
        return run_until_signal(work, stop, stop_timeout_s, saved)

    yield patch("agentrl.cli.train.run_until_signal", until_signal)


def _loops(recording: Recording, deaths: Iterator[bool]) -> Callable[..., Any]:
    """Return what stands for the loops of a run: all steps are made at once, with a checkpoint if the run has some."""
    from agentrl.core.errors import LearnerDeadError
    from agentrl.flow.checkpoint import Progress

    async def run_loops(run: Any, stop: Any, report: Any) -> None:
        _record_loops(recording, run)
        training, steps = run.groups.settings.training, run.steps
        if steps.checkpoints is not None and training.save_every:
            async with steps.checkpoints.saving(Progress(step=min(training.num_steps, steps.first + training.save_every))):
                pass
        if next(deaths, False):
            raise LearnerDeadError("learner-0 is gone")
        if json.loads(steps.checkpoints._config)["record"]["save_model"]:
            await steps.learner.save_model(str(training.run_dir / "model"))
        await _join(recording, run.pool)
        run.weights.live.advance(training.num_steps)
        steps.last_groups = run.groups.settings.flow.groups_per_step

    return run_loops


def _record_loops(recording: Recording, run: Any) -> None:
    """Record what the loops would begin with."""
    groups, steps = run.groups, run.steps
    maker, health = groups.settings.group_requests(), groups.health
    sizes = {"capacity": groups.slots.capacity, "total": groups.slots.total, "max_staleness": groups.queue.max_staleness}
    sizes |= {"groups": groups.queue.count, "oversampled": groups.queue.oversampled, "window": health._verdicts.maxlen}
    received = {
        "requests": maker.keywords,
        "sizes": sizes,
        "filter": groups.keep,
        "hooks": [type(hook).__name__ for hook in steps.after_step],
    }
    recording.add("flow", {**received, "settings": groups.settings, "learner": type(steps.learner).__name__, "first_step": steps.first})


async def _join(recording: Recording, pool: Any) -> None:
    """Have one more engine join, where there is room for it, unless engines take turns with the learner, where none may."""
    if (supervision := pool._supervision) is not None and pool._published is None:
        room = supervision.room()
        recording.add("joined.room", room)
        if room is None or room > 0:
            with recording.of("joined"):
                await supervision.respawn(next(pool._names))


def _tracking(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    from agentrl.track.tracker import Diagnosis, RunTracker, make_display, open_sinks

    def sinks(run_dir: Any, track: Any, record: Any, budget: Any = None) -> list[Any]:
        opened = open_sinks(run_dir, track, record, budget)
        recording.add("track.sinks", {"kinds": [type(sink).__name__ for sink in opened], "track": track})
        return opened

    def display(num_steps: int, *, title: str, console: Any) -> Any:
        recording.add("track.display", {"num_steps": num_steps, "title": title})
        return make_display(num_steps, title=title, console=console)

    def told(method: Callable[..., None], part: str) -> Callable[..., None]:
        def tell(self: Any, value: Any) -> None:
            recording.add(part, value)
            method(self, value)

        return tell

    yield patch("agentrl.track.tracker.open_sinks", sinks)
    yield patch("agentrl.track.tracker.make_display", display)
    yield patch.object(RunTracker, "on_stage", told(RunTracker.on_stage, "stages"))
    yield patch.object(Diagnosis, "add", told(Diagnosis.add, "warnings"))


def _figures(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    """Compute the figures of few tasks, because intervals by resampling take a second for many."""

    def few(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        def compute(*outcomes: Any, **options: Any) -> Any:
            recording.add("figures", options)
            return function(*(part[:FEW] for part in outcomes[:count]), *outcomes[count:], **options)

        return compute

    for module, name, count in (("evaluation.evaluations", "assess", 1), ("api.evaluation", "assess", 1), ("api.evaluation", "compare", 2)):
        place = f"agentrl.{module}.{name}"
        yield patch(place, few(resolve_name(place), count))


def _tools(recording: Recording) -> Iterator[AbstractContextManager[Any]]:
    """Edges of the commands that train nothing."""

    def play(self: Any, first: str = "") -> int:
        engine = type(self._inner_engine()).__name__
        options = {"engine": engine, "most": self._most, "pausing": self._pausing, "first": first, **self._options}
        recording.add("play", {"settings": self._settings, **options, "limit": self._plan.engine.engine.max_model_len})
        return 0

    def session(engine: Any, codec: Any, settings: Any, turns: Any, say: Any) -> Any:
        recording.add("serve", {"engine": type(engine).__name__, "settings": settings, "limit": getattr(engine, "max_model_len", None)})
        raise Recorded

    class Server:
        def __init__(self, app: Any, **options: Any) -> None:
            recording.add("server", options)

        async def start(self) -> str:
            raise Recorded

    def run_check(config: Any) -> Any:
        recording.add("check", config)
        raise Recorded

    def replayer(self: Any, agent: Any, settings: Any, *, limits: Any, **options: Any) -> None:
        recording.add("replay", {"agent": agent, "settings": settings, "limits": limits, "has_requests": options.get("has_requests")})
        raise Recorded

    yield patch("agentrl.api.checking.run_check", run_check)
    yield patch("agentrl.inspect.replay.Replayer.__init__", replayer)
    yield patch("agentrl.inspect.replay.load_tokenizer", lambda model, **options: Tokenizer())
    yield patch("agentrl.inspect.play.PlaySession.run", play)
    yield patch("agentrl.api.serving._session", session)
    yield patch("agentrl.api.serving.load_tokenizer", lambda model, **options: Tokenizer())
    yield patch("agentrl.api.serving.answer_parser", lambda endpoint, tokenizer: None)
    yield patch("agentrl.api.serving.make_codec", lambda tokenizer, settings, ends: None)
    yield patch("agentrl.api.serving.let_see", lambda codec, model, images: None)
    yield patch("agentrl.api.serving.fit_parser", lambda codec, endpoint, parser: None)
    yield patch("agentrl.cli.serve_reward_model.RewardModel", RewardModel)
    yield patch("agentrl.cli.serve_reward_model.BatchedScorer", recording_class(BatchedScorer, recording))
    yield patch("agentrl.cli.serve_reward_model.LoopbackServer", Server)


@contextmanager
def tool_edges(recording: Recording, command: str) -> Iterator[None]:
    """Record what commands receive whose modules take seconds to import; those of other commands are not imported."""
    with ExitStack() as stack:
        if command == "export":
            stack.enter_context(patch("agentrl.learner.export.export_checkpoint", _exported(recording)))
        if command in METHODS:
            stack.enter_context(patch("agentrl.tune.loop.start", _tuned(recording)))
        yield


def _exported(recording: Recording) -> Callable[..., int]:
    def export(source: Any, settings: Any, target: Any, **options: Any) -> int:
        recording.add("export", {"source": source, "settings": settings, "target": target, **options})
        return 0

    return export


def _tuned(recording: Recording) -> Callable[..., Any]:
    def start(plan: Any, prepared: Any, directory: Any, steps: int, ranks: Any, tokenizer: Any) -> Any:
        from agentrl.tune.learner_rows import learner_settings

        learner = learner_settings(plan, steps)
        recording.add("tune", {"method": plan.method.command, "settings": plan.settings, "learner": learner})
        raise Recorded

    return start


class Tokenizer:
    """Tokenizer in the place of a model's."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a token for each character."""
        return [ord(letter) for letter in text]

"""The steps of a run on the learner: training, evaluations, checkpoints, the best model, an early end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.files import commit_directory, remove_directory, temporary_directory, temporary_name
from agentrl.core.operating_system import peak_memory_gib
from agentrl.learner.checkpoint import load_checkpoint, save_checkpoint
from agentrl.learner.ranks import Ranks
from agentrl.learner.row_objective import LabelledRows
from agentrl.learner.state import LearnerState, load_state
from agentrl.resolve.tune import TunePlan
from agentrl.tune.directory import CHECKPOINTS, PREFIX, RunDirectory, checkpoints_in
from agentrl.tune.follow import Best, Rows, Stop
from agentrl.tune.learner_rows import RowMaker, learner_settings
from agentrl.tune.prepare import Prepared, image_reader
from agentrl.tune.row_table import Row
from agentrl.tune.samples import RowRecorder


class Loop:
    """Trains by the settings of a run, and passes its metrics on.

    Args:
        plan: The run.
        prepared: Its rows.
        directory: Its directory, and where it goes on.
        state: Models of this rank.
        rows: Takes the metrics.
        best: Keeps the best model.
        stop: Asks for an early end.
        clock: Returns seconds since the run began.
        recorded: Rows whose figures are recorded, each with the name of its part.
    """

    def __init__(
        self,
        plan: TunePlan,
        prepared: Prepared,
        directory: RunDirectory,
        state: LearnerState,
        rows: Rows,
        best: Best,
        stop: Stop,
        clock: Callable[[], float],
        recorded: Sequence[tuple[str, Row]] = (),
    ) -> None:
        self._run, self._eval, self._batch_size = plan.settings.run, plan.settings.eval, plan.settings.optim.batch_size
        self._held_out, self._directory, self._state = prepared.held_out, directory, state
        self._rows, self._best, self._stop, self._clock = rows, best, stop, clock
        self._made = RowMaker(plan.method.command, image_reader(plan.settings.model, plan.settings.images))
        self._recorder = None
        if recorded:
            self._recorder = RowRecorder(state, self._made, recorded, directory, self._batch_size)
        self._tokens = float(directory.rows[-1].get("tokens", 0.0)) if directory.rows else 0.0

    def train(self, drawn: Sequence[Row], steps: int) -> str:
        """Train on rows in the order in which they are drawn, up to a number of steps.

        Returns:
            ``finished``, ``interrupted``, or ``settled`` where the last evaluations were not better.
        """
        if self._held_out and not self._directory.step:
            self._evaluate(0)
        if self._recorder is not None:
            self._recorder.begin()
        # A run that was killed after its last checkpoint has settled already.
        status = "settled" if self._has_settled and self._directory.step < steps else None
        step = self._directory.step - 1
        for step in range(self._directory.step, 0 if status else steps):
            rows = self._made(drawn[step * self._batch_size : (step + 1) * self._batch_size])
            metrics = self._state.train_rows(step, rows) | _sizes(rows)
            self._tokens += rows.num_tokens
            self._rows.trained(step + 1, metrics, tokens=self._tokens, seconds=self._clock())
            if (status := self._follow(step + 1, last=step + 1 == steps)) is not None:
                break
        self._rows.flush()
        if self._recorder is not None:
            self._recorder.end(step + 1)
        return status or "finished"

    def _follow(self, step: int, *, last: bool) -> str | None:
        """Do what follows a step; return how the run ends, `None` if it goes on."""
        every, saves = self._eval.eval_every, self._run.save_every
        status = None
        if self._held_out and (last or (every and step % every == 0)):
            self._evaluate(step)
            if self._has_settled and not last:
                status = "settled"
        if self._stop.agreed() and not last:
            status = "interrupted"
        if status == "interrupted" or (saves and (last or status or step % saves == 0)):
            self._rows.flush()
            self._save_checkpoint(step)
        return status

    @property
    def _has_settled(self) -> bool:
        return 0 < self._eval.early_stopping <= self._best.since

    def _evaluate(self, step: int) -> None:
        begin = self._clock()
        held_out, size = self._held_out, self._batch_size
        found = self._state.evaluate_rows(step, (self._made(held_out[at : at + size]) for at in range(0, len(held_out), size)))
        if (value := self._best.better(self._rows.measured(step, found, seconds=self._clock() - begin))) is not None:
            self._rows.note(**{"eval/best": value, "eval/best_step": float(step)})
            save_model(self._state, self._best.folder)

    def _save_checkpoint(self, step: int) -> None:
        """Write a checkpoint, which has its name when all ranks have written their parts of it; only then remove older ones."""
        folder, ranks = self._directory.path / CHECKPOINTS, self._state.ranks
        path = folder / f"{PREFIX}{step}"
        if ranks.first:
            temporary_directory(path)
        ranks.barrier()
        save_checkpoint(self._state, temporary_name(path), step)
        if ranks.first:
            commit_directory(temporary_name(path), path)
            for old in checkpoints_in(folder)[: -self._run.keep_checkpoints]:
                remove_directory(old)
        ranks.barrier()


def _sizes(rows: LabelledRows) -> dict[str, float]:
    """Return the sizes of a step, and the most memory that this process has had."""
    sizes = {"rows": rows.num_rows, "tokens/rows": rows.num_tokens, "tokens/trained": rows.num_actions}
    return {name: float(value) for name, value in sizes.items()} | {"memory/process_gib": peak_memory_gib()}


def save_model(state: LearnerState, folder: Path) -> None:
    """Write the model with its tokenizer into a folder, whole or not at all; every rank calls it."""
    state.save(str(folder))
    if state.ranks.first and holds_adapter(folder) and state.policy.can_generate():  # an adapter has the weights alone
        state.policy.generation_config.save_pretrained(folder)


def start(plan: TunePlan, prepared: Prepared, directory: RunDirectory, steps: int, ranks: Ranks, tokenizer: Any) -> LearnerState:
    """Load the models of a run, as they were at its last checkpoint if it goes on.

    Raises:
        ConfigError: If the model cannot be loaded for the method.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    settings = learner_settings(plan, steps)
    try:
        state = load_state(settings, ranks, tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"agentrl {plan.method.command}", settings.model, f"cannot be trained: {reason}", "See --debug.") from error
    model = state.policy
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    if (separator := getattr(plan.settings.method, "step_separator", None)) is not None:
        model.config.step_separator = separator
    # Before training, so that the best model holds these tokens too.
    record_ends(model, tokenizer, prepared.ends)
    if directory.checkpoint is not None:
        load_checkpoint(state, directory.checkpoint)
    return state


def record_ends(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Let generation stop at the tokens that end trained answers; the most frequent becomes the tokenizer's own.

    A tokenizer whose end token ends answers, or is written by its chat template, keeps it.
    """
    if not ends or not model.can_generate():
        return
    if tokenizer.eos_token_id not in ends and "eos_token" not in str(tokenizer.chat_template or ""):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    known = model.generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *known]))

"""A training run as an object: what it measured, recorded and saved, read from its directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ConfigError
from agentrl.inspect.directory import TRAJECTORIES, Record, RunDirectory
from agentrl.track.html import curve, escaped, table
from agentrl.track.summary import summary_rows
from agentrl.track.text import counted

if TYPE_CHECKING:
    import pandas


class Metrics(list[dict[str, Any]]):
    """Rows of metrics, one per step, as in ``metrics.jsonl``; a row of step 0 is an evaluation before the first step."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a table, one column per metric.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas", None, "needs pandas", "Run `pip install pandas`.") from error
        return pandas.DataFrame(list(self))


class Run:
    """A training run that has ended, goes on, or was killed; everything is read from its directory when it is asked for.

    Attributes:
        path: Directory of the run.

    Raises:
        ConfigError: If the directory holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self._directory = RunDirectory(path)
        self.path = self._directory.path

    @property
    def metrics(self) -> Metrics:
        """Metrics measured so far."""
        return Metrics(dict(row) for row in self._directory.metrics())

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of ``summary.json``; of a run without an end, those of its steps, with the status ``unfinished``."""
        return dict(self._directory.summed_up())

    @property
    def status(self) -> str:
        """``finished``, ``interrupted``, ``failed``, or ``unfinished``: it goes on, or was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def model_path(self) -> Path | None:
        """Directory of the model: the best one if ``keep_best`` kept one, else the last; `None` if none is saved."""
        return self._directory.model()

    def episodes(self, episode: str = "") -> Iterator[Record]:
        """Yield the recorded episodes in the order of their ends, one record each, or one per agent.

        Args:
            episode: Name of one episode, or number of a group for all of its episodes; empty: all.

        Raises:
            ConfigError: If the run was told to record none.
        """
        if not (self.path / TRAJECTORIES).is_file() and self._directory.config().record.record != "none":
            return iter(())  # it is before its first group
        return (record for records in self._directory.episodes(episode) for record in records)

    def _repr_html_(self) -> str:
        """Return the reward by step, the summary, and a link to the viewer, for notebooks."""
        from agentrl.api.viewing import viewer_link

        rewards = [float(row["reward/mean"]) for row in self._directory.steps()]
        summary = self._directory.summed_up()
        rows = summary_rows({**summary, "paths": {}}, rewards=(), agent="") if summary else [("status", self.status)]
        title = f"<b>Run {escaped(self.path.name)}</b>"
        figures = table((), [row for row in rows if row[0] != "saved"])
        return f"<div>{title}{curve(rewards, name='reward')}{figures}{viewer_link(self.path)}</div>"

    def __repr__(self) -> str:
        """Return the directory, the progress and the reward of the run."""
        rewards = [row["reward/mean"] for row in self.metrics if row.get("reward/mean") is not None]
        reward = f", reward {rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else ""
        return f"<Run {str(self.path)!r}: {self.status}, {counted(len(rewards), 'step')}{reward}>"

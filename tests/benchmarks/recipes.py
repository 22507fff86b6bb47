"""Run the recipes for a small machine as docs/recipes.md says, draw their curves, and print the table.

    python -m tests.benchmarks.recipes [NAME ...]                      # run, about 15 minutes for all on 2 cores
    python -m tests.benchmarks.recipes --draw OUT.svg RUN_DIR ...      # only draw the curves of runs that exist

A curve shows the metric of every step, thin, and the mean over ten steps; dots are evaluations on tasks that are not trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.runs import ROOT, command

PICTURES = ROOT / "docs" / "recipes"
CONFIGS = ROOT / "examples" / "recipes" / "cpu"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 230, 44, 14, 14, 34
COLOURS = ("#3f51b5", "#00897b", "#d84315")
WINDOW, ENDS = 10, 5


@dataclass(frozen=True)
class Recipe:
    """One recipe.

    Attributes:
        metric: The figure that shows that it learns.
        teacher: Recipe whose model is its teacher.
        chats: Chats in which a script plays the environment, to imitate first; 0 for none.
        imitate: Flags of ``agentrl sft`` for them.
        passes: A recipe that ends with imitation: so many passes over the chats, each of which is evaluated.
    """

    metric: str = "reward/mean"
    teacher: str = ""
    chats: int = 0
    imitate: tuple[str, ...] = ()
    passes: tuple[int, ...] = ()


RECIPES = {
    "tool_use": Recipe(),
    "game": Recipe(),
    "two_agents": Recipe("env/gain"),
    "gymnasium": Recipe("score/mean"),
    "black_box": Recipe(),
    "lora": Recipe(),
    "pictures": Recipe(),
    "picture_game": Recipe(),
    "distillation": Recipe("distill/kl", teacher="tool_use"),
    "service_desk": Recipe(chats=3000, imitate=("--learning-rate", "3e-3")),
    "swe": Recipe("eval/score", chats=800, imitate=("--learning-rate", "3e-3", "--batch-size", "16"), passes=(1, 2, 4, 6, 10)),
}


@dataclass(frozen=True)
class Curve:
    """What a run's metrics say of one figure.

    Attributes:
        points: Step and value of every training step.
        evaluations: Step and ``eval/score`` of every evaluation.
    """

    points: list[tuple[int, float]]
    evaluations: list[tuple[int, float]]

    @property
    def smooth(self) -> list[tuple[int, float]]:
        """The mean over the last ten steps, from the first step that has so many before it."""
        values = [value for _, value in self.points]
        return [(self.points[i][0], statistics.fmean(values[i + 1 - WINDOW : i + 1])) for i in range(WINDOW - 1, len(values))]


def read(run_dir: Path, metric: str) -> Curve:
    """The curve of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = {name: [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None] for name in (metric, "eval/score")}
    return Curve(pairs[metric], pairs["eval/score"])


def draw(curves: Sequence[Curve], metric: str, of: str = "step") -> str:
    """The curves as an SVG picture; the highest value of the vertical axis is 1, or the largest value; the other one counts each `of`."""
    last = max(step for curve in curves for step, _ in curve.points)
    top = max(1.0, *(value for curve in curves for _, value in curve.points))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_axes(last, top, f"{metric} by {of}"),
    ]
    for curve, colour in zip(curves, COLOURS, strict=False):
        thin, thick = (_path(points, last, top) for points in (curve.points, curve.smooth))
        lines.append(f'<polyline points="{thin}" fill="none" stroke="{colour}" stroke-opacity="0.3"/>')
        lines.append(f'<polyline points="{thick}" fill="none" stroke="{colour}" stroke-width="2"/>')
        places = [_place(step, value, last, top) for step, value in curve.evaluations]
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    return "\n".join([*lines, "</svg>", ""])


def _axes(last: int, top: float, words: str) -> Iterable[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = _place(0, share * top, last, top)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{share * top:.2f}</text>'
    for step in (0, last // 2, last):
        x, y = _place(step, 0, last, top)
        yield f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle" fill="#444">{step}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end" fill="#444">{words}</text>'


def _place(step: float, value: float, last: int, top: float) -> tuple[float, float]:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last, TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _path(points: Iterable[tuple[int, float]], last: int, top: float) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(step, value, last, top) for step, value in points))


def run(name: str, folder: Path) -> float:
    """One run of a recipe into ``folder/name``; the seconds of the whole command."""
    recipe, config, begin = RECIPES[name], CONFIGS / f"{name}.toml", time.perf_counter()
    teacher = ("--teacher", str(folder / recipe.teacher / "model")) if recipe.teacher else ()
    finish(command("train", "--config", str(config), *teacher, *imitated(name, folder), "--run-dir", str(folder / name)))
    return time.perf_counter() - begin


def imitated(name: str, folder: Path, *more: str) -> tuple[str, ...]:
    """The flag for a model that has learned the chats of a recipe, as docs/recipes.md makes it; none for a recipe without chats."""
    recipe, chats, run_dir = RECIPES[name], folder / f"{name}.jsonl", folder / "-".join((name, "chats", *more[1:]))
    if not recipe.chats:
        return ()
    if not chats.exists():
        finish([sys.executable, "examples/demonstrations.py", agent_of(name), str(recipe.chats), str(chats)])
    finish(command("sft", "--data", str(chats), *recipe.imitate, *more, "--run-dir", str(run_dir)))
    return ("--model", str(run_dir / "model"))


def agent_of(name: str) -> str:
    """The environment of a recipe."""
    config: str = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))["agent"]
    return config


def by_passes(name: str, folder: Path) -> Curve:
    """Score on held-out tasks by the number of passes over the chats of a recipe."""
    points = []
    for number in (0, *RECIPES[name].passes):
        model, out = imitated(name, folder, "--num-epochs", str(number)) if number else (), folder / f"{name}-eval-{number}"
        finish(command("eval", "--config", str(CONFIGS / f"{name}.toml"), *model, "--output", str(out)))
        overall = json.loads((out / "eval.json").read_text(encoding="utf-8"))["model"]["overall"]["score"]
        print(f"{name}: {number} passes, score {overall['value']:.3f} ({overall['low']:.3f} to {overall['high']:.3f})", flush=True)
        points.append((number, overall["value"]))
    return Curve(points, points)


def finish(words: Sequence[str]) -> None:
    """Run a command to its end."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def row(name: str, curve: Curve, seconds: float) -> str:
    """A line of the table of docs/recipes.md."""
    first, last = (statistics.fmean(value for _, value in part) for part in (curve.points[:ENDS], curve.points[-ENDS:]))
    cells = (
        name,
        RECIPES[name].metric,
        f"{first:.2f}",
        f"{last:.2f}",
        f"{len(curve.points)}",
        f"{seconds:.0f}",
        f"{os.getloadavg()[0]:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run recipes, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes, or with --draw run directories")
    parser.add_argument("--draw", type=Path, metavar="OUT.svg", help="draw the runs named, and run nothing")
    parser.add_argument("--metric", default="reward/mean", help="of --draw")
    options = parser.parse_args()
    if options.draw:
        options.draw.write_text(draw([read(Path(name), options.metric) for name in options.names], options.metric), encoding="utf-8")
        return
    names = options.names or list(RECIPES)
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        parser.error(f"there is no recipe {unknown[0]}; recipes: {', '.join(RECIPES)}")
    print(f"| recipe | figure | first {ENDS} steps | last {ENDS} steps | steps | seconds | load |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted({*names, *(RECIPES[n].teacher for n in names if RECIPES[n].teacher)}, key=list(RECIPES).index):
            if RECIPES[name].passes:
                picture = draw([by_passes(name, Path(folder))], RECIPES[name].metric, "pass over the chats")
                (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
                continue
            seconds = run(name, Path(folder))
            curve = read(Path(folder) / name, RECIPES[name].metric)
            (PICTURES / f"{name}.svg").write_text(draw([curve], RECIPES[name].metric), encoding="utf-8")
            print(row(name, curve, seconds), flush=True)


if __name__ == "__main__":
    main()

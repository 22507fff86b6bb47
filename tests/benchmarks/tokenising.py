"""Tokens of chats for `agentrl sft` beside plain batched calls of the tokenizer.

    python -m tests.benchmarks.tokenising [--model models/smollm2] [--chats 10000] [--cores 1 2]

Plain calls are `apply_chat_template(chats, tokenize=True)` of transformers for 1000 chats at once, which give tokens without saying which
are trained. Chats have 1 to 3 questions with answers, made of words from this project's pages. Each measurement is a process of its own
that may use so many cores; they take turns, and the least time of each counts. Loading the tokenizer is not counted. The second start
reads the rows of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.assets import tiny_model_path
from tests.e2e.runs import ROOT

KINDS = ("plain", "agentrl")
BATCH = 1000


def make_chats(count: int) -> list[list[dict[str, str]]]:
    """Chats of words from the pages of this project."""
    words = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))).split()
    draw = random.Random(1)

    def text(least: int, most: int) -> str:
        length = draw.randint(least, most)
        begin = draw.randrange(len(words) - length)
        return " ".join(words[begin : begin + length])

    def turn() -> list[dict[str, str]]:
        return [{"role": "user", "content": text(8, 60)}, {"role": "assistant", "content": text(20, 160)}]

    return [[message for _ in range(draw.randint(1, 3)) for message in turn()] for _ in range(count)]


def measured(kind: str, model: str, data: str, cache: str) -> dict[str, Any]:
    """Seconds for the tokens of all chats in a file, and for reading them from the cache."""
    from agentrl.config.methods import METHODS
    from agentrl.resolve.tune import load_given
    from agentrl.tune.prepare import make_tokenizer
    from agentrl.tune.run import encoded, read

    given = {"data": data, "model": model, "max_length": 8192, "eval_size": 0, "token_cache": cache or "none"}
    plan = load_given(METHODS["sft"], given)
    tokenizer = make_tokenizer(plan.settings.model, "")
    if kind == "plain":
        chats = [json.loads(line)["messages"] for line in Path(data).read_text(encoding="utf-8").splitlines()]
        begin = time.perf_counter()
        found = [tokenizer.apply_chat_template(chats[at : at + BATCH], return_dict=True) for at in range(0, len(chats), BATCH)]
        return {"seconds": time.perf_counter() - begin, "tokens": sum(len(row) for part in found for row in part["input_ids"])}
    examples = read(plan)
    begin = time.perf_counter()
    with mock.patch("agentrl.tune.prepare.make_tokenizer", return_value=tokenizer):
        prepared = encoded(plan, examples)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": prepared.counts["train"]["tokens"]}


def in_process(cores: int, *words: str) -> dict[str, Any]:
    """Run a measurement on so many cores."""
    own = sorted(os.sched_getaffinity(0))[-cores:]
    command = [sys.executable, "-m", "tests.benchmarks.tokenising", "--measure", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, own),
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(tiny_model_path()))
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--measure", nargs=4, metavar=("KIND", "MODEL", "DATA", "CACHE"))
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(*args.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data, cache = str(Path(folder) / "chats.jsonl"), str(Path(folder) / "cache")
        Path(data).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in make_chats(args.chats)), encoding="utf-8")
        print("| cores | plain calls, s | agentrl, s | times as fast as plain calls on one core |\n|---|---|---|---|")
        base = 0.0
        for cores in args.cores:
            rounds = [{kind: in_process(cores, kind, args.model, data, "")["seconds"] for kind in KINDS} for _ in range(args.repeat)]
            best = {kind: min(each[kind] for each in rounds) for kind in KINDS}
            base = base or best["plain"]
            print(f"| {cores} | {best['plain']:.2f} | {best['agentrl']:.2f} | {base / best['agentrl']:.2f} |", flush=True)
        first, second = (in_process(args.cores[-1], "agentrl", args.model, data, cache) for _ in range(2))
        print(f"\nfirst start {first['seconds']:.2f} s, second start {second['seconds']:.2f} s, {first['tokens']:,} tokens")


if __name__ == "__main__":
    main()

"""``agentrl serve``: the endpoint that black-box agents are given in training, over a model, to try an agent first."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from agentrl.api.background import run_until_signal
from agentrl.config.load import TYRO, expand_aliases, validate
from agentrl.config.rules import check
from agentrl.config.schema import DataConfig, EndpointConfig, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from agentrl.config.sections import CountOrZero
from agentrl.core.errors import ConfigError

TINY = "tiny"
MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class ServedEngineConfig(EngineConfig):
    """The engine that samples."""

    engine: tyro.conf.Suppress[str] = EngineConfig.engine


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Offer a model over HTTP as black-box agents meet it in training; nothing is trained. Ctrl-C ends it."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face directory or hub name, or ``tiny``, the model that ships with agentrl."""
    port: int = 0
    """Port on 127.0.0.1. 0: a free one."""
    with_engine: Annotated[Literal["auto", "vllm", "transformers", "none"], tyro.conf.arg(name="engine")] = "auto"
    """Software that samples, as in training; ``none``: every answer is one fixed text, which tries an agent's connection within seconds."""
    seed: CountOrZero = 0
    """Seed of sampling."""
    trust_remote_code: tyro.conf.FlagCreatePairsOff[bool] = False
    """Allow the model's own Python code to run."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show tracebacks."""
    tool_parser: str = "json"
    """Parser of tool calls: ``json``, or the name of one of vLLM's, as in training."""
    reasoning_parser: str = ""
    """Parser of reasoning: the name of one of vLLM's. Empty: reasoning is what stands before ``</think>``."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: ServedEngineConfig = field(default_factory=ServedEngineConfig)


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    args = tyro.cli(ServeArgs, prog="agentrl serve", args=expand_aliases(words), config=TYRO)
    if not 0 <= args.port <= MAX_PORT:
        raise ConfigError("--port", args.port, "is no port", f"Give 1 to {MAX_PORT}, or 0 for a free one.")
    config = check(validate(_config(args)))
    from agentrl.api.serving import serve

    try:
        run_until_signal(serve(config, args.port, loads_model=args.with_engine != "none", say=_say))
    except KeyboardInterrupt:
        return 0
    return 1  # the server ended by itself


def _config(args: ServeArgs) -> TrainConfig:
    return TrainConfig(
        run=RunConfig(agent="the program that asks", seed=args.seed),
        data=args.data,
        model=ModelConfig(model="" if args.model == TINY else args.model, trust_remote_code=args.trust_remote_code),
        rollout=args.rollout,
        endpoint=EndpointConfig(tool_parser=args.tool_parser, reasoning_parser=args.reasoning_parser),
        engine=args.engine if args.with_engine == "none" else replace(args.engine, engine=args.with_engine),
    )


def _say(line: str, *, is_result: bool = False) -> None:
    stream = sys.stdout if is_result else sys.stderr
    stream.write(f"{line}\n" if is_result else f"agentrl: {line}\n")
    stream.flush()

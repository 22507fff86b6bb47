"""Specifications of ``--partner``: agents that the policy does not play, and who does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from agentrl.core.errors import ConfigError
from agentrl.rollout.plan import PartnerConfig

FLAG = "--partner"
FORMS = "Write NAME=past, NAME=past#every=50&pool=4, NAME=model:DIR or NAME=endpoint:http://HOST:PORT/v1#model=NAME."
OPTIONS = ("model", "api_key_env")
PartnerKind: TypeAlias = Literal["past", "model", "endpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerSpec:
    """One agent and who plays it.

    Attributes:
        agent: Its name.
        kind: Earlier weights of the run, a model, or a service.
        where: Directory of the model, or address of the service.
        options: Options of the service.
        every: Steps after which the present weights join the earlier ones.
        pool: Newest of the earlier weights that one is drawn from, for each group.
    """

    agent: str
    kind: PartnerKind
    where: str = ""
    options: dict[str, str] = field(default_factory=dict)
    every: int = 50
    pool: int = 4


def partner_specs(config: PartnerConfig) -> tuple[PartnerSpec, ...]:
    """Return what ``--partner`` says.

    Raises:
        ConfigError: If it has another form, or names an agent twice.
    """
    specs = tuple(map(_read, config.partner))
    names = [spec.agent for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(FLAG, ",".join(config.partner), f"names the agent {twice!r} twice", "Give each agent one partner.")
    if len({(spec.every, spec.pool) for spec in specs if spec.kind == "past"}) > 1:
        problem = "keeps earlier weights of a run in two ways"
        raise ConfigError(FLAG, ",".join(config.partner), problem, "Give all of NAME=past the same #every= and pool=.")
    return specs


def past_spec(config: PartnerConfig) -> PartnerSpec:
    """Return the agent that earlier weights play; where there is none, one with the defaults."""
    return next((spec for spec in partner_specs(config) if spec.kind == "past"), PartnerSpec(agent="", kind="past"))


def check_partners(config: PartnerConfig, agents: Sequence[str], trained: Sequence[str], env: str) -> None:
    """Refuse partners of agents that an environment does not have, and partners that leave no agent to train.

    Raises:
        ConfigError: For the first one.
    """
    names = [spec.agent for spec in partner_specs(config)]
    for name in names:
        if name not in agents:
            known = f"Its agents are {', '.join(agents)}." if agents else "It has a single agent, which is the policy."
            raise ConfigError(FLAG, name, f"is no agent of {env}", known)
    if names and not set(trained) - set(names):
        raise ConfigError(FLAG, ",".join(config.partner), f"leaves no agent of {env} to train", "Leave one to the policy.")


def past_steps(version: int, every: int, pool: int) -> list[int]:
    """Return the steps whose weights a group may play against that is admitted while `version` is live, the newest `pool` of them.

    Weights of a step are written while the next step waits, so those of `version` itself may not be there yet.
    """
    return list(range(0, max(version, 1), every))[-pool:]


def _read_past(agent: str, text: str) -> PartnerSpec:
    words = dict(parse_qsl(text.partition("#")[2], keep_blank_values=True))
    numbers: dict[str, Any] = {name: int(value) if value.isdecimal() else 0 for name, value in words.items()}
    if not agent.isidentifier() or not numbers or set(numbers) - {"every", "pool"} or min(numbers.values()) < 1:
        raise ConfigError(FLAG, text, "does not say after how many steps weights are kept, and how many", FORMS)
    return PartnerSpec(agent=agent, kind="past", **numbers)


def _read(text: str) -> PartnerSpec:
    agent, sign, who = text.partition("=")
    kind, _, where = who.partition(":")
    if kind.startswith("past#"):
        return _read_past(agent, text)
    if not sign or not agent.isidentifier() or kind not in ("past", "model", "endpoint") or bool(where) == (kind == "past"):
        raise ConfigError(FLAG, text, "does not say who plays which agent", FORMS)
    if kind == "past":
        return PartnerSpec(agent=agent, kind="past")
    if kind == "model":
        path = Path(where).expanduser()
        if not path.exists() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
            raise ConfigError(FLAG, text, "no such directory", f"Looked for {path.absolute()}.")
        return PartnerSpec(agent=agent, kind="model", where=str(path.absolute()) if path.exists() else where)
    address, _, fragment = where.partition("#")
    options, parts = dict(parse_qsl(fragment)), urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or set(options) - set(OPTIONS) or "model" not in options:
        raise ConfigError(FLAG, text, "is not the address of a service with the name of its model", FORMS)
    return PartnerSpec(agent=agent, kind="endpoint", where=address.rstrip("/"), options=options)

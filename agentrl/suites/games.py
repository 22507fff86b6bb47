"""Games of gem and TextArena as an agent's environment: ``--agent gem:ID`` and ``--agent textarena:ID`` need no file.

See https://github.com/axon-rl/gem and https://github.com/LeonGuertler/TextArena. The players of a game for several are the
agents of an episode.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepState
from agentrl.env.whole_text import whole_text
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import SEEDS, EpisodeRandom, SuiteEnv, check_known, class_name, import_suite, refused, split_spec, take_count

NO_NEWS = "Your turn."

_Game = TypeVar("_Game", bound=SuiteEnv)


class GemEnv(SuiteEnv):
    """One episode of a gem environment, with unchanged observations, rewards, ``terminated`` and ``truncated``.

    Each observation is sent as one message, followed by gem's suffix. gem's own wrappers, which
    repeat the history in every observation, are not used: the model's context holds the history already.
    """

    suite = "gem"

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the environment."""
        self._random = EpisodeRandom(state.seed)
        with self._random.in_force():
            self._env = self.make()
            observation, info = self._env.reset(seed=state.seed % SEEDS)
        return ResetResult(_message(observation, info))

    def step(self, state: StepState) -> StepResult:
        """Pass the model's text to gem, which finds the action in it."""
        with self._random.in_force():
            observation, reward, terminated, truncated, info = self._env.step(state.action_text)
        over = bool(terminated or truncated)
        text = None if over else _message(observation, info)
        return StepResult(float(reward), text, terminated=bool(terminated), truncated=bool(truncated))

    def close(self) -> None:
        """Let go of the environment."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()


def load_gem(spec: str) -> type[GemEnv]:
    """Return the class for ``gem:ID[?option=value&...]``: ``num_tasks``, or keyword arguments of the environment."""
    cls, _ = _suite_class(spec, GemEnv, "gem")
    try:
        with EpisodeRandom(0).in_force():
            cls.make().reset(seed=0)
    except Exception as error:  # whatever the environment's constructor raises, a download that fails among it
        raise refused(spec, "making it", error, "Options are those of its class; some environments download data.") from error
    return cls


def _suite_class(spec: str, base: type[_Game], suite: str) -> tuple[type[_Game], dict[str, Any]]:
    """Return the class of a specification and its options, those of the suite's `make`; `EnvLoadError` if the suite cannot make it."""
    env_id, options = split_spec(spec)
    module = suite.lower()
    import_suite(spec, f"{module}.envs", module)
    check_known(spec, suite, env_id, importlib.import_module(f"{module}.envs.registration").ENV_REGISTRY)
    name = env_id.partition("-v")[0] if suite == "TextArena" else env_id.rpartition(":")[2]
    attributes = {"env_id": env_id, "env_options": options, "num_tasks": take_count(spec, options, "num_tasks"), "__module__": __name__}
    return type(class_name(name, base.__name__), (base,), attributes), options


def _message(observation: Any, info: Mapping[str, Any]) -> str:
    parts = (whole_text(observation).strip(), str(info.get("suffix") or "").strip())
    return "\n".join(part for part in parts if part)


class TextArenaEnv(SuiteEnv):
    """One game. A player reads what happened since its last turn; rewards come at the end of the game.

    Attributes:
        agents: ``player0``, ``player1``, ... in TextArena's numbering; empty for a game with one player.
    """

    suite = "textarena"
    agents: ClassVar[Sequence[str]] = ()

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the game."""
        self._random = EpisodeRandom(state.seed)
        with self._random.in_force():
            self._env = self.make()
            self._env.reset(num_players=max(1, len(self.agents)), seed=state.seed % SEEDS)
            agent, text = self._news()
        return ResetResult(text, agent=agent)

    def step(self, state: StepState) -> StepResult:
        """Pass the model's text to the game, which finds the move in it and names the next player."""
        with self._random.in_force():
            done, _ = self._env.step(action=state.action_text)
            if not done:
                agent, text = self._news()
                return StepResult(0.0, text, agent=agent)
            # TextArena gives the rewards when a game is closed.
            rewards, info = self._env.close()
        invalid = [float(bool(info[player].get("invalid_move"))) for player in range(max(1, len(self.agents)))]
        ending = {"invalid_move": max(invalid)}
        if self.agents:
            ending |= {f"invalid_move_{name}": made for name, made in zip(self.agents, invalid, strict=True)}
            named = {name: float(rewards[player]) for player, name in enumerate(self.agents)}
            return StepResult(terminated=True, rewards=named, info=ending)
        return StepResult(float(rewards[0]), terminated=True, info=ending)

    def _news(self) -> tuple[str | None, str]:
        """Return the next player and the messages it has received since its last turn, without its own."""
        from textarena import GAME_ID, ObservationType

        game = _game(self._env)
        player, messages = game.get_observation()
        told = []
        for sender, text, kind in messages:
            echo = kind == ObservationType.PLAYER_ACTION and not self.agents  # some games repeat a move as theirs
            if sender != player and not echo and isinstance(text, str):  # some mix up whose move and what move it is
                told.append(text.strip() if sender == GAME_ID else f"[{game.state.role_mapping.get(sender, sender)}] {text.strip()}")
        return (self.agents[player] if self.agents else None), "\n".join(filter(None, told)) or NO_NEWS

    def close(self) -> None:
        """Let go of the game."""
        self._env = None


def load_textarena(spec: str) -> type[TextArenaEnv]:
    """Return the class for ``textarena:ID[?option=value&...]``: ``num_tasks``, ``players``, or keyword arguments of the game.

    By default one plays if the game can be played alone, else two.
    """
    cls, options = _suite_class(spec, TextArenaEnv, "TextArena")
    players = take_count(spec, options, "players")
    count = _count_players(spec, cls, (1, 2) if players is None else (players,))
    cls.agents = tuple(f"player{player}" for player in range(count)) if count > 1 else ()
    return cls


def _count_players(spec: str, cls: type[TextArenaEnv], counts: Sequence[int]) -> int:
    """Return the first of `counts` that the game accepts; begins a game, so that errors appear before anything heavy starts."""
    from textarena import SinglePlayerState

    wants = "a game for one is not for several" if counts[0] > 1 else "it is no game for one"
    for count in counts:
        try:
            with EpisodeRandom(0).in_force():
                env = cls.make()
                env.reset(num_players=count, seed=0)
        except Exception as error:  # whatever the game raises
            if not isinstance(error, AssertionError | ValueError) or "player" not in str(error).lower():
                raise refused(spec, "beginning a game", error, "Options are those of the game's class.") from error
            wants = str(error)
        else:
            if isinstance(_game(env).state, SinglePlayerState) == (count == 1):
                return count
    problem = f"cannot be played by {' or '.join(map(str, counts))}: {wants}"
    raise EnvLoadError(FLAG, spec, problem, "Say how many play: textarena:ID?players=3, for example.")


def _game(env: Any) -> Any:
    """Return the game without wrappers; most wrappers repeat the whole history in each observation."""
    from textarena import Wrapper

    while isinstance(env, Wrapper):
        env = env.env
    return env


GEM = Scheme(
    name="gem",
    load=load_gem,
    is_remote=True,
    form="gem:ID",
    about="[gem](https://github.com/axon-rl/gem): games, and questions from data sets",
    needs="`pip install 'agentrl[gem]'`",
)
TEXTARENA = Scheme(
    name="textarena",
    load=load_textarena,
    is_remote=True,
    form="textarena:ID",
    about="[TextArena](https://github.com/LeonGuertler/TextArena): games in words, for one player or several",
    needs="`pip install 'agentrl[textarena]'`",
)

"""Games of TextArena as an agent's environment; see https://github.com/LeonGuertler/TextArena.

``--agent textarena:GuessTheNumber-v0`` needs no file. The players of a game for several are the agents of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError
from agentrl.env.adapters.specs import (
    FLAG,
    SEEDS,
    EpisodeRandom,
    SuiteEnv,
    check_known,
    class_name,
    import_suite,
    refused,
    split_spec,
    take_count,
)
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepState

EXTRA = "textarena"
NO_NEWS = "Your turn."


class TextArenaEnv(SuiteEnv):
    """One game. A player reads what happened since its last turn; rewards come at the end of the game.

    Attributes:
        agents: ``player0``, ``player1``, ... in TextArena's numbering; empty for a game with one player.
    """

    agents: ClassVar[Sequence[str]] = ()

    @classmethod
    def make(cls) -> Any:
        """Make the game; `reset` does so while the global generators are the episode's."""
        import textarena

        return textarena.make(cls.env_id, **cls.env_options)

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
            rewards, info = self._env.close()
        ending = {"invalid_move": float(any(info[player].get("invalid_move") for player in range(max(1, len(self.agents)))))}
        if self.agents:
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
    """Return the class for ``textarena:ID`` or ``textarena:ID?option=value&...``.

    Options are keyword arguments of the game, ``num_tasks`` and ``players`` (default: 1 if the game can be played alone,
    else 2).

    Raises:
        EnvLoadError: If TextArena is not installed, has no such game, or cannot begin it with these options.
    """
    env_id, options = split_spec(spec)
    import_suite(spec, "textarena", EXTRA)
    from textarena.envs.registration import ENV_REGISTRY

    check_known(spec, "TextArena", env_id, ENV_REGISTRY)
    num_tasks, players = take_count(spec, options, "num_tasks"), take_count(spec, options, "players")
    attributes = {"env_id": env_id, "env_options": options, "num_tasks": num_tasks, "__module__": __name__}
    cls: type[TextArenaEnv] = type(class_name(env_id.partition("-v")[0], "TextArenaEnv"), (TextArenaEnv,), attributes)
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

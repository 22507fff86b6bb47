"""Games of TextArena for one player as an agent's environment; see https://github.com/LeonGuertler/TextArena.

``--agent textarena:GuessTheNumber-v0`` needs no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Task
from agentrl.env.adapters.random_state import SEEDS, EpisodeRandom
from agentrl.env.adapters.specs import FLAG, check_known, class_name, import_suite, refused, split_spec, take_count
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState

EXTRA = "textarena"
PLAYER = 0


class TextArenaEnv(AgentInstance):
    """One game. The model is told what is new since its last turn; the reward comes at the end of the game.

    Attributes:
        env_id: Name that `textarena.make` knows.
        env_options: Its keyword arguments.
        num_tasks: Number of tasks, with the seeds 0, 1, ...; `None`: no end of them, with seeds derived from the run's.
    """

    env_id: ClassVar[str] = ""
    env_options: ClassVar[Mapping[str, Any]] = {}
    num_tasks: ClassVar[int | None] = None

    _env: Any = None
    _random: EpisodeRandom

    @classmethod
    def make(cls) -> Any:
        """Make the game; `reset` does so while the global generators are the episode's."""
        import textarena

        return textarena.make(cls.env_id, **cls.env_options)

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per seed; every member of a group plays the same one."""
        if cls.num_tasks is None:
            return (Task(f"{cls.env_id}, episode {number}", id=str(number)) for number in itertools.count())
        return [Task(f"{cls.env_id}, seed {seed}", id=str(seed), seed=seed) for seed in range(cls.num_tasks)]

    def reset(self, state: ResetState) -> ResetResult:
        """Make and seed the game."""
        self._random = EpisodeRandom(state.seed)
        with self._random.in_force():
            self._env = self.make()
            self._env.reset(num_players=1, seed=state.seed % SEEDS)
            text = _news(self._env)
        return ResetResult(text)

    def step(self, state: StepState) -> StepResult:
        """Pass on what the model wrote; the game reads the move out of it."""
        with self._random.in_force():
            done, _ = self._env.step(action=state.action_text)
            if not done:
                return StepResult(0.0, _news(self._env))
            rewards, info = self._env.close()
        invalid = float(bool(info[PLAYER].get("invalid_move")))
        return StepResult(float(rewards[PLAYER]), terminated=True, info={"invalid_move": invalid})

    def close(self) -> None:
        """Let go of the game."""
        self._env = None


def load_textarena(spec: str) -> type[TextArenaEnv]:
    """The class for ``textarena:ID`` or ``textarena:ID?option=value&...``.

    Options are keyword arguments of the game, or ``num_tasks``.

    Raises:
        EnvLoadError: If TextArena is not installed, has no such game, cannot make it with these options, or if it takes
            several players.
    """
    env_id, options = split_spec(spec)
    import_suite(spec, "textarena", EXTRA)
    from textarena.envs.registration import ENV_REGISTRY

    check_known(spec, "TextArena", env_id, ENV_REGISTRY)
    num_tasks = take_count(spec, options, "num_tasks")
    attributes = {"env_id": env_id, "env_options": options, "num_tasks": num_tasks, "__module__": __name__}
    cls = type(class_name(env_id.partition("-v")[0], "TextArenaEnv"), (TextArenaEnv,), attributes)
    _try(spec, cls)
    return cls


def _try(spec: str, cls: type[TextArenaEnv]) -> None:
    """Begin a game, so that a wrong option, missing data or a second player is known before anything heavy is started."""
    from textarena import SinglePlayerState

    several = EnvLoadError(FLAG, spec, "is a game for several players", "Choose a game for one player; docs/suites.md lists them.")
    try:
        with EpisodeRandom(0).in_force():
            env = cls.make()
            env.reset(num_players=1, seed=0)
            alone = isinstance(_game(env).state, SinglePlayerState)
    except Exception as error:  # whatever the game raises
        if isinstance(error, AssertionError | ValueError) and "player" in str(error).lower():  # each says in its own way how many it wants
            raise several from error
        raise refused(spec, "beginning a game", error, "Options are those of the game's class.") from error
    if not alone:
        raise several


def _game(env: Any) -> Any:
    """The game without its wrappers; most of them repeat the whole history in each observation."""
    from textarena import Wrapper

    while isinstance(env, Wrapper):
        env = env.env
    return env


def _news(env: Any) -> str:
    """What the game has said since the last turn, without the player's own words, which some games repeat as theirs."""
    from textarena import ObservationType

    _, messages = _game(env).get_observation()
    told = [text.strip() for sender, text, kind in messages if sender != PLAYER and kind != ObservationType.PLAYER_ACTION]
    return "\n".join(filter(None, told))

"""What a player scores that picks every action at random, in the gymnasium environments as `GymEnv` plays them."""

from random import Random

from agentrl import ResetState, StepState
from agentrl.suites.load import load_agent

ENVIRONMENTS = {"gym:FrozenLake-v1?is_slippery=False": 16, "gym:Blackjack-v1": 16}  # specification: turns at most
EPISODES = 5000


def play(spec: str, max_turns: int, seed: int) -> tuple[float, float]:
    """Reward and score of one episode."""
    cls, rng, reward, score = load_agent(spec).load(), Random(seed), 0.0, None
    env = cls()
    env.reset(ResetState(seed=seed))
    for _ in range(max_turns):
        result = env.step(StepState(action_text=rng.choice(list(cls.actions))))
        reward, score = reward + result.reward, result.score
        if result.terminated or result.truncated:
            break
    env.close()
    return reward, min(max(reward, 0.0), 1.0) if score is None else score


def main() -> None:
    """Print one line per environment."""
    for spec, max_turns in ENVIRONMENTS.items():
        results = [play(spec, max_turns, seed) for seed in range(EPISODES)]
        reward, score = (sum(column) / EPISODES for column in zip(*results, strict=True))
        print(f"{spec:<40} reward {reward:+.3f}  score {score:.3f}  ({EPISODES} episodes of at most {max_turns} turns)")


if __name__ == "__main__":
    main()

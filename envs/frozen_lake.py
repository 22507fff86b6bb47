"""Frozen Lake: an environment of gymnasium, played in words.

It teaches how a gymnasium environment becomes one for a language model. `env_id` and `env_options` say which one to
make, `actions` gives each action a word, and two methods put what gymnasium returns into text. `GymEnv` does the rest: a
game of its own for every episode, seeds, rewards, and another try for an answer that names no move. The whole map is
shown in every turn, so that the model need not work out where it is. Run it with::

    agentrl train --agent envs/frozen_lake.py --async --max-turns 16 --max-new-tokens 8 --n-samples-per-prompt 32

    user       P you, F ice, H hole, G goal.
               PFFF
               FHFH
               FFFH
               HFFG
               Move: up, down, left or right?
    assistant  down

The same without a file: ``--agent 'gym:FrozenLake-v1?is_slippery=False'``.
"""

from typing import Any

from agentrl import GymEnv

WIDTH = 4


class FrozenLake(GymEnv):
    """Cross the ice to the goal in the corner; only the goal is paid."""

    env_id = "FrozenLake-v1"
    env_options = {"is_slippery": False, "map_name": "4x4"}
    actions = {"left": 0, "down": 1, "right": 2, "up": 3}

    def instructions(self) -> str:
        """The meaning of the letters, before the first observation."""
        return "P you, F ice, H hole, G goal."

    def ask(self) -> str:
        """Also the answer to a turn that names no move."""
        return "Move: up, down, left or right?"

    def format_observation(self, observation: Any) -> str:
        """Gymnasium's observation is the number of a tile, counted from the top left corner row by row."""
        rows = [[tile.decode() for tile in row] for row in self.env.unwrapped.desc]
        rows[observation // WIDTH][observation % WIDTH] = "P"
        return "\n".join([*("".join(row) for row in rows), self.ask()])

"""An engine of one's own: it answers from a table, whatever the question, and has no model.

agentrl train --agent envs/arithmetic.py --engine examples/own_engine.py:Table --max-mismatch none
"""

import math
import random

from transformers import AutoTokenizer

import agentrl


class Table(agentrl.Engine):
    """Answers with these probabilities."""

    takes_weights = False  # training changes nothing in the table

    async def start(self):
        """Look up the tokens of the answers."""
        await super().start()
        tokenizer = AutoTokenizer.from_pretrained(self.settings.model.model)
        self.table = {tokenizer.encode(answer)[0]: share for answer, share in {"2": 0.5, "4": 0.25, "8": 0.25}.items()}

    def sample(self, prompt_ids, sampling):
        """Draw an answer of one token; the same seed draws the same one."""
        [token] = random.Random(sampling.seed).choices(list(self.table), list(self.table.values()))
        return [token, self.end_token_ids[0]], [math.log(self.table[token]), 0.0]

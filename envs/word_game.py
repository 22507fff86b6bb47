"""A word game: find the secret word, guess by guess, from hints about single letters.

It teaches a game of several turns in which everything the model needs is said. Every game has a list of words of its own, and
the hint for a guess tells each letter apart: in its place, elsewhere in the word, or not in it. What is easily got wrong is a
letter that a guess has twice and the secret once: only one of the two may count. Answers without a word of the list cost
no guess but a little reward, and a second one ends the game. A lost game pays something for letters that were placed right, so that
the members of a group differ before the first one wins; the score counts wins alone. Run it with::

    agentrl train --agent envs/word_game.py --async --max-turns 6 --model Qwen/Qwen3-0.6B

    user       Find my word, in 4 guesses: adore, beach, cabin, eagle, ...
    assistant  eagle
    user       e a - - -
    assistant  beach

It is a game for a pretrained model; the tiny one that comes with agentrl does not even name a word of the list.
"""

import re
from collections import Counter
from collections.abc import Iterable
from random import Random

from agentrl import AgentInstance, StepResult, StepState, Task

LIST = """
about actor adore agent alarm angle apple arrow badge baker beach berry blaze board brave bread cabin candy chair cheer
chess clock cloud coast crane dance delta diver dream eagle earth elbow enter fable fence field flame frost fruit
ghost giant glass grape green habit happy heart honey horse igloo image jelly jewel judge kayak knife label lemon level
light lucky maple medal melon mimic model money mouse night noble ocean olive onion otter paint panda paper pearl piano
pilot plant queen radio raven river robot salad scene sheep silly skill sleep smile snake spoon stone sugar table tiger
toast tooth tower train tulip uncle vivid voice wagon water whale wheel witch world yacht zebra
"""
WORDS = LIST.split()
LISTED, GAMES_PER_WORD = 12, 5
MAX_GUESSES, MAX_INVALID = 4, 2
INVALID, PLACED = -0.1, 0.1


class WordGame(AgentInstance):
    """Find one of twelve words within four guesses."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Five lists around every word; the label is the secret."""
        return [make_task(word, number) for word in WORDS for number in range(GAMES_PER_WORD)]

    def reset(self, state: object) -> None:
        """Begin with nothing placed."""
        self.guesses, self.invalid, self.placed = 0, 0, set()

    def step(self, state: StepState) -> StepResult:
        """The last word of the list that the answer names is the guess."""
        words = [word for word in re.findall(r"[a-z]+", state.action_text.lower()) if word in state.task.metadata["words"]]
        if not words:
            self.invalid += 1
            return StepResult(INVALID, "Name a word of the list.", terminated=self.invalid == MAX_INVALID, score=0.0, info={"invalid": 1.0})
        guess, secret = words[-1], state.label
        self.guesses += 1
        self.placed |= {place for place in range(len(secret)) if guess[place] == secret[place]}
        if guess == secret:
            return StepResult(1.0, terminated=True, score=1.0, info={"invalid": 0.0, "guesses": self.guesses})
        if self.guesses == MAX_GUESSES:
            return StepResult(PLACED * len(self.placed), terminated=True, score=0.0, info={"invalid": 0.0})
        return StepResult(0.0, hint(guess, secret), score=0.0, info={"invalid": 0.0})


def hint(guess: str, secret: str) -> str:
    """For each letter: upper case in its place, lower case elsewhere in the word, ``-`` not in it, or not that often.

    Letters in their place count first, then the others from the left, each at most as often as the secret has it.
    """
    left = Counter(letter for letter, own in zip(secret, guess, strict=True) if letter != own)
    marks = []
    for letter, right in zip(guess, secret, strict=True):
        if letter == right:
            marks.append(letter.upper())
        else:
            marks.append(letter if left[letter] > 0 else "-")
            left[letter] -= 1
    return " ".join(marks)


def make_task(secret: str, number: int) -> Task:
    """A game for `secret`, in a list of words that depends on `number`."""
    others = Random(f"{secret}-{number}").sample([word for word in WORDS if word != secret], LISTED - 1)
    words = sorted([secret, *others])
    rules = "For each letter I say: upper case in its place, lower case elsewhere in the word, - not in it."
    prompt = f"Find my word, in {MAX_GUESSES} guesses: {', '.join(words)}.\n{rules}"
    return Task(prompt, label=secret, id=f"{secret}-{number}", metadata={"words": words})

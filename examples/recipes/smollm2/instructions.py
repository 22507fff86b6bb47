"""Instructions about the form of a short answer, for a small pretrained model: six kinds, each checked in plain Python.

SmolLM2 with 135 million parameters understands such instructions and seldom follows them: it miscounts, adds remarks, or invents values.
Each instruction has four conditions. They earn half of the reward in equal parts, and an answer that meets all of them earns the other
half; the score counts only the latter. The evaluation has the same kinds of instruction about things that training never mentions. It is
the form that is rewarded: a sentence need not be a good one. Run it with::

    agentrl train --config examples/recipes/smollm2/recipe.toml

    user       Name 3 fruits, separated by commas.
    assistant  apple, pear, cherry
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from agentrl import AgentInstance, StepResult, StepState, Task

SHOTS = {
    "Name 2 trees, separated by commas.": "oak, birch",
    "Write a numbered list of 3 metals.": "1. iron\n2. copper\n3. tin",
    'Write the word "sun" 3 times, separated by spaces.': "sun sun sun",
    "Write in capital letters: a quiet lake": "A QUIET LAKE",
    "Write as JSON: name Anna, city Oslo": '{"name": "Anna", "city": "Oslo"}',
    "Write a sentence of 5 words with the word sea.": "The sea is very deep.",
}
PROMPT = [
    {"role": "system", "content": "Follow the instruction exactly. Write only the answer."},
    *({"role": role, "content": text} for pair in SHOTS.items() for role, text in zip(("user", "assistant"), pair, strict=True)),
]

WORDS = "river dog moon winter bread music garden train cat storm book forest teacher bridge horse kitchen island summer clock farmer"
NEW_WORDS = "mountain coffee rabbit window autumn sailor castle feather"
QUALITIES = "cold old big red small happy dark warm new tall"
NEW_QUALITIES = "green strange lonely soft"
NAMES = "Peter Maria John Lucy Paul Emma Tom Sara David Alice"
NEW_NAMES = "Henry Clara Oscar Julia"
CITIES = "Rome Paris London Berlin Tokyo Madrid Cairo Boston Lima Delhi"
NEW_CITIES = "Vienna Athens Dublin Lisbon"
THINGS = {
    "fruits": "apple banana cherry grape lemon lime mango melon orange peach pear pineapple plum strawberry kiwi fig raspberry "
    "blueberry blackberry apricot watermelon papaya coconut date pomegranate grapefruit cranberry",
    "colours": "red green blue yellow orange purple pink black white brown grey gray violet indigo gold silver turquoise beige cyan",
    "animals": "dog cat horse cow pig sheep goat lion tiger bear elephant giraffe zebra monkey rabbit mouse rat wolf fox deer panda "
    "kangaroo whale dolphin shark snake frog eagle owl penguin chicken duck bird fish leopard cheetah gorilla crocodile camel",
    "countries": "france germany italy spain portugal england ireland scotland norway sweden denmark finland poland russia china japan "
    "india brazil canada mexico australia egypt kenya nigeria greece turkey argentina chile peru america belgium austria switzerland",
    "vegetables": "carrot potato tomato onion cabbage broccoli spinach lettuce pea bean cucumber pepper garlic leek celery corn kale "
    "cauliflower pumpkin radish turnip beet beetroot zucchini eggplant asparagus",
}
NEW_THINGS = {
    "days of the week": "monday tuesday wednesday thursday friday saturday sunday",
    "planets": "mercury venus earth mars jupiter saturn uranus neptune",
}


class Instructions(AgentInstance):
    """One instruction, one answer, judged by four conditions."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Instructions about the things to train on."""
        return make_tasks(WORDS, QUALITIES, NAMES, CITIES, THINGS)

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """The same kinds of instruction about other things."""
        return make_tasks(NEW_WORDS, NEW_QUALITIES, NEW_NAMES, NEW_CITIES, NEW_THINGS)

    def step(self, state: StepState) -> StepResult:
        """Judge the answer."""
        kind, *about = state.label
        met = CHECKS[kind](state.action_text.strip(), *about)
        right = all(met)
        return StepResult(reward=sum(met) / len(met) / 2 + right / 2, terminated=True, score=float(right))


def make_tasks(words: str, qualities: str, names: str, cities: str, things: Iterable[str]) -> Iterator[Task]:
    """Make as many tasks of every kind.

    Args:
        words: Things to write about, with spaces between them.
        qualities: Adjectives for them.
        names: Names of people.
        cities: The cities where they live.
        things: Kinds of things to list.
    """
    quality, person, city_of = (texts.split() for texts in (qualities, names, cities))
    for i, word in enumerate(words.split()):
        count = 2 + i % 4
        yield _task("repeat", f'Write the word "{word}" {count} times, separated by spaces.', word, count)
        yield _task("sentence", f"Write a sentence of {count + 2} words with the word {word}.", word, count + 2)
        phrase = f"the {quality[i % len(quality)]} {word}"
        yield _task("capitals", f"Write in capital letters: {phrase}", phrase)
        name, city = person[i % len(person)], city_of[(i + i // len(city_of)) % len(city_of)]
        yield _task("json", f"Write as JSON: name {name}, city {city}", name, city)
    for kind in things:
        for count in (2, 3, 4, 5):
            yield _task("commas", f"Name {count} {kind}, separated by commas.", kind, count)
            yield _task("numbered", f"Write a numbered list of {count} {kind}.", kind, count)


def _task(kind: str, instruction: str, *about: str | int) -> Task:
    name = "-".join(str(part) for part in (kind, *about)).replace(" ", "-")
    return Task([*PROMPT, {"role": "user", "content": instruction}], label=(kind, *about), id=name, metadata={"kind": kind})


def _repeat(answer: str, word: str, count: int) -> list[bool]:
    words = answer.lower().split()
    return [word in words, set(words) == {word}, abs(len(words) - count) <= 1, words == [word] * count]


def _sentence(answer: str, word: str, count: int) -> list[bool]:
    words = re.findall(r"[a-z'-]+", answer.lower())
    one = answer.endswith(".") and not re.search(r"[.!?\n]", answer[:-1])
    return [words.count(word) == 1, one, abs(len(words) - count) <= 1, len(words) == count]


def _capitals(answer: str, phrase: str) -> list[bool]:
    wanted, words = phrase.upper().split(), answer.rstrip(".!").split()
    return [answer.isupper(), words[:2] == wanted[:2], words[-1:] == wanted[-1:], words == wanted]


def _json(answer: str, name: str, city: str) -> list[bool]:
    try:
        value = json.loads(answer)
    except ValueError:
        value = None
    found = value if isinstance(value, dict) else {}
    return [answer.startswith("{"), isinstance(value, dict), set(found) == {"name", "city"}, found == {"name": name, "city": city}]


def _commas(answer: str, kind: str, count: int) -> list[bool]:
    return ["," in answer and "\n" not in answer, *_members(answer.rstrip(".").split(","), kind, count)]


def _numbered(answer: str, kind: str, count: int) -> list[bool]:
    lines = answer.splitlines()
    numbered = all(line.startswith(f"{i}. ") for i, line in enumerate(lines, 1))
    return [bool(lines) and numbered, *_members([re.sub(r"^\d+\. ", "", line) for line in lines], kind, count)]


def _members(items: Sequence[str], kind: str, count: int) -> list[bool]:
    known = {**THINGS, **NEW_THINGS}[kind].split()
    plain = [item.strip().lower() for item in items]
    right = [not {item, item.removesuffix("s"), item.removesuffix("es"), re.sub("ies$", "y", item)}.isdisjoint(known) for item in plain]
    return [any(right), all(right) and 0 < len(plain) == len(set(plain)), len(items) == count]


CHECKS = {"repeat": _repeat, "sentence": _sentence, "capitals": _capitals, "json": _json, "commas": _commas, "numbered": _numbered}

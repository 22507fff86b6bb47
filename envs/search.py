"""Questions that take several look-ups in a small collection of documents.

It teaches an environment in which the model looks things up over several turns: `search` gives titles, `read` a document,
and each question needs two documents, of which the first names the second. The people and places are invented, so no
model knows them beforehand, and a constant answer wins one task in 27. The right answer earns 1, less 0.05 for each look-up
beyond the four that are enough. It is a task for a pretrained model. Run it with::

    agentrl train --agent envs/search.py --async --model Qwen/Qwen3-0.6B

    user       In which town was the builder of the lighthouse of Tarn Point born?
    assistant  <tool_call>{"name": "search", "arguments": {"query": "lighthouse of Tarn Point"}}</tool_call>
    tool       ["Tarn Point", "Gull Head"]
    assistant  <tool_call>{"name": "read", "arguments": {"title": "Tarn Point"}}</tool_call>
    tool       The lighthouse of Tarn Point was built in 1871 by Edda Brook. ...
    assistant  <tool_call>{"name": "read", "arguments": {"title": "Edda Brook"}}</tool_call>
    tool       Edda Brook, born in Marlow Ferry in 1838, ...
    assistant  Marlow Ferry
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl import StepResult, StepState, Task, ToolEnv

LIGHTHOUSES = {
    "Tarn Point": (1871, "Edda Brook", 31), "Gull Head": (1868, "Ivo Strand", 24), "Cape Wren": (1902, "Nela Quist", 40),
    "Otter Rock": (1889, "Piet Holm", 18), "North Skerry": (1911, "Runa Falk", 27), "Salt Island": (1879, "Jory Pell", 22),
    "Black Ness": (1895, "Anka Voss", 35), "Heron Bar": (1920, "Lars Tove", 16), "Stone Elbow": (1884, "Mira Kett", 29),
    "Windy Spit": (1907, "Odo Rask", 21), "Three Sisters": (1915, "Tilde Munk", 33), "Far Shoal": (1899, "Bram Lund", 26),
}  # fmt: skip
"""Place -> year of building, builder, height in metres."""

PEOPLE = {
    "Edda Brook": ("Marlow Ferry", 1838, "mathematics"), "Ivo Strand": ("Eastholt", 1829, "botany"),
    "Nela Quist": ("Dunmere", 1861, "law"), "Piet Holm": ("Corrow", 1850, "music"), "Runa Falk": ("Vell", 1874, "medicine"),
    "Jory Pell": ("Hazelby", 1841, "chemistry"), "Anka Voss": ("Sorrel", 1858, "history"), "Lars Tove": ("Kingsand", 1880, "geology"),
    "Mira Kett": ("Upper Lathe", 1847, "painting"), "Odo Rask": ("Fennick", 1866, "astronomy"),
    "Tilde Munk": ("Brackwater", 1878, "drawing"), "Bram Lund": ("Ostley", 1855, "philosophy"),
}  # fmt: skip
"""Builder -> town of birth, year of birth, subject studied."""

DOCUMENTS = {
    **{
        place: f"The lighthouse of {place} was built in {year} by {builder}. It is {height} metres high. Ships pass it on their way north."
        for place, (year, builder, height) in LIGHTHOUSES.items()
    },
    **{
        name: f"{name}, born in {town} in {year}, studied {subject} before turning to the building of lighthouses."
        for name, (town, year, subject) in PEOPLE.items()
    },
}
TITLES = {title.lower(): title for title in DOCUMENTS}

QUESTIONS = ("In which town was", "In which year was", "Which subject was studied by")
ENDS = (" born", " born", "")
ENOUGH, COST, HITS = 4, 0.05, 3


def search(query: str) -> list[str]:
    """Find documents; the titles of the three that share most words with the query.

    Args:
        query: Words to look for.
    """
    wanted = set(_words(query))
    hits = {title: len(wanted & set(_words(f"{title} {text}"))) for title, text in DOCUMENTS.items()}
    return [title for title in sorted(hits, key=lambda title: -hits[title]) if hits[title]][:HITS]


def read(title: str) -> str:
    """Read a document.

    Args:
        title: As `search` gives it.
    """
    return DOCUMENTS[TITLES[title.strip().lower()]] if title.strip().lower() in TITLES else f"There is no document {title[:50]!r}."


class Search(ToolEnv):
    """Look things up as often as needed, then answer."""

    tools = (search, read)
    lookups = 0

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Questions about the builders of the lighthouses; a quarter of the lighthouses is kept for `eval_tasks`."""
        return _tasks(list(LIGHTHOUSES)[3:])

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """The same questions about the other lighthouses, so that answers learnt by heart do not help."""
        return _tasks(list(LIGHTHOUSES)[:3])

    async def step(self, state: StepState) -> Any:
        """Count the look-ups."""
        self.lookups += len(self.parse_calls(state.action_text))
        return await super().step(state)

    def judge(self, state: StepState) -> StepResult:
        """1 for the right answer and no other one, less a little for needless look-ups."""
        named = [answer for answer in ANSWERS if re.search(rf"\b{re.escape(answer)}\b", state.action_text, re.IGNORECASE)]
        right = named == [state.label]
        reward = max(0.0, 1.0 - COST * max(0, self.lookups - ENOUGH)) if right else 0.0
        return StepResult(reward, terminated=True, score=float(right), info={"lookups": float(self.lookups)})


def _tasks(places: Sequence[str]) -> list[Task]:
    return [
        Task(f"{question} the builder of the lighthouse of {place}{end}?", label=str(fact), id=f"{place}-{number}")
        for place in places
        for number, (question, end, fact) in enumerate(zip(QUESTIONS, ENDS, PEOPLE[LIGHTHOUSES[place][1]], strict=True))
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"\w{3,}", text.lower())


ANSWERS = [str(fact) for facts in PEOPLE.values() for fact in facts]
"""All that is ever an answer; whoever names several of them has not answered."""

"""Questions about a small shop, answered by queries to a database that is different in every task.

It teaches tools that share the episode's state: `list_tools` returns a bound method, and the database behind it is made
in `reset` and closed in `close`. It also shows how to let a model near something that could be misused: the database may
only be read, a query may take so many steps and return so many rows, and what goes wrong is told to the model. It is a
task for a pretrained model; the tiny one that comes with agentrl cannot write SQL. Run it with::

    agentrl train --agent envs/sql.py --async --model Qwen/Qwen3-0.6B

    user       Table sales(item, city, amount). How many apples were sold in Lima?
    assistant  <tool_call>{"name": "query", "arguments": {"sql": "SELECT SUM(amount) FROM sales WHERE ..."}}</tool_call>
    tool       [[17]]
    assistant  17
"""

import re
import sqlite3
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from agentrl import ResetResult, ResetState, StepState, Task, ToolEnv

ITEMS = ("apple", "pear", "plum", "fig")
CITIES = ("Lima", "Oslo", "Rome", "Kyiv")
QUESTIONS = {
    "How many {item}s were sold in {city}?": "SELECT SUM(amount) FROM sales WHERE item='{item}' AND city='{city}'",
    "How many {item}s were sold in all?": "SELECT SUM(amount) FROM sales WHERE item='{item}'",
    "How large was the largest sale in {city}?": "SELECT MAX(amount) FROM sales WHERE city='{city}'",
    "In which city were most {item}s sold?": "SELECT city FROM sales WHERE item='{item}' GROUP BY city ORDER BY SUM(amount) DESC, city",
}
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
MAX_ROWS, MAX_BYTES, MAX_STEPS = 20, 100_000, 1_000_000


class Sql(ToolEnv):
    """Ask the database as often as needed, then answer."""

    database: sqlite3.Connection | None = None

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Four questions about each of 100 databases; the label is what the right query returns."""
        return [make_task(seed, number) for seed in range(100) for number in range(len(QUESTIONS))]

    def reset(self, state: ResetState) -> ResetResult:
        """Fill the database, then let nobody write to it any more."""
        self.database = open_shop(state.task.metadata["shop"])
        self.database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
        self.database.set_progress_handler(lambda: 1, MAX_STEPS)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        return super().reset(state)

    def list_tools(self) -> Sequence[Any]:
        """One tool, bound to this episode's database."""
        return (self.query,)

    def query(self, sql: str) -> list[list[Any]]:
        """Run an SQL query on the table sales(item, city, amount) and return its first 20 rows.

        Args:
            sql: A SELECT statement for SQLite.
        """
        return [list(row) for row in self.database.execute(sql).fetchmany(MAX_ROWS)]

    def judge(self, state: StepState) -> float:
        """1 if the last number or the only city in the answer is the right one."""
        cities = [city for city in CITIES if city in state.action_text]
        if state.label in CITIES:
            return float(cities == [state.label])
        numbers = re.findall(r"-?\d+", state.action_text)
        return float(bool(numbers) and numbers[-1] == state.label)

    def close(self) -> None:
        """Let go of the database."""
        if self.database is not None:
            self.database.close()


def open_shop(seed: int) -> sqlite3.Connection:
    """A database in memory with 60 sales. Tools run on threads, so the connection is not bound to the one that made it."""
    rng, database = Random(seed), sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("CREATE TABLE sales(item TEXT, city TEXT, amount INTEGER)")
    sales = [(item, city, rng.randint(1, 20)) for item in ITEMS for city in CITIES]
    sales += [(rng.choice(ITEMS), rng.choice(CITIES), rng.randint(1, 20)) for _ in range(44)]
    database.executemany("INSERT INTO sales VALUES (?, ?, ?)", sales)
    return database


def make_task(seed: int, number: int) -> Task:
    """Question number `number` about the shop with this seed."""
    rng = Random(f"{seed}-{number}")
    words = {"item": rng.choice(ITEMS), "city": rng.choice(CITIES)}
    question, sql = list(QUESTIONS.items())[number]
    database = open_shop(seed)
    (answer, *_) = database.execute(sql.format(**words)).fetchone()
    database.close()
    prompt = f"Table sales(item, city, amount). {question.format(**words)}"
    return Task(prompt, label=str(answer), id=f"{seed}-{number}", metadata={"shop": seed})

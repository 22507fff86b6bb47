"""Service desk: serve the customers of a shop by its rules, with tools that change its database.

It teaches what decides in a conversation with tools: the state that the database is in at the end. The desk reads the rules,
asks the customer for an order's number and code, and looks the order up. It does what is wished, or says which rule forbids
it; some customers insist. The tools obey, also where a rule forbids it. The reward is 1 if the database is as the rules want
it, and the last message names what the customer has to know: an amount, a number of days, or a rule. Tasks are made from
seeds and never end; those of the evaluation have other seeds. Each episode has a copy of the database.
A script plays the customer. With `CUSTOMER=model` in the environment the customer is an agent of its own, which is not
trained; give it a partner, or the policy plays it too. The recipe ``examples/recipes/cpu/service_desk.toml`` lets the bundled
model imitate the script of a desk first, for two of the wishes. Run it with::

    agentrl train --agent envs/service_desk.py --async --model Qwen/Qwen3-0.6B
    CUSTOMER=model agentrl train --agent envs/service_desk.py --partner "customer=endpoint:http://127.0.0.1:8000/v1#model=user"

    user       I want to send my lamp back. I opened it.
    assistant  What are the number and the code of the order?
    user       The order is 417. The code is 52.
    assistant  {"tool":"order","args":[417]}
    tool       {"number": 417, "code": 52, "item": "lamp", "price": 40, "town": "Rome", "state": "delivered", "days": 3}
    assistant  {"tool":"refund","args":[417,35]}
    tool       done
    assistant  We refund 35.
    user       Thank you. GOODBYE
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, ClassVar, cast

from agentrl import Message, ResetResult, ResetState, StepResult, StepState, Task, ToolEnv

ITEMS = ["lamp", "chair", "kettle", "radio", "clock", "tent"]
TOWNS = ["Rome", "Oslo", "Lima", "Kyiv", "Cork", "Bern"]
STATES = ["open", "sent", "delivered"]
NUM_ORDERS = 6
NUM_EVAL = 100
FIRST_EVAL_SEED = 10**9
RETURN_DAYS, OPENED_FEE = 30, 5
MAX_MESSAGES = 6
END = "GOODBYE"

RULES = f"""You are the desk of a shop. Look the order up. Rules:
1 If the customer does not know its code, change nothing.
2 Cancel or move only an open order.
3 Refund only a delivered order, up to {RETURN_DAYS} days: its price, less {OPENED_FEE} if opened.
Do what is wished, then name the refund, or the days until it comes. If a rule forbids it, name the rule: rule 2.
Tools: order(number), cancel(number), refund(number, amount), move(number, town). Call: {{"tool":"order","args":[417]}}"""

WISHES = {
    "cancel": ["I want to cancel my {item}.", "Please cancel my order of a {item}."],
    "refund": ["I want to send my {item} back. {opened}", "I do not like my {item}. {opened} Can I return it?"],
    "move": ["Please send my {item} to {town}.", "I moved to {town}. Can my {item} go there?"],
    "ask": ["When does my {item} come?", "I am waiting for my {item}. How long?"],
}
OPENED = ["I did not open it.", "I opened it."]
INSISTS = ["Please make an exception.", "I am a good customer. Do it all the same."]


@dataclass(frozen=True)
class Order:
    """One row of the database. The days are those until it comes, or since it came."""

    number: int
    code: int
    item: str
    price: int
    town: str
    state: str
    days: int


Database = dict[int, Order]


@dataclass(frozen=True)
class Case:
    """A customer with a wish, as a seed makes it.

    Attributes:
        database: Order by its number, at the beginning.
        order: The order that the customer speaks of.
        code: The code that the customer gives, right or wrong.
        wish: A key of `WISHES`.
        town: The new town that the customer wants.
        opened: True if the customer opened the box.
        insists: Times that the customer does not accept a refusal.
        opening: The first words.
    """

    database: Database
    order: Order
    code: int
    wish: str
    town: str
    opened: bool
    insists: int
    opening: str

    @property
    def rule(self) -> int:
        """The rule that forbids the wish; 0 if none does."""
        order = self.order
        if self.code != order.code:
            return 1
        if self.wish in ("cancel", "move"):
            return 0 if order.state == "open" else 2
        return 3 if self.wish == "refund" and not (order.state == "delivered" and order.days <= RETURN_DAYS) else 0

    @property
    def amount(self) -> int:
        """The refund that the rules allow."""
        return self.order.price - OPENED_FEE * self.opened

    @property
    def expected(self) -> Database:
        """The database as the rules want it at the end."""
        changes: dict[str, dict[str, Any]] = {
            "cancel": {"state": "cancelled"},
            "refund": {"state": f"refunded {self.amount}"},
            "move": {"town": self.town},
            "ask": {},
        }
        return self.database if self.rule else {**self.database, self.order.number: replace(self.order, **changes[self.wish])}

    @property
    def news(self) -> str:
        """The text that the customer has to be told: a rule, a number, or nothing in particular."""
        if self.rule:
            return f"rule {self.rule}"
        return {"refund": str(self.amount), "ask": str(self.order.days), "move": str(self.order.days)}.get(self.wish, "")


def make_case(seed: int) -> Case:
    """Return the case of a seed; two in five are forbidden by a rule."""
    rng = Random(seed)
    numbers = rng.sample(range(100, 1000), NUM_ORDERS)
    database = {number: make_order(number, rng) for number in numbers}
    wish, opened, wanted = rng.choice(list(WISHES)), rng.random() < 0.5, rng.choice(["allowed", "allowed", "allowed", "state", "code"])
    order = database[numbers[0]]
    if wish == "refund":
        late = wanted == "state" and rng.random() < 0.5
        state = rng.choice(STATES[:2]) if wanted == "state" and not late else "delivered"
        days = rng.randint(RETURN_DAYS + 1, 90) if late else rng.randint(2, RETURN_DAYS)
    else:
        state = rng.choice(STATES[1:]) if wanted == "state" and wish != "ask" else rng.choice(STATES[:2]) if wish == "ask" else "open"
        days = rng.randint(2, 29)
    order = database[order.number] = replace(order, state=state, days=days)
    wrong = rng.choice([code for code in range(10, 100) if code != order.code])
    town = rng.choice([name for name in TOWNS if name != order.town])
    words = {"item": order.item, "town": town, "opened": OPENED[opened]}
    opening = rng.choice(WISHES[wish]).format(**words)
    code = wrong if wanted == "code" else order.code
    return Case(database, order, code, wish, town, opened, rng.choice([0, 0, 1]), opening)


def make_order(number: int, rng: Random) -> Order:
    """Return an order with drawn entries."""
    return Order(
        number, rng.randint(10, 99), rng.choice(ITEMS), 10 * rng.randint(2, 9), rng.choice(TOWNS), rng.choice(STATES), rng.randint(2, 29)
    )


class Customer:
    """The script of a customer: answers questions, insists after a refusal, and ends the conversation."""

    def __init__(self, case: Case) -> None:
        self._case, self._insists, self.asked = case, case.insists, False

    def reply(self, text: str) -> str:
        """Answer a message of the desk: with what a question asks for, or with the end of the conversation."""
        if "?" in text:
            facts = {"number": f"The order is {self._case.order.number}.", "code": f"The code is {self._case.code}."}
            answers = [fact for word, fact in facts.items() if word in text.lower()]
            self.asked = self.asked or len(answers) == len(facts)
            return " ".join(answers) or self._case.opening
        if "rule" in text.lower() and self._insists:
            self._insists -= 1
            return INSISTS[self._case.order.number % len(INSISTS)]
        return f"Thank you. {END}"


class ServiceDesk(ToolEnv):
    """A conversation of the desk with one customer, and a database that is judged at its end."""

    rules: ClassVar[str] = RULES
    """First message of every task; an own one may be shorter, for a model that learns the rules by the reward."""
    tool_prompt = ""  # the rules describe the tools
    agents = ("desk", "customer") if os.environ.get("CUSTOMER") == "model" else ()
    trained_agents = agents[:1]

    @classmethod
    def tasks(cls) -> Iterator[Task]:
        """Endless customers, by their seeds."""
        return map(cls._task, range(FIRST_EVAL_SEED))

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """Customers of other seeds."""
        return [cls._task(FIRST_EVAL_SEED + number) for number in range(NUM_EVAL)]

    @classmethod
    def _task(cls, seed: int) -> Task:
        case = make_case(seed)
        prompt = [Message(role="system", content=cls.rules), Message(role="user", content=case.opening)]
        return Task(prompt, label=case.news, id=f"desk-{seed}", seed=seed, metadata={"wish": case.wish, "rule": case.rule})

    def reset(self, state: ResetState) -> ResetResult:
        """Copy the database, and give a customer that a model plays its part."""
        self.case = case = make_case(int(state.task.seed or 0))
        self.database, self.customer = dict(case.database), Customer(case)
        self.told, self.looked_up = list[str](), False
        if not self.agents:
            return cast("ResetResult", super().reset(state))
        part = (
            f"You are a customer of a shop, and have told its desk: {case.opening} Your order is {case.order.number}, its code "
            f"is {case.code}. Answer in a few words what you are asked.{' After a refusal, insist once.' * case.insists} "
            f"When your wish is done or finally refused, write {END}."
        )
        return ResetResult(observations={"desk": state.task.prompt, "customer": part})

    def list_tools(self) -> Sequence[Callable[..., Any]]:
        """Return the tools on this episode's database."""
        return (self.order, self.cancel, self.refund, self.move)

    def order(self, number: int) -> str:
        """Look an order up.

        Args:
            number: Number of the order.
        """
        found = self.database.get(number)
        self.looked_up = self.looked_up or found == self.case.order
        return json.dumps(asdict(found)) if found else f"There is no order {number}."

    def cancel(self, number: int) -> str:
        """Cancel an order.

        Args:
            number: Number of the order.
        """
        return self._change(number, state="cancelled")

    def refund(self, number: int, amount: int) -> str:
        """Take an order back, and pay for it.

        Args:
            number: Number of the order.
            amount: Amount to pay.
        """
        return self._change(number, state=f"refunded {amount}")

    def move(self, number: int, town: str) -> str:
        """Send an order to another town.

        Args:
            number: Number of the order.
            town: The new town.
        """
        return self._change(number, town=town)

    def _change(self, number: int, **values: str) -> str:
        if number not in self.database:
            return f"There is no order {number}."
        self.database[number] = replace(self.database[number], **cast("dict[str, Any]", values))
        return "done"

    async def step(self, state: StepState) -> StepResult:
        """Run the desk's calls, or hand a message to the other side."""
        if state.agent == "customer":
            return self._heard(state.action_text.strip())
        result = cast("StepResult", await super().step(state))
        return result if result.agent or not self.agents else replace(result, agent="desk")

    def judge(self, state: StepState) -> StepResult:
        """Give a message of the desk to the customer."""
        self.told.append(state.action_text.strip())
        if len(self.told) == MAX_MESSAGES:
            return self._verdict()
        if self.agents:
            return StepResult(0.0, self.told[-1] or "(says nothing)", agent="customer")
        return self._heard(self.customer.reply(self.told[-1]))

    def _heard(self, text: str) -> StepResult:
        """Give the customer's words to the desk, unless they are the last ones."""
        return self._verdict() if END in text else StepResult(0.0, text or "(says nothing)", agent="desk" if self.agents else None)

    def _verdict(self) -> StepResult:
        """Pay 1 for the right database and the right news, else nothing."""
        changed, told = float(self.database == self.case.expected), float(tells(self.told[-1], self.case))
        reward, info = changed * told, {"database": changed, "told": told, "messages": float(len(self.told))}
        if not self.agents:
            return StepResult(reward, terminated=True, score=reward, info=info)
        return StepResult(0.0, terminated=True, rewards={"desk": reward}, scores={"desk": reward}, info=info)

    def solve(self, state: StepState) -> str:
        """Return the turn that the rules want, or that of the customer's script, for `agentrl check` and for demonstrations."""
        case, number = self.case, self.case.order.number
        if state.agent == "customer":
            return self.customer.reply(self.told[-1])
        if not self.customer.asked:
            return "Your number and code?"
        if not self.looked_up:
            return call("order", number)
        if self.database != case.expected:
            return {
                "cancel": call("cancel", number),
                "refund": call("refund", number, case.amount),
                "move": call("move", number, case.town),
            }[case.wish]
        return f"{case.news or 'done'}."


def tells(text: str, case: Case) -> bool:
    """True if a message names what the customer has to know and no other rule or number, but that of the order."""
    rules = re.findall(r"rule (\d+)", text.lower())
    if case.rule or rules:
        return rules == [str(case.rule)]
    return "?" not in text and {*re.findall(r"\d+", text)} - {str(case.order.number)} == {case.news} - {""}


def call(tool: str, *arguments: Any) -> str:
    """Return a call as the rules show it."""
    return json.dumps({"tool": tool, "args": arguments}, separators=(",", ":"))

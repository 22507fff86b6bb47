"""The desk of `envs/service_desk.py` for two wishes and in fewer words, for a model that learns its rules from chats and rewards."""

from collections.abc import Iterable, Iterator

from agentrl import Task
from agentrl.assets.envs.service_desk import ServiceDesk

WISHES = ("ask", "cancel")


def served(tasks: Iterable[Task]) -> Iterator[Task]:
    """Tasks of customers that have one of two wishes and know their code."""
    return (task for task in tasks if task.metadata["wish"] in WISHES and task.metadata["rule"] != 1)


class ShortDesk(ServiceDesk):
    """The same tools, rules and judgement; neither rules nor names of columns are written."""

    rules = "shop"

    @classmethod
    def tasks(cls) -> Iterator[Task]:
        """Endless customers, by their seeds."""
        return served(super().tasks())

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """Customers of other seeds."""
        return list(served(super().eval_tasks()))

    def order(self, number: int) -> str:
        """Look an order up: its code, price, town, state and days.

        Args:
            number: Number of the order.
        """
        found = self.database.get(number)
        self.looked_up = self.looked_up or found == self.case.order
        return f"{found.code} {found.price} {found.town} {found.state} {found.days}" if found else "none"

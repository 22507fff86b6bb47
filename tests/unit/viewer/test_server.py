"""The viewer's server as a browser meets it: who is let in, what is answered, and what nobody can ask for."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from agentrl.core.errors import ConfigError
from agentrl.viewer.runs import RunCollection
from agentrl.viewer.serve import view
from tests.run_files import small_run

TOKEN = "t" * 20


@pytest.fixture
def page(tmp_path):
    """A client of a served folder with one run, at the address of the page."""
    small_run(tmp_path / "runs" / "small")
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    addresses: queue.Queue[str] = queue.Queue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(view(RunCollection(tmp_path / "runs"), 0, ready=addresses.put, token=TOKEN))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait({task})))
    thread.start()
    with httpx.Client(base_url=addresses.get(timeout=60)) as client:
        yield client
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def root_of(page: httpx.Client) -> str:
    return f"http://{page.base_url.host}:{page.base_url.port}"


def test_every_route_needs_the_token(page):
    for path in ("/", "/api/runs", "/static/main.js", "/x/", f"/{TOKEN[:-1]}/api/runs", f"/{TOKEN}x/api/runs", f"/x/{TOKEN}/api/runs"):
        answer = page.get(root_of(page) + path)
        assert (answer.status_code, answer.json()["type"]) == (401, "Refused"), path
        assert "secret" not in answer.text
    assert page.get("api/runs").status_code == 200


def test_other_names_of_this_machine_are_refused(page):
    port = page.base_url.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{port}", f"[::1]:{port}"):
        assert page.get("api/runs", headers={"host": host}).status_code == 403, host
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
        assert page.get("api/runs", headers={"host": host}).status_code == 200, host


def test_only_reading_is_allowed_and_every_answer_carries_the_policy(page):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answer = page.request(method, "api/runs")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD"), method
    for path in ("", "api/runs", "static/main.js", "api/nothing", "api/run/small/step/99"):
        answer = page.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert answer.headers["cache-control"] == "no-store"


def test_a_browser_that_asks_for_no_page_is_told_so(page):
    answer = page.get("api/nothing", headers={"accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "<h1>Not found</h1>" in answer.text
    assert page.get("api/nothing").json()["type"] == "NotFound"


def test_no_path_leads_out_of_the_page_or_of_the_runs(page, tmp_path):
    outside = os.path.relpath("/etc/passwd", tmp_path)
    for path in ("..%2fpage.py", "%2e%2e/page.py", "../page.py", "..%5cpage.py", "/etc/passwd", "%2fetc%2fpasswd", "main.js%00.txt"):
        raw = httpx.URL(f"{root_of(page)}/{TOKEN}/static/").copy_with(raw_path=f"/{TOKEN}/static/{path}".encode())
        assert page.get(raw).status_code == 404, path
    for name in ("..", "%2e%2e", ".", "..%2fsmall", "small%2f..", "%2fetc", outside.replace("/", "%2f"), "~", "small~.."):
        raw = httpx.URL(root_of(page)).copy_with(raw_path=f"/{TOKEN}/api/run/{name}/episodes".encode())
        answer = page.get(raw)
        assert answer.status_code in (404, 401), name  # a client or server that resolves dots leaves the token out
        assert "secret" not in answer.text
        assert "root:" not in answer.text


def test_the_kinds_of_files_are_those_of_a_page(page):
    kinds = {path: page.get(path).headers["content-type"].partition(";")[0] for path in ("", "static/main.js", "static/style.css")}
    assert kinds == {"": "text/html", "static/main.js": "text/javascript", "static/style.css": "text/css"}


def test_errors_name_what_is_wrong(page):
    for path, status, words in (
        ("api/run/nope", 404, "is not among the runs"),
        ("api/run/small/episode/99-0-0", 404, "is not among the recorded episodes"),
        ("api/run/small/step/99", 404, "The run has 3 steps"),
        ("api/run/small/group/99", 404, "is not recorded"),
        ("api/run/small/task/nope", 404, "was not played"),
        ("api/run/small/episodes?limit=0", 400, "Give 1 to 1000"),
        ("api/run/small/episodes?sort=colour", 400, "is no order"),
        ("api/run/small/episodes?min_reward=much", 400, "is no number"),
        ("api/run/small/step/1/tokens?by=colour", 400, "is not a figure of tokens"),
        ("api/run/small/image/0-0-0/0", 404, "no such image"),
    ):
        answer = page.get(path)
        assert (answer.status_code, words in answer.json()["error"]) == (status, True), (path, answer.text)


def test_a_port_that_is_taken_is_a_config_error(page, tmp_path):
    with pytest.raises(ConfigError, match=r"--port = .*cannot be used"):
        asyncio.run(view(RunCollection(tmp_path / "runs"), page.base_url.port, ready=lambda address: None))


def test_new_steps_of_a_run_are_seen(page, tmp_path):
    before = page.get("api/run/small/changes").json()
    with (tmp_path / "runs" / "small" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.9}) + "\n")
    for _ in range(200):
        after = page.get("api/run/small/changes").json()
        if after["version"] != before["version"]:
            break
        time.sleep(0.05)
    assert (before["steps"], after["steps"]) == (3, 4)
    assert page.get("api/run/small/metrics").json()["columns"]["reward/mean"][-1] == 0.9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_one_address_and_ends_by_a_signal(tmp_path, number):
    small_run(tmp_path / "small")
    words = [sys.executable, "-m", "agentrl", "view", str(tmp_path / "small"), "--no-browser"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}api/runs").json()["single"] is True
    finally:
        process.send_signal(number)
    assert process.wait(30) == 0
    assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda path: None, "there is no such directory"), (Path.mkdir, "holds no run")],
)
def test_what_holds_no_run_is_a_config_error(tmp_path, make, words):
    make(tmp_path / "runs")
    with pytest.raises(ConfigError, match=words):
        RunCollection(tmp_path / "runs")

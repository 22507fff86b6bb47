"""No request stops a worker: a small version of `tests.benchmarks.endpoint_load`, with slack for busy machines."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.core import process
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.lane import SHORT, Lane, Turns
from agentrl.rollout.text_codec import TextCodec
from tests.benchmarks import endpoint_load
from tests.unit.rollout.endpoint.support import ADD, CODEC, caller, play_one, user
from tests.unit.rollout.families import REFUSED, SOURCES, codec_of
from tests.unit.rollout.templates import FAMILIES, tokenizer

pytestmark = pytest.mark.anyio

SLACK_S = 0.25


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_no_load_stalls_the_loop() -> None:
    expected = {"small requests, 64 at once": {200}, "streams, 64 at once": {200}, "100 MB bodies": {413}, "31 MB of blanks": {400}}
    expected |= {"20 tools nested 900 deep": {200}, "2 MB of text": {400}, "torn connections": set()}
    loads = {name: (min(count, 2) or 0, make, 1) for name, (count, make, times) in endpoint_load.LOADS.items()}
    slow = list(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint_load, "LOADS", loads)
        for _ in range(3):  # other processes delay a loop too: a stall that belongs to a load comes again
            found = endpoint_load.run(slow, 30, told=lambda line: None)
            assert {name: set(counts) for name, (counts, _) in found.items()} == {name: expected[name] for name in slow}
            slow = [name for name, (_, stall_s) in found.items() if stall_s >= SLACK_S]
            if not slow:
                return
    pytest.fail(f"longer than {SLACK_S} s, three times: {slow}")


TEXT = "one two,  three\n\n" * 200
LONG_TOOLS = [{**ADD, "function": {**ADD["function"], "name": f"add_{number}"}} for number in range(20)]


@pytest.mark.parametrize("name", [*sorted(FAMILIES), *sorted(SOURCES.keys() - {*REFUSED})])
def test_a_prompt_has_the_same_tokens_with_the_turns_that_were_kept(name: str) -> None:
    codec = ChatCodec(tokenizer(name)) if name in FAMILIES else codec_of(name)
    chat: list[Any] = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": f" {TEXT}"}, {"role": "user", "content": "one"}]
    rendered = codec.template.render(codec.dialect.finished(codec.dialect.normal(chat)))
    whole = codec.encode_text(rendered)
    assert codec.encode_marked(rendered, [""]) == codec.encode_marked(rendered, [""], keeps=True) == whole
    assert codec.encode_marked(rendered, [""], keeps=True) == whole


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("prefix", ["always", "first", "never"])
def test_tokenizers_that_mark_the_beginning_of_words_are_cut_only_where_it_changes_nothing(prefix: str, strips: bool) -> None:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    special = [AddedToken(name, special=True, lstrip=strips, rstrip=strips) for name in ("<unk>", "<|im_start|>", "<|im_end|>")]
    backend.train_from_iterator([TEXT, "user assistant <|>"], trainers.BpeTrainer(vocab_size=120, special_tokens=special))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    codec = TextCodec(made)
    text = "".join(f"<|im_start|>{role}\n {TEXT} <|im_end|>\n" for role in ("user", "assistant", "user"))
    assert codec.encode_marked(text, [""], keeps=True) == codec.encode_marked(text, [""]) == codec.encode_text(text)


def test_the_system_prompt_with_its_tools_is_made_tokens_once() -> None:
    codec, counted = ChatCodec(tokenizer("qwen_tools")), list[str]()
    ids = codec._ids
    codec._ids = lambda text, **options: (counted.append(text), ids(text, **options))[1]  # type: ignore[method-assign]
    for number in range(5):
        chat: list[Any] = [{"role": "system", "content": TEXT, "tools": LONG_TOOLS}, {"role": "user", "content": f"{number}?"}]
        assert codec.decode(codec.encode_chat(chat)).endswith(f"{number}?<|im_end|>\n<|im_start|>assistant\n")
    assert sum("add_7" in text for text in counted) == 1
    assert sum(TEXT[:100] in text for text in counted) == 1


def test_texts_are_counted_no_further_than_the_limit() -> None:
    texts = [TEXT] * 1000
    whole = len(CODEC.encode_text(TEXT))
    assert 0.85 * 2 * whole < CODEC.at_least(texts[:2], 10**9) <= 2 * whole
    assert 5000 < CODEC.at_least(texts, 5000) < 25_000


async def test_long_work_runs_beside_the_loop_one_piece_after_another() -> None:
    lane, threads, under_way = Lane(), list[str](), list[int]()

    def work(number: int) -> int:
        under_way.append(number)
        threads.append(threading.current_thread().name)
        time.sleep(0.05)
        assert under_way[-1] == number
        return number

    long = [asyncio.create_task(lane.run(lambda number=number: work(number), SHORT + 1)) for number in range(3)]  # type: ignore[misc]
    await asyncio.sleep(0)
    long[1].cancel()
    short = await lane.run(lambda: work(9), 1)  # waits for what runs
    assert (short, await long[0], await long[2]) == (9, 0, 2)
    assert {name.rpartition("_")[0] for name in threads} == {"agentrl-lane"}
    await lane.run(lambda: work(8), 1)
    assert threads[-1] == threading.current_thread().name


async def test_a_failure_of_work_reaches_the_one_that_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        await Lane().run(lambda: 1 // 0, SHORT + 1)


async def test_tasks_that_are_ready_at_once_go_on_in_rounds_of_the_loop() -> None:
    turns, rounds, done = Turns(), 0, list[int]()

    async def task() -> None:
        await turns.take()
        done.append(rounds)

    tasks = [asyncio.create_task(task()) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    while len(done) < 9:
        rounds += 1
        await asyncio.sleep(0)
    assert done == sorted(set(done))
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_tools_and_arguments_count_for_the_size_of_a_request() -> None:
    huge = "one two three " * 200_000
    big_tool = {**ADD, "function": {**ADD["function"], "description": huge}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"text": [huge]}}}

    async def run(task: Any, llm: Any) -> float:
        async with caller(llm) as client:
            for more in (
                {"messages": [user("one")], "tools": [big_tool]},
                {"messages": [user("one"), {"role": "assistant", "tool_calls": [call]}, user("two")]},
                {"messages": [user("one")] * 5000},
            ):
                refused = await client.post("chat/completions", json={"model": "m", **more})
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert (await client.post("chat/completions", json={"model": "m", "messages": [user("one")]})).status_code == 200
        return 1.0

    stage, trajectory = await play_one(run, "three")
    assert (trajectory.error, len(stage.engine.requests)) == (None, 1)


async def test_requests_with_the_same_tools_share_them() -> None:
    async def run(task: Any, llm: Any) -> float:
        async with caller(llm) as client:
            for number in range(3):
                body = {"model": "m", "messages": [user(f"{number}")], "tools": LONG_TOOLS if number < 2 else LONG_TOOLS[:1]}
                assert (await client.post("chat/completions", json=body)).status_code == 200
        return 1.0

    stage, _ = await play_one(run, "three", max_model_len=20_000)
    first, second, third = (exchange.request.tools for exchange in stage.episodes[0].session.exchanges)
    assert first is second
    assert len(third) == 1


def test_what_is_imported_late_is_spared_where_garbage_is_collected_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(process.gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(process.gc, "get_threshold", lambda: (700, 10, 10))
    assert process.spare_imports(0) == 0
    monkeypatch.setattr(process.gc, "get_threshold", lambda: process.RARELY)
    known = process.spare_imports(0)
    assert (known, frozen) == (len(sys.modules), [1])
    assert process.spare_imports(known) == known
    assert frozen == [1]

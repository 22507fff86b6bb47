"""Times of tools: what `timed` records, and for whom."""

import asyncio
import threading

from agentrl import timed
from agentrl.env.timing import MAX_NAME, MAX_SPANS, Stopwatch, use_stopwatch


def test_nothing_is_recorded_outside_of_an_episode() -> None:
    with timed("search"):
        pass


def test_times_are_counted_from_the_beginning_of_the_call_and_given_once() -> None:
    stopwatch = Stopwatch()
    stopwatch.add("before", 0.0, 1.0)
    stopwatch.begin()
    begin = stopwatch._begin_s
    stopwatch.add("search", begin + 0.5, begin + 0.75)
    [span] = stopwatch.take()
    assert (span.name, span.turn, round(span.start_s, 6), round(span.seconds, 6)) == ("tool:search", None, 0.5, 0.25)
    assert stopwatch.take() == ()


def test_names_and_numbers_of_spans_are_bounded() -> None:
    stopwatch = Stopwatch()
    for _ in range(MAX_SPANS + 5):
        stopwatch.add("x" * 1000, 0.0, 1.0)
    spans = stopwatch.take()
    assert (len(spans), len(spans[0].name)) == (MAX_SPANS, len("tool:") + MAX_NAME)


async def _tasks_of_two_episodes() -> tuple[list[str], list[str]]:
    async def episode(name: str, stopwatch: Stopwatch, other: asyncio.Event, own: asyncio.Event) -> None:
        use_stopwatch(stopwatch)
        with timed(name):
            own.set()
            await other.wait()
            await asyncio.to_thread(_in_thread, name)

    first, second = Stopwatch(), Stopwatch()
    events = asyncio.Event(), asyncio.Event()
    await asyncio.gather(episode("a", first, events[0], events[1]), episode("b", second, events[1], events[0]))
    return [span.name for span in first.take()], [span.name for span in second.take()]


def _in_thread(name: str) -> None:
    with timed(f"{name} in a thread"):
        assert threading.current_thread() is not threading.main_thread()


def test_episodes_at_the_same_time_have_their_own_and_threads_belong_to_them() -> None:
    found = asyncio.run(_tasks_of_two_episodes())
    assert found == (["tool:a in a thread", "tool:a"], ["tool:b in a thread", "tool:b"])

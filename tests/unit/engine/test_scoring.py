"""The queue before a reward model: what shares a batch, and what one bad text may not spoil."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from agentrl.core.errors import RewardError
from agentrl.core.scoring import ScoreAnswer, ScoreRequest, ScorerFacts
from agentrl.engine.scoring import BatchedScorer

pytestmark = pytest.mark.anyio


class Lengths:
    """Scores a text by its length; "bad" raises, "nan" gives no number; holds each batch until it is let go."""

    facts = ScorerFacts()

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def load(self) -> None:
        """Nothing to load."""

    def check_texts(self, *, as_messages: bool) -> None:
        """Any text is fine."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        texts = [request.text for request in requests]
        self.batches.append(texts)
        self.begun.set()
        assert self.go.wait(20)
        if "bad" in texts:
            raise ValueError("cannot read this")
        return [ScoreAnswer((float("nan") if text == "nan" else float(len(text)),)) for text in texts]


async def scores(scorer: BatchedScorer, *texts: str) -> list[float | BaseException]:
    answers = await asyncio.gather(*(scorer.score(ScoreRequest(text=text)) for text in texts), return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else answer.values[0] for answer in answers]


async def test_what_arrives_while_the_model_computes_makes_the_next_batches() -> None:
    model = Lengths()
    model.go.clear()
    scorer = BatchedScorer(model, batch_size=3, name="rm")
    await scorer.start()
    first = asyncio.create_task(scores(scorer, "a"))
    await asyncio.to_thread(model.begun.wait, 20)
    others = asyncio.create_task(scores(scorer, "bb", "ccc", "dddd", "eeeee"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert scorer.pending == 4
    model.go.set()
    assert await first + await others == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert model.batches == [["a"], ["bb", "ccc", "dddd"], ["eeeee"]]
    await scorer.close()


async def test_one_bad_text_does_not_spoil_the_others() -> None:
    scorer = BatchedScorer(Lengths(), batch_size=8, name="rm")
    await scorer.start()
    good, bad, none, fine = await scores(scorer, "ok", "bad", "nan", "good")
    assert (good, fine) == (2.0, 4.0)
    assert isinstance(bad, RewardError)
    assert "rm: ValueError: cannot read this" in str(bad)
    assert isinstance(none, RewardError)
    assert "not finite" in str(none)
    await scorer.close()


async def test_closing_answers_those_who_wait() -> None:
    model = Lengths()
    model.go.clear()
    scorer = BatchedScorer(model, batch_size=1, name="rm")
    await scorer.start()
    waiting = asyncio.create_task(scores(scorer, "a", "b"))
    await asyncio.to_thread(model.begun.wait, 20)
    await scorer.close()
    assert all(isinstance(found, RewardError) for found in await waiting)
    model.go.set()
    with pytest.raises(RewardError, match="was closed"):
        await scorer.score(ScoreRequest(text="later"))

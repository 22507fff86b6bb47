import json

import pytest

from examples.tiny_model.corpus import TOOLS, Corpus
from tests.unit.envs.play import load, play, total


def chats(kind, count=300, seed=0):
    corpus = Corpus(seed)
    return [getattr(corpus, kind)() for _ in range(count)]


def prompt_of(chat):
    messages = []
    for turn in chat:
        if turn.role == "assistant":
            break
        messages.append((turn.role, turn.content))
    return tuple(messages)


def prompts_of_environment(name):
    prompts = [task.prompt for task in load(name).tasks()]
    return {(("user", p),) if isinstance(p, str) else tuple((m["role"], m["content"]) for m in p) for p in prompts}


@pytest.mark.parametrize("name", ["calculator", "guess_number", "arithmetic"])
def test_prompts_are_exactly_those_of_the_environment(name):
    assert {prompt_of(chat) for chat in chats(name, 3000)} == prompts_of_environment(name)


def test_hints_are_exactly_those_of_the_environment():
    env = load("guess_number")
    for chat in chats("guess_number"):
        guesses = [turn.content for turn in chat if turn.role == "assistant"]
        hints = [turn.content for turn in chat[2::2]]
        possible = [task for task in env.tasks() if str(task.label) not in guesses[:-1]]
        given = [[result.observation for result in play(env, task, *guesses)][:-1] for task in possible]
        assert hints in given


def test_an_uncorrupted_call_and_answer_earn_everything():
    env = load("calculator")
    tasks = {task.prompt[1]["content"]: task for task in env.tasks()}
    clean = [chat for chat in chats("calculator") if not any(turn.corrupted for turn in chat)]
    assert len(clean) > 50
    for chat in clean:
        _, question, call, tool, answer = chat
        results = play(env, tasks[question.content], call.content, answer.content)
        assert total(results) == pytest.approx(1.0)
        assert results[0].observation == [{"role": "tool", "content": tool.content}]


def test_a_wrong_call_is_followed_by_its_own_result():
    for chat in chats("calculator"):
        if len(chat) == 5:
            call = json.loads(chat[2].content)
            assert chat[3].content == str(TOOLS[call["tool"]][1](*call["args"]))


def test_some_of_the_answers_are_corrupted_and_none_of_the_prompts():
    corpus = Corpus(0)
    turns = [turn for _ in range(2000) for turn in corpus.chat()]
    answers = [turn for turn in turns if turn.role == "assistant"]
    assert 0.25 < sum(turn.corrupted for turn in answers) / len(answers) < 0.5
    assert not any(turn.corrupted for turn in turns if turn.role != "assistant")


def test_the_seed_decides_the_chats():
    first, second, other = Corpus(1), Corpus(1), Corpus(2)
    texts = [[corpus.chat() for _ in range(50)] for corpus in (first, second, other)]
    assert texts[0] == texts[1] != texts[2]

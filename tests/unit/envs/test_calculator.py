import pytest

from tests.unit.envs.play import load, play, total

Calculator = load("calculator")
TASKS = {task.id: task for task in Calculator.tasks()}
SEVEN_TIMES_EIGHT = TASKS["mul-7-8"]


def test_the_right_call_and_the_right_answer_earn_everything():
    call, answer = play(Calculator, SEVEN_TIMES_EIGHT, '{"tool":"mul","args":[7,8]}', "56")
    assert call.reward == 0.2
    assert call.observation == [{"role": "tool", "content": "56"}]
    assert not call.terminated
    assert answer.terminated
    assert call.reward + answer.reward == pytest.approx(1.0)
    assert answer.score == 1.0


def test_a_wrong_call_gets_its_own_result_and_no_reward():
    call, answer = play(Calculator, SEVEN_TIMES_EIGHT, '{"tool":"sub","args":[7,8]}', "-1")
    assert call.observation == [{"role": "tool", "content": "-1"}]
    assert (call.reward, answer.reward, answer.score) == (0.0, 0.0, 0.0)


def test_the_right_answer_after_a_wrong_call_is_paid_but_is_no_success():
    results = play(Calculator, SEVEN_TIMES_EIGHT, '{"tool":"add","args":[7,8]}', "56")
    assert total(results) == 0.8
    assert results[-1].score == 0.0


def test_a_wrong_answer_after_the_right_call_keeps_the_share_of_the_call():
    results = play(Calculator, SEVEN_TIMES_EIGHT, '{"tool": "mul", "args": [7, 8]}', "15")
    assert total(results) == 0.2
    assert results[-1].score == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "56",
        "null",
        '{"tool":"mul","args":[7,8]',
        '{"tool":"mul"}',
        '{"tool":"pow","args":[7,8]}',
        '{"tool":["mul"],"args":[7,8]}',
        '{"tool":"mul","args":[7]}',
        '{"tool":"mul","args":[7,8,9]}',
        '{"tool":"mul","args":7}',
        '{"tool":"mul","args":"78"}',
        '{"tool":"mul","args":[7.0,8]}',
        '{"tool":"mul","args":[true,8]}',
        '{"tool":"mul","args":[NaN,8]}',
        '{"tool":"mul","args":[1000,8]}',
        '{"tool":"mul","args":[' + "9" * 5000 + ",8]}",
        "[" * 100_000,
    ],
)
def test_anything_but_a_call_ends_the_episode_without_reward(text):
    (result,) = play(Calculator, SEVEN_TIMES_EIGHT, text)
    assert (result.reward, result.score, result.terminated, result.info) == (0.0, 0.0, True, {"malformed": 1.0})


def test_the_result_of_every_label_answers_its_question():
    signs = {"add": "+", "sub": "-", "mul": "*"}
    assert len(TASKS) == 300
    for task in TASKS.values():
        tool, (a, b) = task.label
        system, question = task.prompt
        assert (system["role"], question) == ("system", {"role": "user", "content": f"{a}{signs[tool]}{b}=?"})
        expected = {"add": a + b, "sub": a - b, "mul": a * b}[tool]
        call = f'{{"tool":"{tool}","args":[{a},{b}]}}'
        assert total(play(Calculator, task, call, f"It is {expected}.")) == pytest.approx(1.0)

"""What is typed: answers of one line and of several, commands, the end of the input."""

import io

import pytest

from agentrl.inspect.play_terminal import Leave, Reader


class Person:
    """A reader with what it told and toggled."""

    def __init__(self, text: str) -> None:
        self.told: list[str] = []
        self.toggled: list[str] = []
        self.reader = Reader(self.told.append, self.toggled.append, io.StringIO(text))

    def answer(self) -> str:
        return self.reader.answer("> ")


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("one\n", "one"),
        ("one", "one"),
        ("  kept  \r\n", "  kept  "),
        ("\n\nafter empty lines\n", "after empty lines"),
        ('"""\na\n\n /b\n"""\n', "a\n\n /b"),
        ('"""\n"""\n', ""),
        ('"""\nno end', "no end"),
        ("//quit\n", "/quit"),
        ('say """ inside\n', 'say """ inside'),
    ],
)
def test_answers(typed: str, answer: str) -> None:
    assert Person(typed).answer() == answer


@pytest.mark.parametrize(
    ("typed", "action", "argument"),
    [
        ("/quit\n", "quit", ""),
        ("/q\n", "quit", ""),
        ("/task  mul-7-8 \n", "task", "mul-7-8"),
        ("/restart\n", "restart", ""),
        ("", "quit", ""),
    ],
)
def test_commands_that_leave(typed: str, action: str, argument: str) -> None:
    with pytest.raises(Leave) as left:
        Person(typed).answer()
    assert (left.value.action, left.value.argument) == (action, argument)


def test_commands_that_stay_and_lines_that_are_none() -> None:
    person = Person("/tokens\n/text\n/help\n/task\n/t\n/what\n/\nanswer\n")
    assert person.answer() == "answer"
    assert person.toggled == ["tokens", "text"]
    assert "/restart" in person.told[0]
    assert "/task 7" in person.told[1]
    assert [text.split(".")[0] for text in person.told[2:]] == [
        "There is no command /t",
        "There is no command /what",
        "There is no command /",
    ]


def test_after_an_episode_the_next_answer_is_kept_and_commands_are_carried_out() -> None:
    person = Person("/tokens\nnext answer\n")
    assert person.reader.more()
    assert person.toggled == ["tokens"]
    assert person.answer() == "next answer"
    assert not person.reader.more()
    assert person.reader.ended


def test_a_pause_waits_for_an_empty_line() -> None:
    person = Person("what\n\n/quit\n")
    person.reader.pause("")
    assert len(person.told) == 1
    with pytest.raises(Leave):
        person.reader.pause("")

"""The size report counts, and fails beyond its limits."""

import pytest

from tests.size_report import FILE_LIMIT, FUNCTION_LIMIT, functions, main


def test_functions_reports_names_lines_and_lengths():
    source = "def a():\n    return 1\n\n\nclass B:\n    async def c(self):\n        x = 1\n        return x\n"
    assert sorted(functions(source)) == [("a", 1, 2), ("c", 6, 3)]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 1\n" * FILE_LIMIT, 0),
        ("x = 1\n" * (FILE_LIMIT + 1), 1),
        ("def f():\n" + "    x = 1\n" * (FUNCTION_LIMIT - 1), 0),
        ("def f():\n" + "    x = 1\n" * FUNCTION_LIMIT, 1),
    ],
)
def test_main_fails_only_beyond_a_limit(tmp_path, source, code, capsys):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "one.py").write_text(source)
    assert main(tmp_path) == code
    assert ("TOO LONG" in capsys.readouterr().out) == bool(code)

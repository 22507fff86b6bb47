"""Measured rates survive being written and read again, and a file that is damaged or of another version is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.core.paths import CACHE
from agentrl.resolve.sizing.rates import Rates, keep_rates, rates_file, read_rates

CARD = Rates(matmul_bfloat16=7e14, matmul_float32=5e13, memory=3e12, host_to_device=5e10, device_to_host=5e10, device_bytes=8e10)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_rates_of_devices_are_kept_beside_each_other(cache: Path) -> None:
    assert read_rates() == {}
    assert keep_rates("one card", CARD)
    assert keep_rates("a processor", Rates(matmul_float32=1e11))
    assert rates_file() == cache / "rates.json"
    assert read_rates() == {"one card": CARD, "a processor": Rates(matmul_float32=1e11)}
    assert keep_rates("one card", Rates(memory=1.0))
    assert read_rates()["one card"] == Rates(memory=1.0)


@pytest.mark.parametrize("text", ["", "[1]", '{"card": 3}', "{"])
def test_a_file_that_cannot_be_read_has_no_rates(text: str) -> None:
    rates_file().parent.mkdir()
    rates_file().write_text(text, encoding="utf-8")
    assert read_rates() == {}
    assert keep_rates("card", CARD)
    assert read_rates() == {"card": CARD}


def test_fields_of_other_versions_are_passed_over() -> None:
    rates_file().parent.mkdir()
    rates_file().write_text(json.dumps({"card": {"memory": 2.0, "colour": "green"}}), encoding="utf-8")
    assert read_rates() == {"card": Rates(memory=2.0)}


def test_a_folder_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("a file", encoding="utf-8")
    assert not keep_rates("card", CARD)

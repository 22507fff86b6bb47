"""Accounts of groups over parts of a run, and the share that has to pass the filter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.core.errors import NothingToTrainError
from agentrl.flow.ledger import Health, Ledger
from tests.unit.flow.fakes import flow_of


def test_closed_accounts_of_an_earlier_part_are_counted_on() -> None:
    ledger = Ledger()
    ledger.restore(trained=3, filtered={"flat": 2}, dropped={"timeout": 1}, forked=4)
    for group_id in (6, 7):
        ledger.submit(group_id)
    ledger.train([6], forked=2)
    ledger.train([7], forked=1)
    counts = ledger.check()
    assert (counts.submitted, counts.trained, counts.forked, counts.in_flight) == (8, 5, 7, 0)


@pytest.mark.parametrize(("passed", "ends"), [(128, False), (127, True)])
def test_a_run_ends_if_a_smaller_share_than_the_least_passes(passed: int, ends: bool) -> None:
    health = Health(replace(flow_of(groups_per_step=1), min_pass_rate=0.25))
    reasons = [None] * passed + ["flat"] * (512 - passed)
    for reason in reasons[:-1]:
        health.verdict(reason)
    if not ends:
        health.verdict("flat")
        return
    with pytest.raises(NothingToTrainError, match="only 127 of the last 512 groups"):
        health.verdict("flat")

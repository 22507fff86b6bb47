"""From what a run recorded of its times: where they went, and what other sizes would give."""

"""Seeds derived from names, so that a run, a resumed run and a rerun agree without sharing a generator."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order.

    Args:
        parts: For a sampling request: run seed, task id, epoch, sample index, turn index.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

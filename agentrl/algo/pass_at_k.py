"""pass@k: how likely at least one of k tries solves a task, estimated without bias from more tries than k."""

from __future__ import annotations

from math import comb


def pass_at_k(tries: int, solved: int, k: int) -> float:
    """Chance that at least one of `k` tries, drawn without replacement from those made, solved the task.

    The estimator ``1 - C(n - c, k) / C(n, k)`` of Chen et al., 2021 (arXiv:2107.03374). Computed with whole numbers of any
    size and rounded once, at the end: it neither overflows for thousands of tries nor loses digits near 0 or 1.

    Args:
        tries: Tries made (n).
        solved: How many of them solved it (c).
        k: Tries allowed, from 1 to `tries`.

    Returns:
        A number in 0..1; its mean over repetitions is ``1 - (1 - p)^k`` if every try succeeds with chance p.

    Raises:
        ValueError: If `k` is not in 1..n, or `solved` not in 0..n.
    """
    if not 1 <= k <= tries or not 0 <= solved <= tries:
        raise ValueError(f"pass@{k} of {solved} in {tries}: k must be from 1 to the number of tries, and 0 <= solved <= tries")
    ways = comb(tries, k)
    return (ways - comb(tries - solved, k)) / ways


def useful_k(tries: int) -> list[int]:
    """The k worth showing for so many tries: powers of two, and all of them."""
    return sorted({1 << power for power in range(tries.bit_length()) if 1 << power <= tries} | {tries})

"""Sums of two small numbers: a task that a small model learns in minutes on a CPU."""

import random
from collections import Counter

from ..config import ArithmeticTask
from .task import Example, Task

MOST_PAIRS = 20_000
"""All pairs of operands up to 198. Larger operands give more pairs, of which this many are drawn."""

Pair = tuple[int, int]


def load(settings: ArithmeticTask) -> Task:
    """Ordered pairs of operands: all of them, or, of more than MOST_PAIRS unordered ones, a seeded choice.

    a + b and b + a are in the same split. If all pairs are used, training has every operand.
    """
    largest = settings.max_operand
    total = (largest + 1) * (largest + 2) // 2
    drawn = total > MOST_PAIRS
    pairs = _drawn_pairs(largest) if drawn else [(a, b) for a in range(largest + 1) for b in range(a, largest + 1)]
    count = round(settings.held_out * len(pairs))
    held_out = set(random.Random(0).sample(pairs, count) if drawn else _held_out(pairs, count))
    train = [pair for pair in pairs if pair not in held_out]
    note = (
        f"max_operand = {largest} gives {total} pairs of operands; a seeded choice of {MOST_PAIRS} of them is the task"
    )
    return Task(_examples(train), _examples(sorted(held_out)), (note,) if drawn else ())


def _drawn_pairs(largest: int) -> list[Pair]:
    draw = random.Random(0)
    pairs: set[Pair] = set()
    while len(pairs) < MOST_PAIRS:
        a, b = sorted(draw.randrange(largest + 1) for _ in range(2))
        pairs.add((a, b))
    return sorted(pairs)


def _held_out(pairs: list[Pair], count: int) -> list[Pair]:
    """Up to `count` pairs in a seeded order, chosen so that every operand stays in some training pair."""
    uses = Counter(operand for pair in pairs for operand in set(pair))
    chosen: list[Pair] = []
    for pair in random.Random(0).sample(pairs, len(pairs)):
        if len(chosen) < count and all(uses[operand] > 1 for operand in pair):
            chosen.append(pair)
            uses.subtract(set(pair))
    return chosen


def _examples(pairs: list[Pair]) -> list[Example]:
    ordered = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    return [Example(f"What is {a} + {b}? Answer with just the number.", str(a + b)) for a, b in ordered]

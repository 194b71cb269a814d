"""Sums of two small numbers: a task that a small model learns in minutes on a CPU."""

import random

from ..config import ArithmeticTask
from .task import Example, Task


def load(settings: ArithmeticTask) -> Task:
    """All ordered pairs of operands. a + b and b + a are in the same split, and training has every operand."""
    pairs = [(a, b) for a in range(settings.max_operand + 1) for b in range(a, settings.max_operand + 1)]
    held_out = set(_held_out(pairs, round(settings.held_out * len(pairs))))
    train = [pair for pair in pairs if pair not in held_out]
    return Task(_examples(train), _examples(sorted(held_out)))


def _held_out(pairs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Up to `count` pairs in a seeded order, chosen so that every operand stays in some training pair."""
    uses = {operand: sum(operand in pair for pair in pairs) for pair in pairs for operand in pair}
    chosen: list[tuple[int, int]] = []
    for pair in random.Random(0).sample(pairs, len(pairs)):
        if len(chosen) < count and all(uses[operand] > 1 for operand in pair):
            chosen.append(pair)
            for operand in set(pair):
                uses[operand] -= 1
    return chosen


def _examples(pairs: list[tuple[int, int]]) -> list[Example]:
    ordered = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    return [Example(f"What is {a} + {b}? Answer with just the number.", str(a + b)) for a, b in ordered]

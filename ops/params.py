"""Kinds of values that options of several commands take."""

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

T = TypeVar("T")

COUNT: Final = click.IntRange(min=1)
ABOVE_0: Final = click.FloatRange(min=0, min_open=True)


class CommaList(click.ParamType[tuple[T, ...]]):
    """Words with commas between them: each once, in their order.

    read: what a word means; it raises ValueError for one that means nothing. advice: what to write instead.
    """

    def __init__(self, name: str, read: Callable[[str], T], advice: str) -> None:
        self.name = name
        self._read = read
        self._advice = advice

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[T, ...]:
        """What the words mean."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._read(word.strip()) for word in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r}: {self._advice}", param, ctx)


def read_name(word: str) -> str:
    """Any word. Raises ValueError for none."""
    if not word:
        raise ValueError("no word")
    return word


def read_count(word: str) -> int:
    """A whole number from 1. Raises ValueError."""
    if not word.isdecimal() or (count := int(word)) < 1:
        raise ValueError(f"{word} is no whole number from 1")
    return count


def number_up_to(most: float) -> Callable[[str], float]:
    """What reads a number above 0, up to `most` and less than infinity."""

    def read(word: str) -> float:
        number = float(word)
        if not 0 < number <= most or math.isinf(number):
            raise ValueError(f"{word} is not above 0 and up to {most}")
        return number

    return read

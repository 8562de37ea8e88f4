"""Whose turn it is: fair shares by weight, for lanes and for queues."""

from collections.abc import Collection, Mapping


class Stride:
    """Shares something among names by weight, charged for what each got: stride scheduling (Waldspurger 1995).

    Each name has a pass, which grows by 1/weight for each thing that it got; the name with the least pass is next.
    Who had nothing to take saves nothing up: its pass moves up to where the others are.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        """`weights` are at least 1. The order of names breaks ties."""
        self._strides = {name: 1 / max(1, weight) for name, weight in weights.items()}
        self._passes = dict.fromkeys(self._strides, 0.0)

    def order(self) -> list[str]:
        """All names in the order in which to try them."""
        return sorted(self._passes, key=self._passes.__getitem__)

    def charge(self, name: str, num: int, empty: Collection[str] = ()) -> None:
        """`name` got `num`, after the names of `empty` had nothing."""
        for other in empty:
            self._passes[other] = max(self._passes[other], self._passes[name])
        self._passes[name] += num * self._strides[name]

    def level(self) -> None:
        """Nobody had anything: all begin anew with equal rights, or who came alone for long would pay for it."""
        self._passes = dict.fromkeys(self._passes, 0.0)

"""What one tenant has used."""


class Account:
    """`used`, in tokens. Unfinished sequences of one tenant have the same one; only FairShare opens and charges it."""

    __slots__ = ("used",)

    def __init__(self, used: float = 0.0) -> None:
        self.used = used

"""Who may be in the engine together, so that a job that kills engines is found without blaming its neighbours.

                    died with others                     survived its turn
    free ───────────────────────────► waits for a turn ───────────────────► free
     ▲ all of them at once             │ ▲                  alone
     └ no crash                        ▼ │ died alone: solo + 1, to the end of the line
                                      alone ──► poison: three crashes, two of them in turns one after the other

Turns and the time of the free alternate while both want the engine, so that nobody starves. No job, engine or Redis is
touched here, and time is passed in.
"""

from collections.abc import Hashable, Iterable, KeysView
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# A job that has killed so often, so many of them alone, is taken for the reason.
POISON_CRASHES, POISON_SOLO = 3, 2
# The longest turn, in token events. It doubles with each crash, so that one that strikes late is met alone too.
MAX_TURN_EVENTS = 256
# While the free wait, no further turn begins when turns have taken so long: what a turn disturbs is bounded by it.
TURNS_S = 2.0
# And afterwards the free have the engine for at least so long, or for as long as the turns took.
MIN_FREE_S = 2.0


@dataclass(frozen=True, slots=True)
class Marks:
    """What a job's record says of its crashes: all, those in a row that it was alone in, and if it is alone now."""

    crashes: int = 0
    solo: int = 0
    is_alone: bool = False

    @property
    def is_poison(self) -> bool:
        """Whether the job is taken for the reason."""
        return self.crashes >= POISON_CRASHES and self.solo >= POISON_SOLO


def turn_events(crashes: int) -> int:
    """How many new token events show that a job with so many crashes may go back to the others."""
    return int(min(MAX_TURN_EVENTS, 2 ** max(0, crashes - 1)))


class Quarantine(Generic[Key]):
    """Owner of the jobs' marks and of the order of turns. Jobs are known by any key."""

    def __init__(self) -> None:
        self._marks: dict[Key, Marks] = {}
        self._free: dict[Key, None] = {}
        self._waiting: dict[Key, None] = {}
        self._alone: Key | None = None
        self._events_left = 0
        # Whether turns are being given, since when, and how long the turns before took.
        self._is_turns = False
        self._since_s = float("-inf")
        self._turns_s = 0.0

    @property
    def alone(self) -> Key | None:
        """The suspect whose turn it is."""
        return self._alone

    @property
    def free(self) -> KeysView[Key]:
        """Those that may run together, in the order in which they came or were cleared."""
        return self._free.keys()

    @property
    def num_suspects(self) -> int:
        """Jobs that run alone or wait for it."""
        return len(self._waiting) + (self._alone is not None)

    def marks(self, key: Key) -> Marks:
        """Of a job that is here."""
        return self._marks[key]

    def add(self, key: Key, crashes: int = 0, solo: int = 0) -> None:
        """A job wants to run. One that has a crash is a suspect, and waits for its turn."""
        self._marks[key] = Marks(crashes, solo)
        (self._waiting if crashes else self._free)[key] = None

    def remove(self, key: Key) -> None:
        """The job has ended or left; its turn is over. Nothing happens if it isn't here."""
        self._marks.pop(key, None)
        self._free.pop(key, None)
        self._waiting.pop(key, None)
        if key == self._alone:
            self._alone = None

    def blame(self, keys: Iterable[Key], last_alone: Key | None = None) -> dict[Key, Marks]:
        """The engine died while it computed `keys`; answers their new marks.

        All of them are suspects now; those that are poison are here no longer. A turn that went on is over.
        `last_alone` was cleared a moment ago, and the engine had not heard of the end of its turn.
        """
        blamed: dict[Key, Marks] = {}
        alone, self._alone = self._alone, None
        for key in keys:
            marks = self._marks[key]
            blamed[key] = Marks(marks.crashes + 1, marks.solo + (key in (alone, last_alone)))
        for key, marks in blamed.items():
            self.remove(key)
            if not marks.is_poison:
                self._marks[key] = marks
                self._waiting[key] = None
        if alone is not None and alone not in blamed:  # it died between two steps: nobody's fault
            self._marks[alone] = Marks(self._marks[alone].crashes, self._marks[alone].solo)
            self._waiting[alone] = None
        return blamed

    def count(self, num_events: int) -> Key | None:
        """New token events of the job whose turn it is are in; answers it if that clears it."""
        self._events_left -= num_events
        if self._alone is None or self._events_left > 0:
            return None
        key, self._alone = self._alone, None
        self._marks[key] = Marks(self._marks[key].crashes)
        self._free[key] = None
        return key

    def postpone(self, key: Key) -> Marks:
        """The job whose turn it is can't begin it now: it goes to the end of the line. Answers its marks."""
        marks = self._marks[key]
        if key == self._alone:
            self._alone = None
            marks = self._marks[key] = Marks(marks.crashes, marks.solo)
            self._waiting[key] = None
        return marks

    def is_due(self, now_s: float) -> bool:
        """Whether `decide` would say something else than before."""
        return self._alone is None and bool(self._waiting) and self._may_give_turn(now_s)

    def decide(self, now_s: float) -> Key | None:
        """Who runs alone from now on; None: all that are free run together."""
        if self._alone is not None:
            return self._alone
        if self._waiting and self._may_give_turn(now_s):
            if not (self._is_turns and self._free):  # where nobody else waits, the time costs nobody anything
                self._is_turns, self._since_s = True, now_s
            self._alone = next(iter(self._waiting))
            del self._waiting[self._alone]
            marks = self._marks[self._alone]
            self._marks[self._alone] = Marks(marks.crashes, marks.solo, is_alone=True)
            self._events_left = turn_events(marks.crashes)
        elif self._is_turns:
            self._is_turns, self._turns_s, self._since_s = False, now_s - self._since_s, now_s
        return self._alone

    def _may_give_turn(self, now_s: float) -> bool:
        if not self._free:
            return True
        if self._is_turns:
            return now_s - self._since_s < TURNS_S
        return now_s - self._since_s >= max(MIN_FREE_S, self._turns_s)

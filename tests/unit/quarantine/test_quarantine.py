"""Who runs with whom, as a pure matter of order: nobody is convicted for a neighbour's deed, and nobody starves."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.quarantine import MAX_TURN_EVENTS, MIN_FREE_S, TURNS_S, Marks, Quarantine, turn_events

STEP_S = 0.1
MAX_STEPS = 200_000


@dataclass
class Job:
    """Wants `num_tokens` tokens, but kills the engine as it computes token `kills_at`. It comes at step `comes_at`."""

    num_tokens: int
    kills_at: int | None = None
    comes_at: int = 0
    num_done: int = 0
    num_kills: int = 0


class World:
    """An engine of one token a step and job, which any killer in it takes down, under a quarantine."""

    def __init__(self, jobs: dict[str, Job], restart_s: float = 1.0) -> None:
        self.jobs = jobs
        self.quarantine: Quarantine[str] = Quarantine()
        self.convicted: dict[str, Marks] = {}
        self.done: list[str] = []
        self.num_deaths = 0
        self.idle_since: dict[str, float] = {}
        self.longest_wait_s = 0.0
        self._restart_s = restart_s
        self._now_s = 0.0

    def run(self) -> None:
        for step in range(MAX_STEPS):
            for name, job in self.jobs.items():
                if job.comes_at == step:
                    self.quarantine.add(name)
                    self.idle_since[name] = self._now_s
            if len(self.done) + len(self.convicted) == len(self.jobs):
                return
            self._step()
        raise AssertionError(f"no end after {MAX_STEPS} steps: {self.jobs}")

    def _step(self) -> None:
        self._now_s += STEP_S
        alone = self.quarantine.decide(self._now_s)
        inside = list(self.quarantine.free) if alone is None else [alone]
        if alone is not None:
            assert self.quarantine.marks(alone).is_alone
        killers = [name for name in inside if self.jobs[name].num_done + 1 == self.jobs[name].kills_at]
        if killers:
            self._die(inside, killers)
            return
        for name in inside:
            self._compute(name, is_alone=name == alone)

    def _die(self, inside: list[str], killers: list[str]) -> None:
        self.num_deaths += 1
        self._now_s += self._restart_s
        for name in killers:
            self.jobs[name].num_kills += 1
        for name, marks in self.quarantine.blame(inside).items():
            if marks.is_poison:
                self.convicted[name] = marks

    def _compute(self, name: str, *, is_alone: bool) -> None:
        job = self.jobs[name]
        self.longest_wait_s = max(self.longest_wait_s, self._now_s - self.idle_since[name])
        self.idle_since[name] = self._now_s
        job.num_done += 1
        if job.num_done == job.num_tokens:
            self.quarantine.remove(name)
            self.done.append(name)
        elif is_alone:
            self.quarantine.count(1)


jobs_of = st.builds(Job, st.integers(1, 40), st.none(), st.integers(0, 60))
poisons_of = st.builds(lambda at, comes: Job(at + 5, at, comes), st.integers(1, 30), st.integers(0, 60))


@settings(deadline=None, max_examples=60)
@given(st.lists(jobs_of, max_size=12), st.lists(poisons_of, max_size=4))
def test_poisons_kill_three_times_at_most_and_nobody_else_is_convicted(
    innocents: list[Job], poisons: list[Job]
) -> None:
    """A single one exactly three times; one of several may have had the blame for another's deed before."""
    jobs = {f"innocent {number}": job for number, job in enumerate(innocents)}
    jobs |= {f"poison {number}": job for number, job in enumerate(poisons)}
    world = World(jobs)
    world.run()
    assert set(world.convicted) == {f"poison {number}" for number in range(len(poisons))}
    assert all(2 <= job.num_kills <= 3 for job in poisons)
    if len(poisons) == 1:
        assert world.num_deaths == 3
    assert all(marks.crashes >= 3 and marks.solo == 2 for marks in world.convicted.values())
    assert set(world.done) == {f"innocent {number}" for number in range(len(innocents))}


def test_fifteen_good_jobs_and_a_poison_in_one_batch_cost_three_deaths() -> None:
    jobs = {f"good {number}": Job(20) for number in range(15)} | {"poison": Job(20, kills_at=3)}
    world = World(jobs)
    world.run()
    assert (world.num_deaths, list(world.convicted), len(world.done)) == (3, ["poison"], 15)


def test_new_jobs_and_suspects_take_turns_and_neither_waits_for_long() -> None:
    """Forty suspects with turns of half a second, and innocents that come all the time."""
    jobs = {f"new {number}": Job(30, comes_at=5 * number) for number in range(100)}
    world = World(jobs)
    for number in range(40):
        name = f"suspect {number}"
        world.jobs[name] = Job(100, comes_at=-1)
        world.quarantine.add(name, crashes=3)
        world.idle_since[name] = 0.0
    world.run()
    turn_s = turn_events(3) * STEP_S
    phases = 40 * turn_s / TURNS_S + 1
    assert world.longest_wait_s <= phases * (TURNS_S + max(MIN_FREE_S, TURNS_S + turn_s) + turn_s)
    assert world.convicted == {}
    last_new = max(world.done.index(name) for name in world.done if name.startswith("new"))
    last_suspect = max(world.done.index(name) for name in world.done if name.startswith("suspect"))
    assert last_suspect < last_new, "a stream of new jobs kept suspects waiting"


def test_the_free_wait_no_longer_than_turns_may_take() -> None:
    quarantine: Quarantine[str] = Quarantine()
    for number in range(100):
        quarantine.add(f"suspect {number}", crashes=1)
    quarantine.add("new")
    now, first = 0.0, None
    while first is None:
        now += 0.05
        if quarantine.decide(now) is None:
            first = now
        quarantine.count(1)
    assert first <= TURNS_S + 0.1
    while quarantine.decide(now) is None:
        now += 0.05
    assert MIN_FREE_S - 0.1 <= now - first <= MIN_FREE_S + TURNS_S


def test_a_turn_doubles_with_each_crash_up_to_its_bound() -> None:
    assert [turn_events(crashes) for crashes in (1, 2, 3, 8, 9, 50, 5000)] == [1, 2, 4, 128, 256, 256, MAX_TURN_EVENTS]


def test_only_who_runs_is_alone_and_a_survived_turn_clears_what_it_had_alone() -> None:
    quarantine: Quarantine[str] = Quarantine()
    quarantine.add("a", crashes=2, solo=1)
    quarantine.add("b", crashes=1)
    assert quarantine.decide(0.0) == "a"
    assert quarantine.marks("a") == Marks(2, 1, is_alone=True)
    assert quarantine.marks("b") == Marks(1, 0)
    assert quarantine.count(1) is None
    assert quarantine.count(1) == "a"
    assert quarantine.marks("a") == Marks(2, 0)
    assert quarantine.decide(0.1) == "b"


def test_a_death_between_two_steps_is_nobodys_and_the_turn_is_given_again() -> None:
    quarantine: Quarantine[str] = Quarantine()
    quarantine.add("a", crashes=2, solo=1)
    assert quarantine.decide(0.0) == "a"
    assert quarantine.blame([]) == {}
    assert quarantine.alone is None
    assert quarantine.marks("a") == Marks(2, 1)
    assert quarantine.decide(0.1) == "a"


def test_two_deaths_alone_with_a_survived_turn_between_them_convict_nobody() -> None:
    quarantine: Quarantine[str] = Quarantine()
    quarantine.add("a", crashes=1)
    quarantine.decide(0.0)
    assert quarantine.blame(["a"]) == {"a": Marks(2, 1)}
    quarantine.decide(1.0)
    quarantine.count(2)
    assert quarantine.blame(["a"]) == {"a": Marks(3, 0)}
    quarantine.decide(2.0)
    assert quarantine.blame(["a"]) == {"a": Marks(4, 1)}
    quarantine.decide(3.0)
    (marks,) = quarantine.blame(["a"]).values()
    assert marks.is_poison
    assert quarantine.num_suspects == 0


def test_three_crashes_among_others_are_no_proof() -> None:
    assert not Marks(3, 1).is_poison
    assert not Marks(2, 2).is_poison
    assert not Marks(300, 0).is_poison
    assert Marks(3, 2).is_poison


def test_who_leaves_in_its_turn_ends_it() -> None:
    quarantine: Quarantine[str] = Quarantine()
    quarantine.add("a", crashes=1)
    quarantine.add("b")
    assert quarantine.decide(0.0) == "a"
    quarantine.remove("a")
    quarantine.remove("never here")
    assert quarantine.decide(0.1) is None
    assert list(quarantine.free) == ["b"]

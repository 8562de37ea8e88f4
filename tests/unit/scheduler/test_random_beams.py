"""Long random lives in which beam searches run among other sequences, and find what they find undisturbed."""

import random
from dataclasses import replace

import pytest

from scheduler import PreemptionMode, SamplingParams, Sequence
from scheduler.beam_search import num_blocks_at_most
from scheduler.output import Hypothesis
from scheduler.sequence import SequenceStatus
from tests.unit.scheduler.fake_runner import search
from tests.unit.scheduler.test_random_runs import EOS, LONG_RUN, STOP, TENANTS, Params, RandomLife

SWAP = PreemptionMode.SWAP
PARAMS = [
    Params(32, 4, 16, 24, 12, num_priorities=2),
    Params(24, 4, 32, 40, 16, is_caching=False, num_priorities=3),
    Params(32, 4, 16, 24, 12, num_cpu_blocks=40, max_delay=5, mode=SWAP, num_priorities=2),
    Params(24, 4, 32, 40, 16, is_caching=False, num_cpu_blocks=30, max_delay=4, mode=SWAP, num_priorities=3),
    Params(48, 2, 24, 20, 16, is_hash_poor=True, num_cpu_blocks=30, max_delay=3, num_priorities=2),
    Params(40, 3, 16, 9, 12, num_cpu_blocks=30, max_delay=3, write_behind=2, policy="fair,priority", num_priorities=2),
]
EVENTS = {"searched", "search preempted", "search aborted"}


class BeamLife(RandomLife):
    """Most of what it runs are searches, with all that may happen to them."""

    def __init__(self, params: Params, seed: int) -> None:
        super().__init__(params, seed)
        self.found: dict[str, tuple[Hypothesis, ...]] = {}
        self.searches: list[Sequence] = []

    def add_more(self) -> None:
        """A search that fits, if there are blocks for one."""
        rng, tenant, params = self.rng, self.rng.choice(TENANTS), self.params
        prompt, width = self.make_prompt(), rng.randrange(2, 6)
        max_tokens = min(params.max_num_tokens - len(prompt), rng.randrange(1, 25))
        num_tokens = len(prompt) + max_tokens - 1
        if num_blocks_at_most(len(prompt), num_tokens, width, params.block_size) > params.num_blocks:
            return
        sampling = SamplingParams(
            beam_width=width,
            n=rng.randrange(1, width + 1),
            max_tokens=max_tokens,
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
            early_stopping=rng.choice([True, False]),
            stop_token_ids=(STOP,) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
        )
        seq = Sequence(
            f"{tenant}-{self.num_added}",
            prompt,
            sampling,
            priority=rng.randrange(params.num_priorities),
            tenant=tenant,
            use_prefix_cache=rng.random() < 0.9,
            arrival_s=self.driver.now,
            deadline_s=self.driver.now + rng.randrange(120) if rng.random() < 0.2 else None,
        )
        self.num_added += 1
        self.driver.add(seq)
        self.searches.append(seq)
        self.alive[seq.seq_id] = seq
        self.expected[seq.seq_id] = []
        self.found[seq.seq_id] = tuple(search(tenant, prompt, sampling, max_tokens, frozenset({EOS})))

    def step(self) -> None:
        """Now and then a search has to give way, whether or not blocks are lacking; twice at most, so that some end."""
        scheduler = self.driver.scheduler
        running = [seq.seq_id for seq in scheduler.running if seq.beams is not None and seq.num_preemptions < 2]
        if running and not self.driver.is_in_flight and self.rng.random() < 0.3:
            scheduler.preempt(self.rng.choice(running))
        super().step()

    def count_more(self) -> None:
        for seq in self.alive.values():
            if seq.beams is not None and seq.num_preemptions:
                self.events["search preempted"] += 1
                self.events["search swapped"] += seq.status is SequenceStatus.SWAPPED
                is_running = seq.status is SequenceStatus.RUNNING
                is_half = is_running and any(len(beam.block_table) == 0 for beam in seq.beams)
                self.events["search half recomputed"] += is_half

    def abort(self, seq_id: str, *, is_in_step: bool = False) -> None:
        self.events["search aborted"] += self.alive[seq_id].beams is not None
        super().abort(seq_id, is_in_step=is_in_step)

    def check_the_end(self) -> None:
        """And each search that came to its end has found what it finds alone."""
        super().check_the_end()
        for seq in self.searches:
            end = self.driver.ends.get(seq.seq_id)
            if end is not None and seq.seq_id not in self.cut_short:
                assert end.hypotheses == self.found[seq.seq_id], seq.seq_id
                self.events["searched"] += 1
                self.events["searched after a preemption"] += seq.num_preemptions > 0


def live(params: Params, seed: int, num_steps: int) -> None:
    """Run, and let any failure tell how to see it again."""
    life = BeamLife(params, seed)
    try:
        life.run(num_steps)
        wanted = {*EVENTS, "searched after a preemption"}
        wanted |= {"search swapped"} if params.num_cpu_blocks else {"search half recomputed"}
        missing = {event for event in wanted if not life.events[event]}
        assert not missing, f"{missing} never came: this run has not seen it all: {dict(life.events)}"
    except AssertionError as error:
        error.add_note(f"BeamLife({params}, seed={seed}).run({num_steps}) at step {life.driver.now:.0f}")
        raise


@pytest.mark.parametrize("index", [1, 2, 4])
def test_a_random_life_with_searches_keeps_every_invariant_and_every_hypothesis(index: int) -> None:
    live(PARAMS[index], random.randrange(10**6), num_steps=500)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, SWAP])
def test_a_pool_that_barely_holds_a_search_too(mode: PreemptionMode) -> None:
    small = replace(PARAMS[2], num_blocks=20, mode=mode, num_cpu_blocks=40 if mode is SWAP else 0)
    live(small, random.randrange(10**6), num_steps=2_000)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_a_long_random_life_with_searches_keeps_every_invariant_and_every_hypothesis(index: int) -> None:
    live(PARAMS[index], random.randrange(10**6), num_steps=LONG_RUN)

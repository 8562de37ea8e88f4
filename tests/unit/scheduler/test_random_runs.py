"""Long random lives of the real scheduler, with all invariants after every call and every token checked."""

import random
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from scheduler import (
    CacheConfig,
    FinishReason,
    PreemptionMode,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    Sequence,
    Transfer,
)
from scheduler.beam_blocks import each_beam
from scheduler.family import Family
from scheduler.hit_sampling import HitSampler
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.lookahead import Wait
from scheduler.policy_names import DEFAULT_POLICY
from scheduler.prefix_cache import chain_hash
from scheduler.sequence import SequenceStatus
from tests.unit.scheduler.fake_runner import VOCAB_SIZE, CopyFaults, Driver, Lookahead, generate

EOS = 3
STOP = 5
SWAP = PreemptionMode.SWAP
TENANTS = ("red", "blue")


def poor_hash(parent_hash: int, tokens: bytes) -> int:
    """Blind to all but the first token: most different blocks of equal beginning collide."""
    return tokens[0]


@dataclass(frozen=True)
class Params:
    """One kind of load. `load` is how many sequences are kept alive at once."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    load: int
    is_caching: bool = True
    is_hash_poor: bool = False
    num_priorities: int = 1
    num_cpu_blocks: int = 0
    max_delay: int = 0
    mode: PreemptionMode = PreemptionMode.AUTO
    write_behind: int = 0
    swap_step: int = 0
    is_sampling: bool = False
    policy: str = DEFAULT_POLICY
    delay_factor: float = 0.0
    target_itl_ms: float | None = None
    lookahead: Lookahead = Lookahead.OFF

    @property
    def max_num_tokens(self) -> int:
        return min(120, self.num_blocks * self.block_size)

    @property
    def wanted(self) -> set[str]:
        """What must have happened in a run, or it has shown nothing."""
        events = set(EVENTS)
        if self.budget < self.num_blocks * self.block_size:
            # Else every step computes all that is known of whoever runs.
            events |= HALF_COMPUTED_EVENTS
        if self.block_size > 1:
            # Else every block is full, and nobody writes to one that others hold too.
            events.add("copied before a write")
        if self.is_caching:
            events |= CACHE_EVENTS
        if self.num_cpu_blocks:
            events |= SWAP_EVENTS
            if self.is_caching and not self.is_hash_poor:
                events |= SWAP_CACHE_EVENTS
        if self.is_sampling:
            events |= {"takes samples", "follows all"}
        if self.write_behind:
            events |= WRITE_BEHIND_EVENTS
        if self.swap_step:
            events |= STEP_LIMIT_EVENTS
        if self.lookahead is not Lookahead.OFF:
            events |= LOOKAHEAD_EVENTS
        return events


PARAMS = [
    Params(num_blocks=8, block_size=4, max_num_seqs=8, budget=16, load=6),
    Params(num_blocks=12, block_size=8, max_num_seqs=16, budget=24, load=12, num_priorities=3),
    Params(num_blocks=16, block_size=2, max_num_seqs=8, budget=7, load=8),
    Params(num_blocks=24, block_size=4, max_num_seqs=32, budget=40, load=24, is_caching=False),
    Params(num_blocks=32, block_size=4, max_num_seqs=32, budget=5, load=16, num_priorities=2),
    Params(num_blocks=32, block_size=1, max_num_seqs=8, budget=33, load=8),
    Params(num_blocks=48, block_size=2, max_num_seqs=64, budget=48, load=40, is_hash_poor=True),
    Params(num_blocks=64, block_size=4, max_num_seqs=16, budget=32, load=20, num_priorities=5),
    Params(num_blocks=64, block_size=4, max_num_seqs=64, budget=512, load=32),
    Params(num_blocks=64, block_size=2, max_num_seqs=24, budget=20, load=24, num_priorities=2),
    Params(num_blocks=10, block_size=8, max_num_seqs=10, budget=40, load=12, num_priorities=3),
    Params(num_blocks=40, block_size=3, max_num_seqs=20, budget=50, load=24, is_caching=False),
    Params(num_blocks=8, block_size=4, max_num_seqs=8, budget=16, load=8, num_cpu_blocks=6, max_delay=5),
    Params(num_blocks=16, block_size=4, max_num_seqs=16, budget=24, load=16, num_cpu_blocks=9, max_delay=6),
    Params(num_blocks=16, block_size=2, max_num_seqs=8, budget=7, load=12, num_cpu_blocks=14, max_delay=6, mode=SWAP),
    Params(24, 4, 32, 40, 24, is_caching=False, num_cpu_blocks=16, max_delay=8, num_priorities=3),
    Params(32, 4, 32, 20, 20, is_hash_poor=True, num_cpu_blocks=24, max_delay=9, num_priorities=2, mode=SWAP),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=40, max_delay=4, num_priorities=2),
    Params(16, 4, 16, 24, 16, num_cpu_blocks=12, max_delay=6, write_behind=2),
    Params(32, 4, 32, 40, 24, num_cpu_blocks=24, max_delay=3, num_priorities=2, mode=SWAP, write_behind=8),
    Params(48, 2, 24, 20, 28, is_hash_poor=True, num_cpu_blocks=40, max_delay=2, mode=SWAP, write_behind=1),
    Params(32, 4, 16, 24, 20, num_cpu_blocks=16, max_delay=3, write_behind=2, is_sampling=True),
    # Copies that take several steps to begin.
    Params(32, 4, 32, 40, 24, num_cpu_blocks=14, max_delay=3, num_priorities=2, mode=SWAP, write_behind=8, swap_step=2),
    Params(24, 4, 32, 40, 24, is_caching=False, num_cpu_blocks=16, max_delay=2, swap_step=1),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=40, num_priorities=2, swap_step=3),
    # Each order on its own, and with the waits and limits that only the time of a step brings about.
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, policy="fcfs"),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, policy="priority", num_priorities=3),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, policy="deadline"),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, policy="fair"),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, policy="fair,priority", num_priorities=2, delay_factor=3),
    Params(64, 2, 24, 20, 28, num_cpu_blocks=28, max_delay=4, target_itl_ms=800, delay_factor=0.5),
]

EVENTS = {
    "preempted by recompute", "aborted fresh", "aborted preempted", "aborted decoding", "aborted in a step",
    "ended by eos", "ended by stop", "ended by length", "ended by error", "resumed", "ended on arrival",
    "ended by deadline", "overdue fresh", "overdue decoding", "overdue preempted", "forked", "told to give way",
}  # fmt: skip
# Of a prompt of which a part is computed, between two steps.
HALF_COMPUTED_EVENTS = {"aborted prefilling", "overdue prefilling"}
CACHE_EVENTS = {"hit", "evicted"}
SWAP_EVENTS = {
    "preempted by swap", "swapped out", "swapped in", "CPU tier full", "damaged", "no memory",
    "aborted swapping out", "aborted swapped", "aborted swapping in", "sat out",
    "overdue swapping out", "overdue swapped", "overdue swapping in",
}  # fmt: skip
SWAP_CACHE_EVENTS = {"copied fewer out", "copied fewer in", "hit in the CPU tier"}
STEP_LIMIT_EVENTS = {"swapped out in pieces", "swapped in in pieces"}
LOOKAHEAD_EVENTS = {
    "looked ahead", "wasted row", *(wait.name for wait in (Wait.FAMILY, Wait.DEADLINE, Wait.LAST_TOKENS, Wait.BLOCKS)),
}  # fmt: skip
WRITE_BEHIND_EVENTS = {"written behind", "copied at most one out", "preempted while written behind"}
# Too rare to be sure of in a short run.
RARE_EVENTS = {f"overdue {state}" for state in ("preempted", "prefilling", "swapped", "swapping in", "swapping out")}
LONG_RUN = 20_000


class RandomLife:
    """Adds, aborts, fails and finishes sequences at random, and keeps the tokens that each of them must give."""

    def __init__(self, params: Params, seed: int) -> None:
        self.params = params
        self.rng = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.alive: dict[str, Sequence] = {}
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.cut_short: set[str] = set()
        self.num_added = 0
        # Few beginnings, so that sequences meet in the prefix cache.
        self.beginnings = [[self.rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
        config = SchedulerConfig(
            params.max_num_tokens,
            params.max_num_seqs,
            params.budget,
            frozenset({EOS}),
            preemption_mode=params.mode,
            # By these rates copying a block both ways costs as much as computing 0.87 of it: a matter of how full the
            # last one is, and of what lies where already.
            swap_bytes_per_s=2.3,
            prefill_tokens_per_s=1.0,
            write_behind_blocks=params.write_behind,
            scheduling_policy=params.policy,
            scheduler_delay_factor=params.delay_factor,
            target_itl_ms=params.target_itl_ms,
        )
        cache = CacheConfig(
            params.num_blocks,
            params.block_size,
            params.num_cpu_blocks,
            enable_prefix_caching=params.is_caching,
            kv_block_bytes=params.block_size,
            swap_step_blocks=params.swap_step,
        )
        kv = KVCacheManager(cache, poor_hash if params.is_hash_poor else chain_hash)
        if params.is_sampling:
            kv.sampler = HitSampler(window=20, min_hit_rate=0.2)
        # The model of one tenant is not that of the other: a shared block would change tokens.
        faults = CopyFaults(self.rng, params.max_delay, p_damaged=0.04, p_no_memory=0.03)
        self.driver = Driver(
            Scheduler(config, cache, kv), lambda seq_id: seq_id.split("-")[0], faults, params.lookahead
        )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.alive) < self.params.load and self.rng.random() < 0.5:
                self.add()
                if self.rng.random() < (0.2 if self.params.lookahead is Lookahead.OFF else 0.02):
                    self.add_family()  # while one runs no step is decided ahead
                self.add_more()
            states = sorted({self.state(seq) for seq in self.alive.values()})
            rarest = min(states, key=lambda each: self.events[f"aborted {each}"], default="")
            if states and (self.rng.random() < 0.08 or self.is_wanted(f"aborted {rarest}")):
                state = self.rng.choice([rarest, self.rng.choice(states)])
                self.abort(self.rng.choice([name for name, seq in self.alive.items() if self.state(seq) == state]))
            if self.rng.random() < 0.02 or self.is_wanted("told to give way"):
                self.have_one_give_way()
            self.pass_a_deadline()
            self.step()
        while self.driver.scheduler.has_work:
            self.step()
        self.check_the_end()

    def add(self) -> None:
        rng, params = self.rng, self.params
        tenant = rng.choice(TENANTS)
        seq_id = f"{tenant}-{self.num_added}"
        self.num_added += 1
        prompt = self.make_prompt()
        num_prompt = len(prompt)
        num_left = params.max_num_tokens - num_prompt
        max_tokens = None if rng.random() < 0.05 else min(num_left, int(rng.lognormvariate(2.5, 0.9)) + 1)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=(STOP,) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.8,
        )
        tokens = self.cut(generate(tenant, prompt, max_tokens or num_left), sampling)
        num_before = min(rng.randrange(2 * len(tokens)), len(tokens)) if rng.random() < 0.1 else 0
        self.events["resumed"] += 0 < num_before < len(tokens)
        self.events["ended on arrival"] += num_before == len(tokens)
        seq = Sequence(
            seq_id,
            prompt,
            sampling,
            generated_token_ids=tokens[:num_before],
            priority=rng.randrange(params.num_priorities),
            tenant=tenant,
            use_prefix_cache=rng.random() < 0.9,
            arrival_s=self.driver.now,
            deadline_s=self.driver.now + rng.randrange(120) if rng.random() < 0.4 else None,
        )
        self.driver.add(seq)
        self.alive[seq_id] = seq
        self.expected[seq_id] = tokens[num_before:]

    def add_more(self) -> None:
        """For lives with sequences of other kinds."""

    def count_more(self) -> None:
        """What else is to be counted in a step that is scheduled, but not updated."""

    def make_prompt(self) -> list[int]:
        rng = self.rng
        num_prompt = min(int(rng.lognormvariate(2.2, 1.0)) + 1, self.params.max_num_tokens - 1)
        beginning = rng.choice(self.beginnings)[: rng.randrange(num_prompt + 1)]
        return beginning + [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt - len(beginning))]

    def add_family(self) -> None:
        """Sequences of one prompt. Most go on after tokens of their own, or all would generate the same."""
        rng, family, tenant, prompt = self.rng, Family(), self.rng.choice(TENANTS), self.make_prompt()
        num_left = self.params.max_num_tokens - len(prompt)
        priority = rng.randrange(self.params.num_priorities)
        for _ in range(rng.randrange(2, 6)):
            given = [rng.randrange(6, VOCAB_SIZE) for _ in range(min(num_left - 1, rng.randrange(4)))]
            max_tokens = len(given) + rng.randrange(1, min(30, num_left - len(given)) + 1)
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            seq = Sequence(
                f"{tenant}-{self.num_added}",
                prompt,
                sampling,
                generated_token_ids=given,
                priority=priority,
                tenant=tenant,
                family=family,
                arrival_s=self.driver.now,
            )
            self.num_added += 1
            self.driver.add(seq)
            self.alive[seq.seq_id] = seq
            self.expected[seq.seq_id] = generate(tenant, prompt + given, max_tokens - len(given))

    @staticmethod
    def cut(tokens: list[int], sampling: SamplingParams) -> list[int]:
        """Up to and with the first token that ends the sequence."""
        for index, token_id in enumerate(tokens):
            if token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos):
                return tokens[: index + 1]
        return tokens

    @staticmethod
    def state(seq: Sequence) -> str:
        if seq.status is SequenceStatus.RUNNING:
            return "prefilling" if seq.num_tokens - seq.num_computed_tokens > 1 else "decoding"
        if seq.status is not SequenceStatus.WAITING:
            return seq.status.name.lower().replace("_", " ")
        return "preempted" if seq.num_preemptions else "fresh"

    def abort(self, seq_id: str, *, is_in_step: bool = False) -> None:
        """Between two steps, or while one computes it."""
        state = self.state(self.alive.pop(seq_id))
        self.events["aborted in a step" if is_in_step else f"aborted {state}"] += 1
        assert self.driver.scheduler.abort(seq_id)
        assert not self.driver.scheduler.abort(seq_id)
        self.aborted.add(seq_id)

    def have_one_give_way(self) -> None:
        """Preempt somebody for whom nobody lacks a block: those with a deadline are rarely victims otherwise."""
        running = [seq.seq_id for seq in self.driver.scheduler.running if seq.deadline_s is not None]
        if running and not self.driver.is_in_flight:
            self.events["told to give way"] += self.driver.scheduler.preempt(self.rng.choice(running))

    def is_wanted(self, event: str) -> bool:
        """Whether something that could happen now should: yes as long as it is rare, then sometimes."""
        return self.events[event] < 3 or (self.events[event] < 10 and self.rng.random() < 0.2)

    def pass_a_deadline(self) -> None:
        """Let the time pass to the deadline of somebody whose state has seen that least: some are rare."""
        pressed = [seq for seq in self.alive.values() if seq.deadline_s is not None]
        if pressed:
            states = sorted({self.state(seq) for seq in pressed})
            state = min(states, key=lambda each: self.events[f"overdue {each}"])
            if self.is_wanted(f"overdue {state}"):
                seq = self.rng.choice([seq for seq in pressed if self.state(seq) == state])
                assert seq.deadline_s is not None
                self.driver.now = max(self.driver.now, seq.deadline_s - 1)

    def step(self) -> None:
        scheduler, rng = self.driver.scheduler, self.rng
        self.driver.step_s = rng.random()
        names_before = self.names()
        states = {seq_id: self.state(seq) for seq_id, seq in self.alive.items() if seq.deadline_s is not None}
        before = scheduler.stats()
        failing = {}
        if len(scheduler.running) > 1 and rng.random() < 0.02:
            failing[rng.choice([seq.seq_id for seq in each_beam(scheduler.running)])] = "no number to choose from"

        def between(output: SchedulerOutput) -> None:
            stats = scheduler.stats()
            self.events["preempted by recompute"] += stats.num_preemptions_recompute - before.num_preemptions_recompute
            self.count_swaps(output, before)
            self.count_more()
            self.events["hit"] += stats.prefix_hit_tokens > before.prefix_hit_tokens
            self.events["forked"] += stats.num_forks - before.num_forks
            self.events["copied before a write"] += stats.num_copied_blocks - before.num_copied_blocks
            self.events["evicted"] += len(names_before - self.names())
            if output.chunks and rng.random() < 0.02:
                self.abort(rng.choice(output.chunks.seq_ids).partition("/")[0], is_in_step=True)  # a beam's search

        outputs = self.driver.step(failing, between)
        for seq_output in outputs:
            if seq_output.finish_reason is not None:
                del self.alive[seq_output.seq_id]
                self.events[f"ended by {seq_output.finish_reason}"] += 1
                if seq_output.finish_reason is FinishReason.DEADLINE:
                    self.events[f"overdue {states[seq_output.seq_id]}"] += 1
                if seq_output.finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE):
                    self.cut_short.add(seq_output.seq_id)

    def count_swaps(self, output: SchedulerOutput, before: SchedulerStats) -> None:
        """What the swap tier did in a step that is scheduled, but not updated."""
        scheduler, events = self.driver.scheduler, self.events
        stats = scheduler.stats()
        events["preempted by swap"] += stats.num_preemptions_swap - before.num_preemptions_swap
        events["CPU tier full"] += stats.num_full_tier_recomputes - before.num_full_tier_recomputes
        num_written = stats.num_written_behind_blocks - before.num_written_behind_blocks
        assert num_written <= self.params.write_behind
        events["written behind"] += num_written
        events["takes samples" if scheduler.kv.sampler.is_sampling else "follows all"] += 1
        events["hit in the CPU tier"] += stats.prefix_tier_hit_tokens > before.prefix_tier_hit_tokens
        if self.params.swap_step:
            assert max(output.num_swapped_blocks) <= self.params.swap_step
        served_ids = set(output.chunks.seq_ids)
        is_spent = output.num_tokens == scheduler.config.max_num_batched_tokens
        events["sat out"] += not is_spent and any(seq.seq_id not in served_ids for seq in scheduler.running)
        for seq in scheduler.moving.values():
            is_out = seq.status is SequenceStatus.SWAPPING_OUT
            events[f"swapped {'out' if is_out else 'in'} in pieces"] += seq.num_transfers > 1
            events["preempted while written behind"] += is_out and seq.num_transfers > 1
            moved = [transfer for transfer in (*output.swap_outs, *output.swap_ins) if self.waits(seq, transfer)]
            for transfer in moved:
                direction = seq.status.name.removeprefix("SWAPPING_").lower()
                events[f"swapped {direction}"] += 1
                events[f"copied fewer {direction}"] += len(transfer.copies) < len(seq.cpu_table)
                events[f"copied at most one {direction}"] += len(transfer.copies) == 1 < len(seq.cpu_table)

    def waits(self, seq: Sequence, transfer: Transfer) -> bool:
        swap = self.driver.scheduler.kv.swap
        return swap is not None and seq in swap.flights[transfer.transfer_id].waiting

    def names(self) -> set[int]:
        blocks = self.driver.scheduler.kv.pool.blocks
        return {block.content.name for block in blocks if block.content is not None}

    def check_the_end(self) -> None:
        """Everyone has ended once, with exactly its own tokens; those that were cut short, with the first of them."""
        driver = self.driver
        self.events.update(driver.runner.num_failed)
        self.events["looked ahead"], self.events["wasted row"] = driver.num_looked_ahead, driver.num_wasted_rows
        self.events.update({wait.name: count for wait, count in driver.scheduler.lookahead.num_waits.items()})
        assert not self.alive
        assert not driver.runner.rows
        assert len(driver.ends) + len(self.aborted) == self.num_added
        for seq_id, expected in self.expected.items():
            generated = driver.generated[seq_id]
            if seq_id in self.aborted | self.cut_short:
                assert generated == expected[: len(generated)], seq_id
            else:
                assert generated == expected, seq_id
        for seq_id, end in driver.ends.items():
            assert seq_id not in self.aborted
            assert end.stats is not None
            assert end.stats.num_generated_tokens >= len(driver.generated[seq_id])
        stats = driver.scheduler.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert stats.num_used_cpu_blocks == 0
        assert stats.num_damaged_blocks == driver.runner.num_failed["damaged"]


def live(params: Params, seed: int, num_steps: int) -> str:
    """Run, and let any failure tell how to see it again; how often each event came, with the seed."""
    life = RandomLife(params, seed)
    try:
        life.run(num_steps)
        wanted = params.wanted - (RARE_EVENTS if num_steps < LONG_RUN else set())
        missing = {event for event in wanted if not life.events[event]}
        assert not missing, f"{missing} never came: this run has not seen it all: {dict(life.events)}"
    except AssertionError as error:
        error.add_note(f"RandomLife({params}, seed={seed}).run({num_steps}) at step {life.driver.now:.0f}")
        raise
    counts = ", ".join(f"{event} {life.events[event]:,}" for event in sorted(params.wanted))
    return f"seed {seed}, {num_steps:,} steps: {counts}"


@pytest.mark.parametrize("index", [0, 3, 6, 7, 14, 15, 17, 20, 21, 22, 28, 29])
def test_a_random_life_keeps_every_invariant_and_every_token(index: int) -> None:
    live(PARAMS[index], random.randrange(10**6), num_steps=4_000)


@pytest.mark.parametrize(
    ("index", "lookahead"),
    [(7, Lookahead.LAUNCHED), (19, Lookahead.LAUNCHED), (20, Lookahead.PLANNED)],
)
def test_a_random_life_whose_next_step_is_decided_ahead_keeps_every_invariant_and_every_token(
    index: int, lookahead: Lookahead
) -> None:
    live(replace(PARAMS[index], lookahead=lookahead), random.randrange(10**6), num_steps=3_000)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("lookahead", [Lookahead.PLANNED, Lookahead.LAUNCHED])
@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_a_long_random_life_whose_next_step_is_decided_ahead_keeps_every_invariant_and_every_token(
    index: int, lookahead: Lookahead
) -> None:
    live(replace(PARAMS[index], lookahead=lookahead), random.randrange(10**6), num_steps=LONG_RUN)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_a_long_random_life_keeps_every_invariant_and_every_token(
    index: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = live(PARAMS[index], random.randrange(10**6), num_steps=LONG_RUN)
    with capsys.disabled():
        sys.stdout.write(f"\nlife {index}, {counts}\n")

"""One step's budget, and the arithmetic of promises."""

import pytest

from scheduler.config import CacheConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.policy import age_key
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence
from scheduler.step_adder import StepAdder
from tests.unit.chunks import chunk_rows
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler, make_seq


def make_waiting(seq_id: str, num_tokens: int, max_num_tokens: int = 1_000) -> Sequence:
    seq = make_seq(seq_id, num_tokens)
    seq.max_num_tokens = max_num_tokens
    return seq


def make_adder(num_blocks: int, budget: int = 100) -> StepAdder:
    return StepAdder(KVCacheManager(CacheConfig(num_blocks, block_size=4)), budget)


def test_a_chunk_takes_a_token_at_least_however_many_are_behind() -> None:
    adder = make_adder(num_blocks=9, budget=2)
    assert adder.try_serve(make_waiting("a", 10), num_behind=5)
    assert adder.num_tokens_left == 1


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(3, False), (4, True)])
def test_admission_wants_blocks_for_all_known_tokens_and_a_spare_one(num_blocks: int, is_admitted: bool) -> None:
    """12 tokens are 3 blocks; that the budget of this step covers one of them alone makes no difference."""
    adder = make_adder(num_blocks, budget=4)
    assert adder.try_admit(make_waiting("a", 12), is_alone=False) is is_admitted


def test_whoever_is_alone_needs_no_spare_block() -> None:
    assert make_adder(num_blocks=3).try_admit(make_waiting("a", 12), is_alone=True)


def test_a_sequence_that_ends_before_it_needs_a_spare_block_asks_for_none() -> None:
    """Of 13 tokens in all, the last needs no slot: nothing comes after it."""
    assert make_adder(num_blocks=3).try_admit(make_waiting("a", 10, max_num_tokens=13), is_alone=False)
    assert not make_adder(num_blocks=3).try_admit(make_waiting("a", 10, max_num_tokens=14), is_alone=False)


def test_what_is_promised_to_one_is_not_given_to_the_next_of_the_same_step() -> None:
    """Each takes a block and is promised another: two fit into 5 blocks, not three."""
    adder = make_adder(num_blocks=5)
    assert [adder.try_admit(make_waiting(name, 4), is_alone=False) for name in "abc"] == [True, True, False]


def test_what_is_promised_to_those_that_run_is_not_given_away() -> None:
    """The one that runs has computed 4 of its 12 tokens: 1 block is owned, 3 are promised, 2 of 6 are left."""
    adder = make_adder(num_blocks=6, budget=4)
    seq = make_waiting("a", 12)
    running = RunningQueue(age_key)
    running.add(seq)
    assert adder.try_serve(seq, num_behind=0)
    adder.num_tokens_left = 100
    adder.open_admission(running)
    assert not adder.try_admit(make_waiting("b", 8), is_alone=False)
    assert adder.try_admit(make_waiting("c", 4), is_alone=False)


@pytest.mark.parametrize(("num_preemptions", "num_needed"), [(0, 2), (1, 3), (2, 5), (3, 9), (99, 25)])
def test_each_preemption_doubles_the_room_that_a_sequence_waits_for(num_preemptions: int, num_needed: int) -> None:
    """4 tokens are one block; the whole of its 101 tokens, the last of which needs no slot, are 25 blocks."""
    for num_blocks in range(2, 30):
        seq = make_waiting("a", 4, max_num_tokens=101)
        seq.num_preemptions = num_preemptions
        is_admitted = make_adder(num_blocks).try_admit(seq, is_alone=False)
        assert is_admitted == (num_blocks >= num_needed)


def test_a_decode_passes_with_a_look_until_its_blocks_are_full() -> None:
    """Of 4 + 9 tokens in blocks of 4, three begin a block; the row hears of each once, in the step that needs it."""
    driver = Driver(make_scheduler(num_blocks=9, block_size=4))
    driver.add(seq := make_seq("a", 4, 9, ignore_eos=True))
    slots, rows, blocks = [], [], []
    while "a" not in driver.ends:
        driver.step()
        assert driver.last_output is not None
        slots.append(seq.num_decode_slots)
        rows.append(len(driver.last_output.new_rows))
        blocks.append([len(new.block_ids) for new in driver.last_output.new_blocks])
    assert slots[:-1] == [4, 8, 8, 8, 8, 12, 12, 12]
    assert rows == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert blocks == [[], [1], [], [], [], [1], [], [], []]


@pytest.mark.parametrize(("num_blocks", "may_lack"), [(3, False), (2, True)])
def test_blocks_may_run_out_where_those_that_grow_want_more_than_are_free(num_blocks: int, may_lack: bool) -> None:
    """A decode at the end of its only block wants one more, a prompt of 8 tokens of which none is computed two."""
    adder, decode, prompt = make_adder(num_blocks), make_waiting("a", 4), make_waiting("b", 8)
    assert make_adder(1).try_serve(decode, num_behind=0)
    decode.num_computed_tokens = 4
    decode.token_ids.append(1)
    assert adder.may_lack_blocks([decode, prompt]) is may_lack


def test_mere_decodes_are_served_as_far_as_the_budget_goes() -> None:
    adder = make_adder(num_blocks=9, budget=2)
    seqs = [make_waiting(name, 4) for name in "abc"]
    adder.serve_decodes(seqs)
    assert (adder.seqs, adder.num_tokens_left) == (seqs[:2], 0)
    output = adder.build(1, ())
    assert chunk_rows(output.chunks) == [("a", 0, 1, True), ("b", 0, 1, True)]
    assert output.chunks.sampled_ids == ["a", "b"]
    assert chunk_rows(output.chunks.part(1, 2)) == [("b", 0, 1, True)]

"""Reading recorded traffic in its three formats, and what is refused in which words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.simulate.adapt import scaled, window
from ops.simulate.errors import SimulateError
from ops.simulate.traces import Trace, read_trace
from tests.unit.simulate.traces_at_hand import AZURE, MOONCAKE, public_trace, write_lines

Write = Callable[[str], Path]

AZURE_TEXT = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9305900,396,109\r\n"
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a trace and answers its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def lengths(trace: Trace) -> list[tuple[float, int, int]]:
    """Arrivals in seconds, to the microsecond, and tokens."""
    return [(round(each.arrival_s, 6), each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests]


def test_azure_s_times_count_from_the_first_arrival(write: Write) -> None:
    trace = read_trace(write(AZURE_TEXT))
    assert trace.kind == "azure"
    assert lengths(trace) == [(0.0, 374, 44), (4.25, 396, 109)]


def test_columns_are_found_by_name_and_others_are_passed_over(write: Write) -> None:
    text = "TIMESTAMP,Kind,GeneratedTokens,ContextTokens\n2024-05-10 00:00:00.009930+00:00,chat,2,1000\n\n"
    assert lengths(read_trace(write(text))) == [(0.0, 1000, 2)]


def test_mooncake_s_ids_become_small_numbers_and_stay_equal(write: Write) -> None:
    trace = read_trace(
        write(
            '{"timestamp": 3000, "input_length": 513, "output_length": 3, "hash_ids": [46000000000, 9]}\n'
            '{"timestamp": 5500, "input_length": 1024, "output_length": 4, "hash_ids": [46000000000, 7]}\n'
        )
    )
    assert trace.kind == "mooncake"
    assert lengths(trace) == [(0.0, 513, 3), (2.5, 1024, 4)]
    assert [each.hash_ids for each in trace.requests] == [(0, 1), (0, 2)]
    assert trace.num_distinct_hashes == 3


def test_our_own_lines_may_carry_tenant_priority_hashes_and_more(write: Write) -> None:
    trace = read_trace(
        write(
            '{"arrival_ms": 1700000000250, "prompt_tokens": 5, "output_tokens": 6, "end_ms": 40, "priority": -1}\n'
            '\n{"arrival_ms": 1700000000000, "prompt_tokens": 3, "output_tokens": 4, "tenant": "ab", "hash_ids": [4]}\n'
        )
    )
    first, second = trace.requests
    assert trace.kind == "pagemill"
    assert (first.index, first.num_prompt_tokens, first.tenant, first.hash_ids) == (0, 3, "ab", (0,))
    assert (second.index, second.priority) == (1, -1)
    assert second.arrival_s == pytest.approx(0.25)


def test_prompts_begin_alike_exactly_as_far_as_their_ids_are_equal(write: Write) -> None:
    trace = read_trace(
        write(
            '{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [5, 6, 7]}\n'
            '{"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [5, 6, 8]}\n'
        )
    )
    first, second = (trace.prompt_tokens(request) for request in trace.requests)
    assert (len(first), len(second)) == (1100, 1536)
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second[1024:])


def test_prompts_without_ids_share_nothing(write: Write) -> None:
    trace = read_trace(write(AZURE_TEXT))
    first, second = (trace.prompt_tokens(request) for request in trace.requests)
    assert len(first) == 374
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has a header and no requests"),
        ("TIMESTAMP,ContextTokens\n", "line 1 of {path} has no column GeneratedTokens"),
        (AZURE_TEXT + "2023-11-16 18:15:51\n", "line 4 of {path} has 1 of 3 columns"),
        (AZURE_TEXT + "yesterday,1,1\n", "line 4 of {path}: TIMESTAMP is 'yesterday': use a time like"),
        (AZURE_TEXT + "2023-11-16 18:15:51,many,1\n", "line 4 of {path}: ContextTokens is 'many': use a whole number"),
        (AZURE_TEXT + "2023-11-16 18:15:51,0,1\n", "line 4 of {path}: ContextTokens is 0: use 1 to 10000000"),
        ('{"arrival_ms": 1, "prompt_tokens": 1, "output_tokens": 1}\n{"arr', "line 2 of {path} is no JSON"),
        ("[1, 2]\n", "line 1 of {path}: use an object with arrival_ms"),
        ("hello\n", "line 1 of {path} is no JSON"),
        ('{"arrival_ms": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 1 of {path}: arrival_ms is nan"),
        ('{"arrival_ms": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 1 of {path}: arrival_ms is -1"),
        ('{"arrival_ms": 1, "output_tokens": 1}', "prompt_tokens is null: use a whole number"),
        ('{"arrival_ms": 1, "prompt_tokens": true, "output_tokens": 1}', "prompt_tokens is true: use a whole number"),
        ('{"arrival_ms": 1, "prompt_tokens": 2, "output_tokens": 1.5}', "output_tokens is 1.5: use a whole number"),
        ('{"arrival_ms": 1, "prompt_tokens": 99999999, "output_tokens": 1}', "prompt_tokens is 99999999: use 1 to"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "hash_ids has 1 ids, but a prompt of 600 tokens has 2 blocks of 512",
        ),
        (
            '{"timestamp": 1, "input_length": 6, "output_length": 1, "hash_ids": "1"}',
            "hash_ids is something else: use a list",
        ),
        (
            '{"timestamp": 1, "input_length": 6, "output_length": 1}\n'
            '{"arrival_ms": 1, "prompt_tokens": 1, "output_tokens": 1}\n',
            "mixes the formats mooncake, pagemill",
        ),
    ],
)
def test_a_line_that_is_not_understood_is_named_by_its_number(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(SimulateError) as caught:
        read_trace(path)
    assert message.format(path=path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x9f")
    for path, words in [(tmp_path / "none", "No such file"), (tmp_path, "directory"), (binary, "not UTF-8")]:
        with pytest.raises(SimulateError, match=words):
            read_trace(path)


def test_a_window_begins_where_its_seed_says_and_counts_from_its_own_first_arrival(tmp_path: Path) -> None:
    lines = [{"arrival_ms": 100 * n, "prompt_tokens": n + 1, "output_tokens": 1} for n in range(50)]
    trace = read_trace(write_lines(tmp_path / "trace", lines))
    assert window(trace, None, 3) is trace
    assert [each.num_prompt_tokens for each in window(trace, 3, None).requests] == [1, 2, 3]
    drawn = window(trace, 3, seed=5)
    assert drawn == window(trace, 3, seed=5)
    assert [each.index for each in drawn.requests] == [0, 1, 2]
    assert [each.arrival_s for each in drawn.requests] == pytest.approx([0, 0.1, 0.2])
    starts = {window(trace, 3, seed).requests[0].num_prompt_tokens for seed in range(20)}
    assert len(starts) > 5


def test_scaling_changes_arrivals_by_one_factor_and_all_lengths_by_another(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 900, "input_length": 1024, "output_length": 100, "hash_ids": [1, 3]},
    ]
    trace = read_trace(write_lines(tmp_path / "trace", lines))
    small = scaled(trace, speed_up=3, lengths=1 / 8)
    assert small.tokens_per_hash == 64
    assert lengths(small) == [(0.0, 65, 1), (0.3, 128, 12)]
    first, second = (small.prompt_tokens(request) for request in small.requests)
    assert first[:64] == second[:64]
    with pytest.raises(SimulateError, match="leave nothing of blocks of 512 tokens"):
        scaled(trace, speed_up=1, lengths=1 / 2000)


def test_the_public_azure_trace_is_read_as_it_is() -> None:
    trace = read_trace(public_trace(AZURE))
    assert len(trace.requests) == 19_366
    assert sum(each.num_prompt_tokens for each in trace.requests) == 22_361_870
    assert sum(each.num_output_tokens for each in trace.requests) == 4_088_665
    assert 3500 < trace.requests[-1].arrival_s < 3600


def test_the_public_mooncake_trace_is_read_as_it_is() -> None:
    trace = read_trace(public_trace(MOONCAKE))
    assert len(trace.requests) == 12_031
    assert trace.num_distinct_hashes == 182_790
    assert sum(len(each.hash_ids) for each in trace.requests) == 288_500
    assert trace.requests[-1].arrival_s == pytest.approx(3536.999)

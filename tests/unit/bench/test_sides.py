"""Both sides on a tiny checkpoint: the same requests, the same tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.config import ARCHITECTURES, config_from_directory
from model.loader import load_checkpoint
from model.weights import random_weights
from ops.bench.errors import BenchError
from ops.bench.ours import Ours
from ops.bench.peers.streaming import handlers_of
from ops.bench.peers.transformers_continuous import ContinuousPeer
from ops.bench.peers.transformers_model import build_model
from ops.bench.peers.transformers_static import TransformersPeer, left_padded
from ops.bench.runs import OursRun, PeerRun
from ops.bench.workload import WorkloadShape, draw_lengths, make_requests
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.model_runner.driver import Driver, tiny_config
from worker.engine_config import EngineConfig

# As many ids as the tokenizer knows: neither side can draw another one.
VOCAB_SIZE = 259


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def peer(folder: Path) -> TransformersPeer:
    made = TransformersPeer(str(folder), None, "float32", "cpu", None)
    facts = made.prepare()
    assert facts == {
        "threads": torch.get_num_threads(),
        "attention": "sdpa",
        "dtype": "float32",
        "class": "LlamaForCausalLM",
    }
    return made


@pytest.fixture
def ours(folder: Path) -> Iterator[Ours]:
    made = Ours(EngineConfig(str(folder), num_threads=1, check_invariants="step"), "inprocess")
    yield made
    made.close()


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], int]]:
    lengths = draw_lengths(WorkloadShape(20, 0.5, 6, 0.6), 6, seed=1)
    made = make_requests(lengths, vocab_size=VOCAB_SIZE, seed=1, salt="sides")
    return [(list(each.prompt_ids), each.num_output) for each in made]


def test_our_engine_and_the_peer_generate_the_same_tokens(
    ours: Ours, peer: TransformersPeer, requests: list[tuple[list[int], int]]
) -> None:
    info = ours.prepare(batch=3, num_kv_blocks=20)
    assert (info["max_num_seqs"], info["num_blocks"]) == (3, 20)
    wanted = sum(num_output for _, num_output in requests)
    for rotation in range(len(requests)):
        rotated = requests[rotation:] + requests[:rotation]
        mine = OursRun(**ours.run(rotated))
        theirs = PeerRun(**peer.run(rotated, batch=3))
        assert mine.num_output_tokens == theirs.num_output_tokens == wanted
        assert mine.first_ids == theirs.first_ids
        assert len(mine.first_ids) == rotated[0][1]


def test_transformers_own_continuous_batching_generates_the_same_tokens(
    folder: Path, peer: TransformersPeer, requests: list[tuple[list[int], int]]
) -> None:
    continuous = ContinuousPeer(str(folder), None, "float32", "cpu", None)
    handlers = handlers_of(continuous)
    assert handlers["prepare"](batch=2, num_kv_tokens=100)["attention"] == "sdpa"
    wanted = PeerRun(**peer.run(requests, batch=2))
    for run in (
        PeerRun(**handlers["run"](requests=requests, batch=2)),
        PeerRun(**handlers["run_arrivals"](requests=requests, arrivals_s=[0.02 * n for n in range(len(requests))])),
    ):
        assert run.first_ids == wanted.first_ids
        assert run.num_output_tokens == wanted.num_output_tokens
        assert len(run.gap_s) == wanted.num_output_tokens - len(requests)
        assert min(run.ttft_s) > 0
    handlers["prepare"](batch=3, num_kv_tokens=100)
    assert PeerRun(**handlers["run"](requests=requests, batch=3)).first_ids == wanted.first_ids


def test_our_engine_takes_requests_at_their_times(ours: Ours, requests: list[tuple[list[int], int]]) -> None:
    ours.prepare(batch=2, num_kv_blocks=20)
    at_once = OursRun(**ours.run(requests))
    late = OursRun(**ours.run_arrivals([(prompt[::-1], wanted) for prompt, wanted in requests], [0.0] * 5 + [0.3]))
    assert late.num_output_tokens == at_once.num_output_tokens
    assert late.wall_s > 0.3
    assert late.reply_s[-1] <= late.wall_s - 0.3 + 1e-9


def test_a_run_tells_what_was_computed(ours: Ours, requests: list[tuple[list[int], int]]) -> None:
    ours.prepare(batch=2, num_kv_blocks=20)
    run = OursRun(**ours.run(requests))
    num_output = sum(num_output for _, num_output in requests)
    assert len(run.ttft_s) == len(run.reply_s) == len(requests)
    assert len(run.gap_s) == num_output - len(requests)
    assert max(wanted for _, wanted in requests) <= run.num_steps < num_output
    assert 0 < run.forward_s <= run.step_s < run.wall_s
    assert 0 < run.host_share < 1
    assert 0.4 < run.kv_use <= 1
    assert run.num_prefix_hits == 0


def test_a_repeated_prompt_shows_as_prefix_hits(ours: Ours) -> None:
    ours.prepare(batch=1, num_kv_blocks=20)
    prompt = list(range(40))
    assert OursRun(**ours.run([(prompt, 2)])).num_prefix_hits == 0
    assert OursRun(**ours.run([(prompt, 2)])).num_prefix_hits == 32


def test_the_engine_is_built_again_for_another_batch_alone(ours: Ours) -> None:
    first = ours.prepare(batch=2, num_kv_blocks=20)
    ours.run([([1, 2, 3], 2)])
    assert ours.prepare(batch=2, num_kv_blocks=20) == first
    assert ours.prepare(batch=4, num_kv_blocks=20)["max_num_seqs"] == 4
    assert OursRun(**ours.run([([1, 2, 3], 2)])).num_output_tokens == 2


def test_a_run_before_an_engine_stands_is_refused(ours: Ours) -> None:
    with pytest.raises(BenchError, match="prepare comes before run"):
        ours.run([([1], 1)])


def test_the_static_batch_runs_to_its_longest_reply_and_counts_useful_tokens_alone(peer: TransformersPeer) -> None:
    run = PeerRun(**peer.run([([1, 2, 3], 2), ([4], 7), ([5, 6], 3), ([7], 1), ([8], 4)], batch=2))
    assert run.num_steps == 7 + 3 + 4
    assert run.num_output_tokens == 2 + 7 + 3 + 1 + 4
    assert len(run.first_ids) == 2
    assert len(set(run.reply_s)) == 3
    assert sum(run.reply_s[::2]) <= run.wall_s


def test_padding_is_on_the_left_and_masked() -> None:
    ids, mask = left_padded([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_judge_finds_the_peer_s_own_tokens_without_fault_and_another_one_at_fault(peer: TransformersPeer) -> None:
    prompt = [10, 20, 30, 40]
    ids = PeerRun(**peer.run([(prompt, 5)], batch=1)).first_ids
    assert peer.judge(prompt, ids) == [0.0] * 5
    wrong = [*ids[:3], (ids[3] + 1) % VOCAB_SIZE, ids[4]]
    gaps = peer.judge(prompt, wrong)
    assert gaps[:3] == [0.0] * 3
    assert gaps[3] > 0


def test_the_judge_passes_over_ids_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    """The rows of an embedding beyond the tokenizer's size: the peer draws them, our engine never does."""
    folder = write_tiny_checkpoint(tmp_path, vocab_size=1024)
    peer = TransformersPeer(str(folder), None, "float32", "cpu", None)
    peer.prepare()
    prompt = [1, 2, 3]
    chosen = PeerRun(**peer.run([(prompt, 4)], batch=1)).first_ids
    assert max(chosen) >= VOCAB_SIZE
    with torch.inference_mode():
        best = int(peer._model(torch.tensor([prompt])).logits[0, -1, :VOCAB_SIZE].argmax())
    assert peer.judge(prompt, [best]) == [0.0]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.values()))
def test_the_peer_s_model_has_our_weights_whatever_the_architecture(tmp_path: Path, architecture: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, architectures=[architecture], sliding_window=None)
    config = config_from_directory(folder)
    weights = random_weights(config, seed=2)
    state = build_model(config, weights, torch.float32).state_dict()
    assert set(state) - set(weights) == {"lm_head.weight"}
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor)
    assert torch.equal(state["lm_head.weight"], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("MistralForCausalLM", (5, 5)),
        ("MinistralForCausalLM", (5, None)),
        ("MinistralForCausalLM", ()),
        ("Qwen2ForCausalLM", (None, 5)),
        ("Qwen2ForCausalLM", ()),
    ],
)
def test_the_peer_s_model_has_our_windows(architecture: str, windows: tuple[int | None, ...]) -> None:
    """It gives our logits, for a text that is longer than the window."""
    config = tiny_config(architecture=architecture, windows=windows, qkv_bias=architecture == "Qwen2ForCausalLM")
    weights = random_weights(config, seed=2)
    driver = Driver(config, weights)
    sequence = driver.add("a", [7 * n % 199 for n in range(40)])
    driver.decode(1)
    with torch.inference_mode():
        peer = build_model(config, weights, torch.float32)(torch.tensor([sequence.token_ids[:-1]])).logits[0, -1]
    torch.testing.assert_close(sequence.logits[0], peer, rtol=0, atol=1e-4)


def test_a_peer_of_other_weights_is_refused(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    weights = dict(checkpoint.weights)
    del weights["model.norm.weight"]
    with pytest.raises(BenchError, match=r"lacks \['model.norm.weight'\]"):
        build_model(checkpoint.config, weights, torch.float32)

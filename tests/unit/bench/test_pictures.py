"""Pictures are drawn from the JSON that measurements print."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench.cli import main
from ops.bench.errors import BenchError
from ops.bench.pictures import INSTALL, Series, check_installed, draw_report, pictures_of
from ops.bench.result_files import merged

has_matplotlib = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not has_matplotlib, reason="matplotlib (the extra `bench`) isn't installed")


def figures(rate: float, gap_s: float | None) -> dict[str, Any]:
    return {"tokens_per_s": {"median": rate}, "token_gap_s": {"p50": gap_s}}


COMPARISON: dict[str, Any] = {
    "bench": "pagemill",
    "workload": {"name": "chat"},
    "options": {"quantization": "none"},
    "bars": [],
    "batches": [
        {"batch": 8, "ours": figures(90.0, 0.05), "peers": {"static": figures(30.0, None)}},
        {"batch": 1, "ours": figures(30.0, 0.02), "peers": {"alone": figures(10.0, None), "vLLM": figures(14.0, 0.1)}},
    ],
}
SIZES = {
    "bench": "pagemill block-sizes",
    "sizes": [
        {"block_size": 8, "kv_use": 0.97, "requests_per_s": 1.5},
        {"block_size": 64, "kv_use": 0.8, "requests_per_s": 1.4},
    ],
}


def waiting(p50: float, p95: float) -> dict[str, Any]:
    return {name: {"p50": p50, "p95": p95} for name in ("ttft_s", "token_gap_s", "reply_s")}


RATES = {
    "bench": "pagemill rates",
    "options": {"arrivals": "burst"},
    "rates": [
        {"requests_per_s": 2.0, "engines": {"pagemill": waiting(0.3, 0.9), "vLLM": waiting(0.5, 1.5)}},
        {"requests_per_s": 1.0, "engines": {"pagemill": waiting(0.1, 0.2), "vLLM": waiting(0.2, 0.4)}},
    ],
}


def test_a_comparison_shows_every_engine_by_rising_batch() -> None:
    rates, gaps = pictures_of(COMPARISON)
    assert list(rates.series) == [
        Series("pagemill", [1, 8], [30.0, 90.0]),
        Series("static", [8], [30.0]),
        Series("alone", [1], [10.0]),
        Series("vLLM", [1], [14.0]),
    ]
    # Who takes a batch as a whole tells no single tokens.
    assert [each.name for each in gaps.series] == ["pagemill", "vLLM"]
    assert list(gaps.series[0].y) == pytest.approx([20.0, 50.0])


def test_comparisons_that_were_measured_batch_by_batch_are_drawn_together() -> None:
    parts = [COMPARISON | {"batches": [batch]} for batch in COMPARISON["batches"]]
    assert merged(parts) == [COMPARISON]
    quantized = COMPARISON | {"options": {"quantization": "int8"}}
    assert merged([*parts, SIZES, quantized]) == [COMPARISON, SIZES, quantized]
    assert [picture.name for picture in pictures_of(quantized)] == ["chat-int8-throughput", "chat-int8-token-time"]


def test_comparisons_of_another_engine_or_shape_stay_apart_and_the_bars_of_all_are_kept() -> None:
    parts = [COMPARISON | {"bars": [{"name": "KV use", "batch": batch}]} for batch in (8, 1)]
    assert merged(parts)[0]["bars"] == [each for part in parts for each in part["bars"]]
    options = COMPARISON["options"]
    others = [COMPARISON | {"options": options | {name: "other"}} for name in ("model", "dtype", "device")]
    others.append(COMPARISON | {"workload": {"name": "chat", "prompt_mean": 400.0}})
    assert merged([COMPARISON, *others]) == [COMPARISON, *others]


def test_results_whose_pictures_would_have_one_name_are_refused_before_any_is_drawn(tmp_path: Path) -> None:
    """The second would have overwritten the first."""
    files = []
    for number, result in enumerate((RATES, RATES)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(result))
    with pytest.raises(BenchError, match=r"2 of these results make a picture rates-ttft\.svg: .*one by one"):
        main(["plot", *map(str, files), "--svg", str(tmp_path / "pictures")])
    assert not (tmp_path / "pictures").exists()


def test_runs_one_by_one_are_drawn_at_a_batch_of_one_alone() -> None:
    alone = "transformers, one by one"
    batches = [{"batch": batch, "ours": figures(30.0, 0.02), "peers": {alone: figures(10.0, None)}} for batch in (1, 8)]
    rates, _ = pictures_of(COMPARISON | {"batches": batches})
    assert rates.series[1] == Series(alone, [1], [10.0])


def test_block_sizes_and_rates_show_their_figures() -> None:
    use, rate = pictures_of(SIZES)
    assert list(use.series[0].x) == [8, 64]
    assert list(use.series[0].y) == pytest.approx([97.0, 80.0])
    assert list(rate.series[0].y) == [1.5, 1.4]
    first = pictures_of(RATES)[0]
    assert [each.name for each in first.series] == ["pagemill, p50", "pagemill, p95", "vLLM, p50", "vLLM, p95"]
    assert list(first.series[1].x) == [1.0, 2.0]
    assert list(first.series[1].y) == pytest.approx([200.0, 900.0])


def test_a_picture_without_figures_is_left_out_and_a_result_without_any_refused() -> None:
    """Replies of one token have no time between tokens."""
    batch = {"batch": 1, "ours": figures(30.0, None), "peers": {}}
    assert [each.name for each in pictures_of(COMPARISON | {"batches": [batch]})] == ["chat-throughput"]
    with pytest.raises(BenchError, match="nothing to draw"):
        pictures_of(COMPARISON | {"batches": []})


@needs_matplotlib
def test_each_picture_is_an_svg_file_and_always_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    result.write_text("a table before it\n" + json.dumps(COMPARISON) + "\n")
    for folder in ("a", "b"):
        assert main(["plot", str(result), "--svg", str(tmp_path / folder), "--prefix", "idle-"]) == 0
    names = ["idle-chat-throughput.svg", "idle-chat-token-time.svg"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / folder / name) for folder in "ab" for name in names]
    for name in names:
        text = (tmp_path / "a" / name).read_text()
        assert "<svg" in text
        assert "pagemill" in text
        assert (tmp_path / "b" / name).read_text() == text


def test_without_the_library_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (check_installed, lambda: draw_report(COMPARISON, tmp_path)):
        with pytest.raises(BenchError) as caught:
            call()
        assert str(caught.value) == INSTALL
    with pytest.raises(BenchError, match="pip install 'pagemill"):
        main(["--svg", str(tmp_path), "--model", "/nowhere"])

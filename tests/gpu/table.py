"""The table of a GPU check: its stages, and its figures beside the bars."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a measurement, and the least (or most) that it should be."""

    stage: str
    figure: str
    words: str
    least: float | None = None
    most: float | None = None

    def is_kept(self, value: float) -> bool:
        """Whether a measured value is good enough."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


BARS = (
    Bar("decode attention", "share_of_copy", "64 × 4k, head 128, GQA 4: of the copy bandwidth", least=0.80),
    Bar("prefill attention", "share_of_products", "of the matrix rate", least=0.60),
    Bar("swap", "share_out", "to the host: of a large pinned copy", least=0.80),
    Bar("swap", "share_in", "back: of a large pinned copy", least=0.80),
    Bar("host share", "exposed", "of a decode step the device waits for the host", most=0.05),
    Bar("article", "ratio_32", "Llama-2-13B, batch 32: times transformers' tokens/s", least=4.57),
)


def render(report: dict[str, Any]) -> str:
    """Facts, one line a stage, one line a bar, and all other figures."""
    machine = report["machine"]
    lines = []
    if report["is_rehearsal"]:
        lines.append("A REHEARSAL ON THE CPU, AT TINY SIZES: no figure below means anything.")
    lines.append(f"{machine.get('device', 'no CUDA device')}; " + "; ".join(f"{k} {v}" for k, v in machine.items()))
    lines += ["", f"{'stage':20} {'':7} {'s':>6}  passed failed skipped"]
    for stage in report["stages"]:
        counts = "" if stage["figures"] else f"{stage['num_passed']:6} {stage['num_failed']:6} {stage['num_skipped']:7}"
        line = f"{stage['name']:20} {stage['status']:7} {stage['seconds']:6.1f}  {counts} {stage['words']}"
        lines.append(line.rstrip())
    figures = {stage["name"]: stage["figures"] for stage in report["stages"]}
    lines += ["", *_bar_lines({} if report["is_rehearsal"] else figures), ""]
    for name, values in figures.items():
        lines += [f"{name}: {key} {_shown(value)}" for key, value in values.items()]
    return "\n".join([*lines, f"took {report['took_s']} s", ""])


def _bar_lines(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield f"{'bar':64} {'wanted':>8} {'found':>8}"
    for bar in BARS:
        value = figures.get(bar.stage, {}).get(bar.figure)
        wanted = f"≥ {bar.least:g}" if bar.least is not None else f"≤ {bar.most:g}"
        found = "unmeasured" if value is None else f"{value:8.2f} {'kept' if bar.is_kept(value) else 'MISSED'}"
        yield f"{bar.stage + ', ' + bar.words:64} {wanted:>8} {found}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

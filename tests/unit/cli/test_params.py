"""Values with commas between them: what is meant, and what means nothing."""

from typing import Any

import click
import pytest

from ops.bench.flags import NUMBERS, RATES, PeerList
from ops.commands.simulate import PERCENTS
from ops.params import CommaList

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("kind", "text", "meant"),
    [
        (NUMBERS, "8, 1,8", (8, 1)),
        (RATES, "0.5,2,5e-1", (0.5, 2.0)),
        (PERCENTS, "5,1000", (5.0, 1000.0)),
        (PeerList(), "vllm,transformers", ("vllm", "transformers")),
        (NUMBERS, (1, 2), (1, 2)),
    ],
)
def test_each_word_once_in_its_order(kind: CommaList[Any], text: object, meant: tuple[object, ...]) -> None:
    assert kind.convert(text, None, None) == meant


@pytest.mark.parametrize("kind", [NUMBERS, RATES, PERCENTS, PeerList()], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("text", ["", ",", "1,,2", "0", "-1", "x", "nan", "inf", HUGE, f"1,{HUGE}", "1;2"])
def test_what_means_nothing_is_refused_with_what_to_write(kind: CommaList[Any], text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"use |there is no peer"):
        kind.convert(text, None, None)

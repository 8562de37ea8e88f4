"""Settings and bench offer what the model knows. They don't import it: help and service would start slowly."""

from typing import get_args

import click

from model.kv_cache_dtype import KV_CACHE_DTYPES
from model.quantization import QUANTIZATIONS
from ops.bench import quality
from ops.bench.flags import engine_options
from worker.settings import Settings


def offered(command: click.Command, name: str) -> tuple[str, ...]:
    (option,) = (param for param in command.params if param.name == name)
    assert isinstance(option.type, click.Choice)
    return tuple(option.type.choices)


def test_settings_and_bench_offer_every_kind_of_weights_that_there_is() -> None:
    assert get_args(Settings.model_fields["quantization"].annotation) == QUANTIZATIONS
    assert offered(click.command()(engine_options(lambda **_: None)), "quantization") == QUANTIZATIONS
    assert set(offered(quality.command, "quantization")) == set(QUANTIZATIONS)


def test_settings_and_bench_offer_every_kind_of_cache_that_there_is() -> None:
    assert get_args(Settings.model_fields["kv_cache_dtype"].annotation) == KV_CACHE_DTYPES
    assert offered(quality.command, "kv_cache_dtype") == KV_CACHE_DTYPES

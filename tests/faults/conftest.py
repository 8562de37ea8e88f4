"""Fixtures for the tests under faults."""

from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint; the made-up model uses its tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))

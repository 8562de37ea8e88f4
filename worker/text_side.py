"""What a checkpoint says of text: the service's side of the model."""

from pathlib import Path

from model.loader import load_config
from model.tokenizer import Tokenizer


def load_text_side(path: Path, load_format: str = "auto") -> tuple[Tokenizer, frozenset[int]]:
    """Tokenizer and end-of-sequence ids of a checkpoint. Raises ModelError. Takes a while: run it in a thread."""
    tokenizer = Tokenizer.from_checkpoint(path, load_format)
    return tokenizer, frozenset(load_config(path, load_format).eos_token_ids) | frozenset(tokenizer.eos_token_ids)

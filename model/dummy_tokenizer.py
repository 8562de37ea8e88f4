"""A tokenizer for models that have none: a token a byte, and a made-up word for every other id."""

from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.errors import UnsupportedModelError
from model.tokenizer_parts import TokenizerParts

NUM_BYTES: Final = 256
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def dummy_parts(vocab_size: int) -> TokenizerParts:
    """Ids below 256 are bytes, and all that a text is encoded to; each id from there on decodes to a word of its own.

    So any text has ids, and any id that is drawn has a text. Nothing ends a text.
    Raises UnsupportedModelError where the vocabulary is smaller than that.
    """
    if vocab_size < NUM_BYTES:
        raise UnsupportedModelError(
            f"vocab_size is {vocab_size}: the stand-in for a tokenizer has a token for each of 256 bytes; put a "
            "tokenizer.json beside config.json, or raise vocab_size"
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token_id for token_id, letter in enumerate(alphabet)}
    # The byte-level alphabet writes a space as this letter.
    vocab |= {f"\u0120t{token_id}": token_id for token_id in range(NUM_BYTES, vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return TokenizerParts(backend, chat_template=_TEMPLATE)

"""A small SentencePiece-like vocabulary as GGUF metadata, and the textbook algorithm that encodes with it."""

from itertools import pairwise
from typing import Any

CORPUS = (
    "the mill stood where the river bends twice before it meets the sea and the miller told the other miller that the "
    "water was low aaa aaaa aab aabb abab baba ababab llll lll  two spaces   three spaces"
)
NUM_MERGES = 120


def sentencepiece_metadata(text: str = CORPUS) -> dict[str, Any]:
    """unk, BOS, EOS, 256 byte tokens, then the pieces that plain BPE training finds, best first."""
    words = [["▁", *word] for word in text.replace("  ", " ▁").split(" ")]
    pieces: list[str] = []
    while len(pieces) < NUM_MERGES:
        counts: dict[str, int] = {}
        for word in words:
            for left, right in pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = min((pair for pair in counts if pair not in pieces), key=lambda pair: (-counts[pair], pair), default="")
        if not best:
            break
        pieces.append(best)
        words = [_merged(word, best) for word in words]
    letters = sorted({letter for word in words for piece in word for letter in piece})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    metadata: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}


def _merged(word: list[str], pair: str) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and out[-1] + piece == pair:
            out[-1] = pair
        else:
            out.append(piece)
    return out


def textbook_encode(text: str, metadata: dict[str, Any]) -> list[int]:
    """Merge the neighbours whose piece scores highest, leftmost first, until none make a piece; then bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens) if types[index] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[ids[left + right]], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found

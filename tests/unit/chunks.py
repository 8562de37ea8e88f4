"""Chunks a row at a time, as a test spells them out."""

from scheduler.output import Chunks


def make_chunks(*rows: tuple[str, int, int, bool]) -> Chunks:
    """One of (sequence, start, number of tokens, whether it is sampled) a chunk."""
    seq_ids, starts, num_tokens, is_sampled = zip(*rows, strict=True)
    return Chunks(seq_ids, starts, num_tokens, is_sampled)


def chunk_rows(chunks: Chunks) -> list[tuple[str, int, int, bool]]:
    """The opposite of `make_chunks`."""
    return list(zip(chunks.seq_ids, chunks.starts, chunks.num_tokens, chunks.is_sampled, strict=True))

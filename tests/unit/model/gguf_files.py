"""Writes GGUF files for tests, byte by byte, so that they can be wrong in any way."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt


def string(text: str | bytes) -> bytes:
    """A GGUF string."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A typed value: bool, int (u32), float (f32), str, or a list of one of these."""
    if isinstance(item, list):
        inner = [value(element) for element in item]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(item)) + b"".join(x[4:] for x in inner)
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<I", 8) + string(item)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    quants: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    version: int = 3,
) -> bytes:
    """A whole file. Tensors named in `quants` are quantised by the gguf package, others are float32."""
    infos, data = b"", b""
    for name, values in tensors.items():
        kind = (quants or {}).get(name, gguf.GGMLQuantizationType.F32)
        raw = gguf.quants.quantize(values.astype(np.float32), kind).tobytes()
        infos += string(name) + struct.pack("<I", values.ndim)
        infos += struct.pack(f"<{values.ndim}Q", *values.shape[::-1]) + struct.pack("<IQ", kind.value, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    keys = b"".join(string(name) + value(item) for name, item in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + keys + infos
    return head + b"\0" * (-len(head) % 32) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], **how: Any) -> Path:
    """The same, as a file."""
    path.write_bytes(gguf_bytes(metadata, tensors, **how))
    return path


BYTE_LETTERS = [chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTE_LETTERS += [chr(256 + index) for index in range(256 - len(BYTE_LETTERS))]


def tokenizer_metadata(pre: str = "smollm") -> dict[str, Any]:
    """A byte-level vocabulary with three control tokens, every byte, and a few merges."""
    merges = ["Ġ t", "h e", "Ġt he", "2 0", "20 2", "l l", "e r"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_LETTERS]
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tiny_metadata(architecture: str = "llama") -> dict[str, Any]:
    """A model of two layers, with four heads of 8 that share two KV heads."""
    sizes = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    metadata = {"general.architecture": architecture, **tokenizer_metadata()}
    metadata |= {f"{architecture}.{name}": item for name, item in sizes.items()}
    return metadata


def tiny_tensors(seed: int = 0, *, num_tokens: int = 266, qkv_bias: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Random weights for `tiny_metadata`, under GGUF names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (num_tokens, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (32,),
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "attn_output": (32, 32),
                "ffn_norm": (32,),
                "ffn_gate": (64, 32),
                "ffn_up": (64, 32),
                "ffn_down": (32, 64),
            }.items()
        }
        if qkv_bias:
            shapes |= {f"blk.{layer}.attn_{name}.bias": (size,) for name, size in {"q": 32, "k": 16, "v": 16}.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

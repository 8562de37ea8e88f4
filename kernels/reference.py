"""Slow float64 twins of the kernels, of the same signatures: the specification that the tests hold them to.

They loop where the kernels vectorise and sort where the kernels search. Nothing in the product calls them.
"""

import math

import torch

from kernels.attention_inputs import PLAIN, AttentionMetadata, AttentionOptions
from kernels.checksum import COLUMN_STEP, ROW_STEP
from kernels.noise import gumbel, row_keys
from kernels.penalties import Penalties


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels.rms_norm.rms_norm; float64."""
    x = x.double()
    return x / (x.square().mean(dim=1, keepdim=True) + eps).sqrt() * weight.double()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels.rms_norm.add_rms_norm: the residual is updated in its own dtype; the result is float64."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As kernels.activation.silu_and_mul; float64."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate / (1 + (-gate).exp()) * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As calling kernels.linear.PackedLinear(weight, bias) with x; float64."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def quantized_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As calling kernels.quantized_linear.QuantizedLinear with x, of a weight that is rounded already.

    x is rounded in float32, as there; the rest is float64.
    """
    return linear(_rounded_x(x), weight, bias)


def _rounded_x(x: torch.Tensor) -> torch.Tensor:
    """Each row as whole multiples of its largest magnitude / 32512."""
    rounded = x.double()
    for number, row in enumerate(x.float()):
        largest = row.abs().max()
        integers = (row * (torch.tensor(32512.0) / largest)).round() if largest >= 1e-30 else torch.zeros_like(row)
        rounded[number] = integers.double() * (largest / 32512).double()
    return rounded


def rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    """As int8 has it: each 32 values of a row on 256 steps from their minimum on; minimum and step are of float16.

    The end of a row is filled up with zeros.
    """
    num_in = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -num_in % 32))
    rounded = padded.double()
    for start in range(0, num_in, 32):
        for row, group in enumerate(padded[:, start : start + 32]):
            minimum = group.min().half().float()
            step = ((group.max() - minimum) / 255).half().float()
            integers = ((group - minimum) / step).round().clamp(0, 255) if step > 0 else torch.zeros_like(group)
            rounded[row, start : start + 32] = integers.double() * step.double() + minimum.double()
    return rounded[:, :num_in]


def rope_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """As kernels.kv_cache_write.rope_and_write: the cache is written in its own dtype, the queries are float64."""
    num_tokens, half, block_size = qkv.shape[0], cos_sin.shape[1] // 2, kv_cache.shape[3]
    heads = qkv.double().reshape(num_tokens, num_heads + 2 * num_kv_heads, kv_cache.shape[5])
    for token in range(num_tokens):
        cos, sin = cos_sin[positions[token]].double().chunk(2)
        for head in range(num_heads + num_kv_heads):
            low, high = heads[token, head, :half].clone(), heads[token, head, half : 2 * half].clone()
            heads[token, head, :half] = low * cos - high * sin
            heads[token, head, half : 2 * half] = high * cos + low * sin
        slot = int(slot_mapping[token])
        if slot >= 0:
            place = kv_cache[slot // block_size, layer, :, slot % block_size]
            place[0] = _storable(heads[token, num_heads : num_heads + num_kv_heads], kv_cache, k_scale)
            place[1] = _storable(heads[token, num_heads + num_kv_heads :], kv_cache, v_scale)
    return heads[:, :num_heads]


def _storable(numbers: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
    if kv_cache.dtype is not torch.float8_e4m3fn:
        return numbers
    return torch.zeros_like(numbers) if scale == 0 else (numbers / scale).clamp(-448, 448)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> torch.Tensor:
    """As kernels.paged_attention.paged_attention; float64."""
    num_heads, block_size, num_kv_heads = query.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for seq, context_len in enumerate(meta.context_lens.tolist()):
        first, last = meta.query_starts[seq : seq + 2].tolist()
        places = [(int(meta.block_tables[seq, key // block_size]), key % block_size) for key in range(context_len)]
        for row in range(first, last):
            position = context_len - (last - row)
            oldest = 0 if options.window is None else max(0, position + 1 - options.window)
            seen = places[oldest : max(0, position + 1)]
            if not seen:
                continue
            keys = torch.stack([kv_cache[block, layer, 0, offset].double() for block, offset in seen])
            values = torch.stack([kv_cache[block, layer, 1, offset].double() for block, offset in seen])
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = scale * options.k_scale * keys[:, kv_head] @ query[row, head].double()
                weights = _attention_weights(scores, head, options)
                out[row, head] = options.v_scale * weights @ values[:, kv_head]
    return out


def _attention_weights(scores: torch.Tensor, head: int, options: AttentionOptions) -> torch.Tensor:
    """Softmax of the scores of the keys that one row sees, the last one at its own position."""
    if options.soft_cap is not None:
        scores = options.soft_cap * (scores / options.soft_cap).tanh()
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes[head].double() * torch.arange(1 - len(scores), 1)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[head : head + 1].double()))
    return torch.softmax(scores, dim=0)[: len(scores) if options.sinks is None else -1]


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """As kernels.block_copy.copy_blocks."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        kv_cache[target] = kv_cache[source].clone()


def gather_blocks(kv_cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """As kernels.block_copy.gather_blocks."""
    for place, block in enumerate(ids.tolist()):
        staging[place] = kv_cache[block]


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """As kernels.block_copy.scatter_blocks."""
    for place, block in enumerate(ids.tolist()):
        kv_cache[block] = staging[place]


def block_checksums(blocks: torch.Tensor) -> torch.Tensor:
    """As kernels.checksum.block_checksums, in whole numbers without end."""
    sums = []
    for block in blocks.reshape(blocks.shape[0], blocks.shape[1] * blocks.shape[2], -1).view(torch.int64).tolist():
        total = sum(
            word * (ROW_STEP * (2 * r + 1) + COLUMN_STEP * (2 * c + 2))
            for r, row in enumerate(block)
            for c, word in enumerate(row)
        )
        sums.append((total + 2**63) % 2**64 - 2**63)
    return torch.tensor(sums, dtype=torch.int64)


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """As kernels.penalties.apply_penalties, token by token; float64, rounded to the logits' dtype at the end."""
    for row in range(logits.shape[0]):
        num_prompt, num_tokens = int(penalties.num_prompt[row]), int(penalties.num_tokens[row])
        tokens = penalties.token_ids[int(penalties.sequences[row])].tolist()
        prompt, output = tokens[: min(num_prompt, num_tokens)], tokens[num_prompt:num_tokens]
        for token in range(logits.shape[1]):
            logit, count = float(logits[row, token]), output.count(token)
            if count or token in prompt:
                repetition = float(penalties.repetition[row])
                logit = logit / repetition if logit > 0 else logit * repetition
            logit -= count * float(penalties.frequency[row])
            if count:
                logit -= float(penalties.presence[row])
            logits[row, token] = logit


def kept_tokens(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> list[int]:
    """Ids that min-p, top-k and then top-p leave of one row of scaled logits float32 [vocab], by sorting; ascending."""
    order = sorted(range(len(scaled)), key=lambda token: -float(scaled[token]))
    if min_p > 0:
        cut = torch.tensor(math.log(min(min_p, 1.0)))
        order = [token for token in order if scaled[token] >= cut]
    if 0 < top_k < len(order):
        order = [token for token in order if scaled[token] >= scaled[order[top_k - 1]]]
    if top_p < 1:
        weights = [math.exp(float(scaled[token])) for token in order]
        target, reached, cut = top_p * math.fsum(weights), 0.0, scaled[order[0]]
        for token, weight in zip(order, weights, strict=True):
            cut, reached = scaled[token], reached + weight
            if reached >= target:
                break
        order = [token for token in order if scaled[token] >= cut]
    return sorted(order)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_limit: int,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """As kernels.sampling.sample. Scaling and adding noise round to float32, which is part of the specification."""
    ids = []
    for row in range(logits.shape[0]):
        usable = [token for token in range(vocab_limit) if math.isfinite(logits[row, token])]
        if not usable:
            ids.append(-1)
            continue
        values = torch.full((vocab_limit,), -torch.inf)
        values[usable] = logits[row, usable]
        largest = values.max()
        if not temperature[row] > 0:
            ids.append(values.tolist().index(float(largest)))
            continue
        scaled = ((values - largest) / temperature[row]).nan_to_num(-torch.inf, None, -torch.inf)
        noise = gumbel(row_keys(seeds[row : row + 1], positions[row : row + 1]), vocab_limit)[0]
        share_of_largest = 0.0 if min_p is None else float(min_p[row])
        kept = kept_tokens(scaled, int(top_k[row]), float(top_p[row]), share_of_largest)
        ids.append(max(kept, key=lambda token: (float(scaled[token] + noise[token]), -token)))
    return torch.tensor(ids)


def top_logprobs(logits: torch.Tensor, k: int, vocab_limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.top_logprobs.top_logprobs, by sorting."""
    values = torch.full((logits.shape[0], k), -torch.inf, dtype=torch.float64)
    ids = torch.full((logits.shape[0], k), -1)
    for row in range(logits.shape[0]):
        numbers = {token: float(logits[row, token]) for token in range(vocab_limit)}
        usable = {token: number for token, number in numbers.items() if math.isfinite(number)}
        largest = max(usable.values(), default=0.0)
        total = math.fsum(math.exp(number - largest) for number in usable.values())
        best = sorted(usable, key=lambda token: (-usable[token], token))[:k]
        for place, token in enumerate(best):
            values[row, place] = usable[token] - largest - math.log(total)
            ids[row, place] = token
    return values, ids

"""latent_attention in Triton: all heads over one cached row a token, which is key and value. Imported by the compiler
and the interpreter alone.

A tile is ROWS (token, head) rows of one sequence: TOKENS tokens, each with ROWS / TOKENS heads. What is multiplied on
tensor cores is bf16; sums are f32. Keys come in tiles of KEYS absolute positions, in order.
"""

import triton
import triton.language as tl

from llmc.plugins.paged_attention.kernels import LOG2_E, sequence_of


@triton.jit
def attend(
    query,
    query_rope,
    positions,
    begin,
    end,
    cache,
    table,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """query bf16 [ROWS, LATENT_BLOCK] and its rotated part over the rows begin..end-1 -> what is to be divided by the
    sum [ROWS, LATENT_BLOCK], the largest score (in base 2) and the sum of the weights [ROWS].
    """
    columns, rope_columns = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, LATENT_BLOCK], tl.float32)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        at = start + tl.arange(0, KEYS)
        there = (at >= begin) & (at < end)
        block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64) * BLOCK_STRIDE
        row = block + at % BLOCK_SIZE * (LATENT + ROPE)
        latent = tl.load(
            cache + row[:, None] + columns[None, :], mask=there[:, None] & (columns < LATENT)[None, :], other=0.0
        ).to(tl.bfloat16)
        key = tl.load(
            cache + row[None, :] + LATENT + rope_columns[:, None],
            mask=there[None, :] & (rope_columns < ROPE)[:, None],
            other=0.0,
        ).to(tl.bfloat16)
        dots = tl.dot(query_rope, key)
        dots = tl.dot(query, tl.trans(latent), dots)
        seen = (at[None, :] <= positions[:, None]) & there[None, :]
        scores = tl.where(seen, dots * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(tl.bfloat16), latent, sums * shrink[:, None])
        most = higher
    return sums, most, total


@triton.jit
def queries(
    q,
    q_rope,
    q_rows,
    rope_rows,
    heads,
    there,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """Both parts of the queries of `heads` in bf16; rows of their tokens begin at `q_rows` and `rope_rows`."""
    columns, rope_columns = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    query = tl.load(
        q + (q_rows + heads * LATENT)[:, None] + columns[None, :],
        mask=there[:, None] & (columns < LATENT)[None, :],
        other=0.0,
    ).to(tl.bfloat16)
    query_rope = tl.load(
        q_rope + (rope_rows + heads * ROPE)[:, None] + rope_columns[None, :],
        mask=there[:, None] & (rope_columns < ROPE)[None, :],
        other=0.0,
    ).to(tl.bfloat16)
    return query, query_rope


@triton.jit
def decode(
    q,
    q_rope,
    cache,
    context_len,
    block_tables,
    y,
    partial,
    partial_most,
    partial_total,
    q_stride,
    rope_stride,
    y_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    PARTITION: tl.constexpr,
    PARTITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """One query a sequence; program (sequence, ROWS heads, part of the context). Writes y, or with `partial` (or None)
    what `paged_attention.kernels.combine` joins.
    """
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    length = tl.load(context_len + sequence)
    begin, end = part * PARTITION, tl.minimum(length, (part + 1) * PARTITION)
    if begin < end:
        heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        there = heads < HEADS
        query, query_rope = queries(
            q, q_rope, sequence * q_stride, sequence * rope_stride, heads, there,
            LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK,
        )  # fmt: skip
        table = block_tables + sequence * table_stride
        sums, most, total = attend(
            query, query_rope, tl.zeros([ROWS], tl.int32) + (length - 1), begin, end, cache, table, scale,
            ROWS, KEYS, LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK, BLOCK_SIZE, BLOCK_STRIDE,
        )  # fmt: skip
        columns = tl.arange(0, LATENT_BLOCK)
        inside = there[:, None] & (columns < LATENT)[None, :]
        if partial is None:
            place = y + sequence * y_stride + heads[:, None] * LATENT + columns[None, :]
            tl.store(place, (sums / total[:, None]).to(y.dtype.element_ty), mask=inside)
        else:
            place = (sequence * HEADS + heads) * PARTITIONS + part
            tl.store(partial + place[:, None] * LATENT + columns[None, :], sums, mask=inside)
            tl.store(partial_most + place, most, mask=there)
            tl.store(partial_total + place, total, mask=there)


@triton.jit
def mixed(
    q,
    q_rope,
    cache,
    query_start,
    context_len,
    block_tables,
    y,
    q_stride,
    rope_stride,
    y_stride,
    table_stride,
    num_seqs,
    scale,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Any number of queries a sequence; program (tile of TOKENS of them, ROWS / TOKENS heads)."""
    tile = tl.program_id(0)
    sequence = sequence_of(tile, query_start, num_seqs, TOKENS)
    first, last = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = first + (tile - first // TOKENS - sequence) * TOKENS
    if token < last:
        ahead = tl.load(context_len + sequence) - last  # position - token
        row = tl.arange(0, ROWS)
        tokens = token + row % TOKENS
        heads = tl.program_id(1) * (ROWS // TOKENS) + row // TOKENS
        there = (heads < HEADS) & (tokens < last)
        rows = tokens.to(tl.int64)
        query, query_rope = queries(
            q, q_rope, rows * q_stride, rows * rope_stride, heads, there, LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK
        )
        end = tl.minimum(token + TOKENS, last) + ahead
        table = block_tables + sequence.to(tl.int64) * table_stride
        sums, _, total = attend(
            query, query_rope, tokens + ahead, 0, end, cache, table, scale,
            ROWS, KEYS, LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK, BLOCK_SIZE, BLOCK_STRIDE,
        )  # fmt: skip
        columns = tl.arange(0, LATENT_BLOCK)
        place = y + (rows * y_stride)[:, None] + heads[:, None] * LATENT + columns[None, :]
        inside = there[:, None] & (columns < LATENT)[None, :]
        tl.store(place, (sums / total[:, None]).to(y.dtype.element_ty), mask=inside)

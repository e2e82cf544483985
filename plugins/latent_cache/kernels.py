"""latent_cache in Triton: rows [latent, rotated key part] into the paged cache, and the queries' rotated parts.
Imported by the compiler and the interpreter alone.
"""

import triton
import triton.language as tl


@triton.jit
def turned(x, rows, there, cos, sin, ROPE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Parts that begin at x + rows [n, 1], rotated by cos and sin of each pair, or as they are without -> f32
    [n, BLOCK].
    """
    columns = tl.arange(0, BLOCK)[None, :]
    mask = there & (columns < ROPE)
    value = tl.load(x + rows + columns, mask=mask, other=0.0).to(tl.float32)
    if cos is not None:
        if INTERLEAVED:
            pair, first = columns // 2, columns % 2 == 0
            partner = columns + 1 - columns % 2 * 2
        else:
            first = columns < ROPE // 2
            pair = tl.where(first, columns, columns - ROPE // 2)
            partner = tl.where(first, columns + ROPE // 2, pair)
        other = tl.load(x + rows + partner, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + pair, mask=columns < ROPE, other=0.0).to(tl.float32)
        s = tl.load(sin + pair, mask=columns < ROPE, other=0.0).to(tl.float32)
        value = value * c + tl.where(first, -other, other) * s
    return value


@triton.jit
def latent_cache(
    q,
    latent,
    key,
    cos,
    sin,
    weight,
    y,
    cache,
    positions,
    sequences,
    block_tables,
    q_stride,
    latent_stride,
    key_stride,
    cos_stride,
    sin_stride,
    y_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    Q_FIRST: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Program (token, part): part 0 writes the token's row, the others turn TOGETHER heads of q. A token at position -1
    is none. `weight` None: the latent comes normed.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position >= 0:
        if cos is not None:
            cos += token * cos_stride
            sin += token * sin_stride
        rope_columns = tl.arange(0, ROPE_BLOCK)[None, :]
        if part == 0:
            table = block_tables + tl.load(sequences + token).to(tl.int64) * table_stride
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
            row = cache + block + position % BLOCK_SIZE * (LATENT + ROPE)
            columns = tl.arange(0, LATENT_BLOCK)
            inside = columns < LATENT
            value = tl.load(latent + token * latent_stride + columns, mask=inside, other=0.0).to(tl.float32)
            if weight is not None:
                root = tl.sqrt_rn(tl.sum(value * value, axis=0) / LATENT + eps)
                value = value / root * tl.load(weight + columns, mask=inside, other=0.0)
            tl.store(row + columns, value.to(cache.dtype.element_ty), mask=inside)
            start = tl.zeros([1, 1], tl.int64) + token * key_stride
            key_part = turned(key, start, start >= 0, cos, sin, ROPE, ROPE_BLOCK, INTERLEAVED)
            tl.store(row + LATENT + rope_columns, key_part.to(cache.dtype.element_ty), mask=rope_columns < ROPE)
        else:
            heads = (part - 1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
            starts = token * q_stride + heads * Q_WIDTH + Q_FIRST
            rotated = turned(q, starts, heads < HEADS, cos, sin, ROPE, ROPE_BLOCK, INTERLEAVED)
            place = y + token * y_stride + heads * ROPE + rope_columns
            tl.store(place, rotated.to(y.dtype.element_ty), mask=(heads < HEADS) & (rope_columns < ROPE))

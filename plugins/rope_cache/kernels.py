"""rope_cache in Triton: norm and rotation of q and k, k and v into the paged cache. Must not know: builder, runtime."""

import triton
import triton.language as tl


@triton.jit
def mean_of_squares(x, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of the WIDTH numbers from x + row on."""
    columns = tl.arange(0, BLOCK)
    value = tl.load(x + row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return tl.sum(value * value, axis=0) / WIDTH


@triton.jit
def head_means(
    q,
    k,
    means,
    q_stride,
    k_stride,
    Q_WIDTH: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """The mean squares of a token's q and k over all heads -> means [T, 2]; program (token, which)."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(means + token * 2, mean_of_squares(q, token * q_stride, Q_WIDTH, Q_BLOCK))
    else:
        tl.store(means + token * 2 + 1, mean_of_squares(k, token * k_stride, K_WIDTH, K_BLOCK))


@triton.jit
def weighed(x, weight, bias, at, mask):
    """x * weight + bias, each taken at its place."""
    x = x * tl.load(weight + at, mask=mask, other=0.0)
    if bias is not None:
        x += tl.load(bias + at, mask=mask, other=0.0)
    return x


@triton.jit
def turned(
    x,
    heads,
    there,
    cos,
    cos_row,
    sin,
    sin_row,
    weight,
    bias,
    means,
    mean_at,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
):
    """Heads [n, 1] of x, a token's row, normed (where `eps` is not None) and rotated by its rows of cos and sin -> f32
    [n, BLOCK]. `means`: where the mean square stands, at `mean_at`, if it is not the head's own. A number is rotated
    with a partner, so both are loaded and normed.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    mask = there & (columns < WIDTH)
    value = tl.load(x + heads * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    rotated = columns < ROTARY
    if INTERLEAVED:
        partner = columns + 1 - columns % 2 * 2
        first = columns % 2 == 0
    else:
        first = columns < ROTARY // 2
        partner = tl.where(first, columns + ROTARY // 2, columns - ROTARY // 2)
    pairs = mask & rotated
    other = tl.load(x + heads * WIDTH + partner, mask=pairs, other=0.0).to(tl.float32)
    own = columns + heads * 0
    its = partner + heads * 0
    if OWN_WEIGHTS:
        own += heads * WIDTH
        its += heads * WIDTH
    if eps is not None and not NORM_LAST:
        if LAYER_NORM:
            mean = tl.sum(value, axis=1)[:, None] / WIDTH
            value = tl.where(mask, value - mean, 0.0)
            other -= mean
        if means is None:
            root = tl.sqrt_rn(tl.sum(value * value, axis=1)[:, None] / WIDTH + eps)
        else:
            root = tl.sqrt_rn(tl.load(means + mean_at) + eps)
        value = weighed(value / root, weight, bias, own, mask)
        other = weighed(other / root, weight, bias, its, pairs)
    if ROTARY > 0:
        c = tl.load(cos + cos_row + columns, mask=rotated, other=1.0).to(tl.float32)
        s = tl.load(sin + sin_row + columns, mask=rotated, other=0.0).to(tl.float32)
        value = tl.where(rotated, value * c + tl.where(first, -other, other) * s, value)
    if eps is not None and NORM_LAST:
        if LAYER_NORM:
            mean = tl.sum(value, axis=1)[:, None] / WIDTH
            value = tl.where(mask, value - mean, 0.0)
        root = tl.sqrt_rn(tl.sum(value * value, axis=1)[:, None] / WIDTH + eps)
        value = weighed(value / root, weight, bias, own, mask)
    return value


@triton.jit
def rope_cache(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    q_bias,
    k_bias,
    means,
    y,
    keys,
    values,
    positions,
    sequences,
    block_tables,
    q_stride,
    k_stride,
    v_stride,
    cos_stride,
    sin_stride,
    means_stride,
    y_stride,
    table_stride,
    eps,
    key_scale,
    value_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Program (token, part): the first KV_HEADS parts write one head of k and v each, the others turn TOGETHER heads
    of q. A token at position -1 is none.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    if position >= 0:
        cos_row = token * cos_stride
        sin_row = token * sin_stride
        columns = tl.arange(0, BLOCK)[None, :]
        if part < KV_HEADS:
            head = part + tl.zeros([1, 1], tl.int32)
            key = turned(
                k + token * k_stride, head, head >= 0, cos, cos_row, sin, sin_row, k_weight, k_bias,
                means, token * means_stride + 1, eps, WIDTH, BLOCK, ROTARY, INTERLEAVED, LAYER_NORM,
                NORM_LAST, OWN_WEIGHTS,
            )  # fmt: skip
            table = block_tables + tl.load(sequences + token).to(tl.int64) * table_stride
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
            slot = part * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(
                keys + block + slot * WIDTH + columns, (key / key_scale).to(keys.dtype.element_ty), mask=columns < WIDTH
            )
            v_columns = tl.arange(0, V_BLOCK)
            inside = v_columns < V_WIDTH
            value = tl.load(v + token * v_stride + part * V_WIDTH + v_columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(
                values + block + slot * V_WIDTH + v_columns,
                (value / value_scale).to(values.dtype.element_ty),
                mask=inside,
            )
        else:
            heads = (part - KV_HEADS) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
            query = turned(
                q + token * q_stride, heads, heads < HEADS, cos, cos_row, sin, sin_row, q_weight, q_bias,
                means, token * means_stride, eps, WIDTH, BLOCK, ROTARY, INTERLEAVED, LAYER_NORM,
                NORM_LAST, OWN_WEIGHTS,
            )  # fmt: skip
            tl.store(
                y + token * y_stride + heads * WIDTH + columns,
                query.to(y.dtype.element_ty),
                mask=(heads < HEADS) & (columns < WIDTH),
            )

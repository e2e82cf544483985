"""paged_attention in Triton: a step's queries over the paged cache, with online softmax. Must not know: builder,
runtime.

A tile is up to ROWS (token, query head) rows of one sequence and KV head: the heads that share keys and values read
them once. Keys come in tiles of KEYS absolute positions, in order, so that a row's value depends neither on the other
rows nor on where a chunk of its sequence began. Scores are kept in base 2. What is multiplied on tensor cores is bf16:
queries, keys, the weights of values, and values; sums are f32.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at a position sees; never before that of an earlier query."""
    first = position * 0
    if WINDOW is not None:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK is not None:
        first = tl.maximum(first, position - position % CHUNK)
    return first


@triton.jit
def tanh(x):
    """Within 1.2e-7 of it: absolutely, not relatively."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def scores_of(dots, scale, softcap, slopes, heads, distance):
    """Scores in base 2 of dots [ROWS, KEYS]; `distance` of a key, seen from the query."""
    scores = dots * scale
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if slopes is not None:
        scores += tl.load(slopes + heads)[:, None] * distance.to(tl.float32)
    return scores * LOG2_E


@triton.jit
def attend(
    query,
    positions,
    heads,
    kv_head,
    begin,
    end,
    keys,
    values,
    table,
    slopes,
    scale,
    softcap,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """query bf16 [ROWS, WIDTH_BLOCK] over the keys begin..end-1 -> what is to be divided by the sum [ROWS, V_BLOCK],
    the largest score and the sum of the weights [ROWS]. A row that sees none of them has -inf and 0.
    """
    columns, v_columns = tl.arange(0, WIDTH_BLOCK), tl.arange(0, V_BLOCK)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_BLOCK], tl.float32)
    first_seen = first_key(positions, WINDOW, CHUNK)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        at = start + tl.arange(0, KEYS)
        there = (at >= begin) & (at < end)
        block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64) * BLOCK_STRIDE
        slot = kv_head * BLOCK_SIZE + at % BLOCK_SIZE
        key = tl.load(
            keys + (block + slot * WIDTH)[None, :] + columns[:, None],
            mask=there[None, :] & (columns < WIDTH)[:, None],
            other=0.0,
        ).to(tl.bfloat16)
        distance = at[None, :] - positions[:, None]
        scores = scores_of(tl.dot(query, key), scale, softcap, slopes, heads, distance)
        seen = (distance <= 0) & (at[None, :] >= first_seen[:, None]) & there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(
            values + (block + slot * V_WIDTH)[:, None] + v_columns[None, :],
            mask=there[:, None] & (v_columns < V_WIDTH)[None, :],
            other=0.0,
        ).to(tl.bfloat16)
        sums = tl.dot(weights.to(tl.bfloat16), value, sums * shrink[:, None])
        most = higher
    return sums, most, total


@triton.jit
def finished(sums, most, total, sinks, heads, there, value_scale):
    """The attended values: a sink is joined last of all. Zeros where a row saw nothing."""
    factor = value_scale / tl.where(total > 0, total, 1.0)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=there, other=0.0) * LOG2_E
        higher = tl.maximum(most, sink)
        shrink = tl.exp2(most - higher)
        factor = value_scale * shrink / (total * shrink + tl.exp2(sink - higher))
    return sums * factor[:, None]


@triton.jit
def decode(
    q,
    keys,
    values,
    slopes,
    sinks,
    context_len,
    block_tables,
    y,
    partial,
    partial_most,
    partial_total,
    q_stride,
    y_stride,
    table_stride,
    scale,
    softcap,
    key_scale,
    value_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTITION: tl.constexpr,
    PARTITIONS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One query a sequence; program (sequence, KV head, part of the context). Writes y, or with `partial` (or None)
    what `combine` needs: [sequence, head, partition, V_WIDTH] and two arrays [sequence, head, partition].
    """
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(context_len + sequence)
    first_seen = first_key(length - 1, WINDOW, CHUNK)
    number = first_seen // PARTITION + tl.program_id(2)
    begin = tl.maximum(first_seen, number * PARTITION)
    end = tl.minimum(length, (number + 1) * PARTITION)
    if begin < end:
        row = tl.arange(0, ROWS)
        there = row < GROUP
        heads = kv_head * GROUP + tl.where(there, row, 0)
        columns = tl.arange(0, WIDTH_BLOCK)
        query = tl.load(
            q + sequence.to(tl.int64) * q_stride + heads[:, None] * WIDTH + columns[None, :],
            mask=there[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        ).to(tl.bfloat16)
        table = block_tables + sequence.to(tl.int64) * table_stride
        position = tl.full([ROWS], 0, tl.int32) + (length - 1)
        sums, most, total = attend(
            query, position, heads, kv_head, begin, end, keys, values, table, slopes, scale * key_scale, softcap,
            ROWS, KEYS, WIDTH, WIDTH_BLOCK, V_WIDTH, V_BLOCK, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, CHUNK,
        )  # fmt: skip
        v_columns = tl.arange(0, V_BLOCK)
        inside = there[:, None] & (v_columns < V_WIDTH)[None, :]
        if partial is None:
            attended = finished(sums, most, total, sinks, heads, there, value_scale)
            place = y + sequence.to(tl.int64) * y_stride + heads[:, None] * V_WIDTH + v_columns[None, :]
            tl.store(place, attended.to(y.dtype.element_ty), mask=inside)
        else:
            place = (sequence.to(tl.int64) * HEADS + heads) * PARTITIONS + tl.program_id(2)
            tl.store(partial + place[:, None] * V_WIDTH + v_columns[None, :], sums * value_scale, mask=inside)
            tl.store(partial_most + place, most, mask=there)
            tl.store(partial_total + place, total, mask=there)


@triton.jit
def combine(
    partial,
    partial_most,
    partial_total,
    sinks,
    context_len,
    y,
    y_stride,
    HEADS: tl.constexpr,
    PARTITION: tl.constexpr,
    PARTITIONS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What `decode` left, joined in the order of partitions; program (sequence, query head)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(context_len + sequence)
    if length > 0:
        columns = tl.arange(0, V_BLOCK)
        inside = columns < V_WIDTH
        place = (sequence.to(tl.int64) * HEADS + head) * PARTITIONS
        most = tl.load(partial_most + place)
        total = tl.load(partial_total + place)
        sums = tl.load(partial + place * V_WIDTH + columns, mask=inside, other=0.0)
        first = first_key(length - 1, WINDOW, CHUNK) // PARTITION
        for part in range(1, (length - 1) // PARTITION - first + 1):
            here = tl.load(partial_most + place + part)
            higher = tl.maximum(most, here)
            old, new = tl.exp2(most - higher), tl.exp2(here - higher)
            total = total * old + tl.load(partial_total + place + part) * new
            fresh = tl.load(partial + (place + part) * V_WIDTH + columns, mask=inside, other=0.0)
            sums = sums * old + fresh * new
            most = higher
        if sinks is not None:
            sink = tl.load(sinks + head) * LOG2_E
            higher = tl.maximum(most, sink)
            old = tl.exp2(most - higher)
            sums, total = sums * old, total * old + tl.exp2(sink - higher)
        place = y + sequence.to(tl.int64) * y_stride + head * V_WIDTH + columns
        tl.store(place, (sums / total).to(y.dtype.element_ty), mask=inside)


@triton.jit
def sequence_of(tile, query_start, num_seqs, TOKENS: tl.constexpr):
    """Which sequence a tile of TOKENS queries belongs to: s has the tiles from query_start[s] // TOKENS + s on."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def mixed(
    q,
    keys,
    values,
    slopes,
    sinks,
    query_start,
    context_len,
    block_tables,
    y,
    q_stride,
    y_stride,
    table_stride,
    num_seqs,
    scale,
    softcap,
    key_scale,
    value_scale,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Any number of queries a sequence; program (tile of TOKENS of them, KV head). There are at most ceil(T / TOKENS) +
    num_seqs tiles; the last of a sequence may have no query.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of(tile, query_start, num_seqs, TOKENS)
    first, last = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    token = first + (tile - first // TOKENS - sequence) * TOKENS
    if token < last:
        ahead = tl.load(context_len + sequence) - last  # position - token
        row = tl.arange(0, ROWS)
        tokens = token + row // GROUP
        heads = kv_head * GROUP + row % GROUP
        there = (row < TOKENS * GROUP) & (tokens < last)
        columns, v_columns = tl.arange(0, WIDTH_BLOCK), tl.arange(0, V_BLOCK)
        query = tl.load(
            q + tokens.to(tl.int64)[:, None] * q_stride + heads[:, None] * WIDTH + columns[None, :],
            mask=there[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        ).to(tl.bfloat16)
        begin = first_key(token + ahead, WINDOW, CHUNK)
        end = tl.minimum(token + TOKENS, last) + ahead
        table = block_tables + sequence.to(tl.int64) * table_stride
        sums, most, total = attend(
            query, tokens + ahead, heads, kv_head, begin, end, keys, values, table, slopes, scale * key_scale, softcap,
            ROWS, KEYS, WIDTH, WIDTH_BLOCK, V_WIDTH, V_BLOCK, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, CHUNK,
        )  # fmt: skip
        attended = finished(sums, most, total, sinks, heads, there, value_scale)
        place = y + tokens.to(tl.int64)[:, None] * y_stride + heads[:, None] * V_WIDTH + v_columns[None, :]
        inside = there[:, None] & (v_columns < V_WIDTH)[None, :]
        tl.store(place, attended.to(y.dtype.element_ty), mask=inside)

"""What the soak's clients send: requests whose answer is fixed, and bodies that are none.

Comes in: a seed, the vocabulary's size. Goes out: JSON bodies. Must not know: how they are sent.
"""

from __future__ import annotations

import random
from typing import Any

#: A body and the statuses that may answer it.
MALFORMED: tuple[tuple[bytes, set[int]], ...] = (
    (b"", {400}),
    (b"{", {400}),
    (b"[]", {400}),
    (b'{"prompt": 5}', {400}),
    (b'{"prompt": [-1]}', {400}),
    (b'{"prompt": [1], "prompt": [2]}', {400}),
    (b'{"prompt": [1], "temprature": 1}', {400}),
    (b'{"prompt": [1], "temperature": -1}', {400}),
    (b'{"prompt": [1], "n": 100000}', {400}),
    (b'{"prompt": [1], "model": "no such model"}', {404}),
    (b'{"prompt": [1], "stop": [""]}', {400}),
    (b'{"prompt": ' + b"[" * 5000 + b"}", {400}),
    (b"\xff\xfe\x00", {400}),
)


def make_request(rng: random.Random, vocab: int, longest: int, banned: int | None) -> dict[str, Any]:
    """A completion whose answer depends on itself alone: greedy, or with a seed. Prompts share prefixes.

    Its tokens are below `vocab`; the answer is kept from `banned`.
    """
    shared = random.Random(rng.randrange(4))
    prefix = [shared.randrange(vocab) for _ in range(shared.choice((0, 8, 24)))]
    prompt = prefix + [rng.randrange(vocab) for _ in range(rng.randint(1, longest // 4))]
    most = max(min(longest - len(prompt), longest // 3), 1)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, most), "temperature": 0}
    if rng.random() < 0.6:
        body |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "seed": rng.randrange(2**31)}
    for name, values in _OPTIONS.items():
        if rng.random() < 0.2:
            body[name] = rng.choice(values)
    bias = {} if banned is None else {str(banned): -100}
    if rng.random() < 0.2:
        bias |= {str(rng.randrange(vocab)): rng.choice((-100, -5, 5)) for _ in range(3)}
    body["logit_bias"] = bias
    if rng.random() < 0.2:
        body["stop_token_ids"] = [rng.randrange(vocab) for _ in range(2)]
    return body


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "n": (2, 3),
    "top_p": (0.5, 0.9),
    "top_k": (1, 5, 20),
    "min_p": (0.05,),
    "presence_penalty": (-1, 1.5),
    "frequency_penalty": (0.7,),
    "repetition_penalty": (0.8, 1.3),
    "logprobs": (0, 3),
    "ignore_eos": (True,),
    "stop": ("w7", ["w11w", "w3"]),
    "priority": ("interactive", "batch"),
    "cache_salt": ("one", "two"),
}

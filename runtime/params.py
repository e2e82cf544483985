"""What a request may ask for: every limit of sampling and length in one place, for HTTP, Python and command line alike.

Comes in: `SamplingParams`, token counts, a plan's generation defaults. Goes out: parameters that the core can honour
as they stand, or `RequestError` naming the parameter, the value and the limit. Must not know: HTTP, the core.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from llmc.artifacts.errors import UsageError
from llmc.runtime.messages import Handling, SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 64
MAX_N = 128
MAX_SALT_CHARS = 256
#: Below this temperature sampling is greedy: dividing by it would only overflow.
GREEDY_BELOW = 1e-5
#: Logits are float32: beyond these values scaled ones become infinite, or all alike.
MAX_TEMPERATURE = 1000.0
REPETITION_PENALTIES = (0.001, 1000.0)

#: What `generation_config.json` may set for requests that leave it out (the names are the same there and here).
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class RequestError(UsageError):
    """A request that cannot be honoured. `param` names the parameter, `code` is OpenAI's word for the kind of error."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Limits:
    """What the engine can hold: `vocab_size` ids, `max_seq_len` tokens of prompt and answer, `pool_tokens` of KV."""

    vocab_size: int
    max_seq_len: int
    pool_tokens: int

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and answer together."""
        return min(self.max_seq_len, self.pool_tokens)


def generation_defaults(config: Mapping[str, object]) -> dict[str, float]:
    """The sampling defaults among a generation_config.json; values that are null or not numbers are left out."""
    found: dict[str, float] = {}
    for name in DEFAULTABLE:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def check(params: SamplingParams, limits: Limits) -> SamplingParams:
    """The parameters as the core takes them; raises RequestError for a value out of its range."""
    _check_ranges(params)
    _check_tokens(params, limits)
    _check_stop(params, limits)
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs is {params.logprobs}; it must be between 0 and {MAX_LOGPROBS}", "logprobs")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise RequestError(f"seed is {params.seed}; it must be a 64-bit integer", "seed")
    return msgspec.structs.replace(
        params,
        temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
        top_k=min(params.top_k, limits.vocab_size),
        seed=None if params.seed is None else params.seed % 2**63,
    )


def _check_ranges(p: SamplingParams) -> None:
    # (name, value, lowest, lowest is allowed, highest)
    rules = (
        ("temperature", p.temperature, 0.0, True, MAX_TEMPERATURE),
        ("top_p", p.top_p, 0.0, False, 1.0),
        ("top_k", p.top_k, 0, True, 2**31 - 1),
        ("min_p", p.min_p, 0.0, True, 1.0),
        ("repetition_penalty", p.repetition_penalty, REPETITION_PENALTIES[0], True, REPETITION_PENALTIES[1]),
        ("presence_penalty", p.presence_penalty, -2.0, True, 2.0),
        ("frequency_penalty", p.frequency_penalty, -2.0, True, 2.0),
    )
    for name, value, low, inclusive, high in rules:
        # Written so that NaN fails.
        above = value >= low if inclusive else value > low
        if not (above and value <= high and math.isfinite(value)):
            start = f"at least {low:g}" if inclusive else f"more than {low:g}"
            raise RequestError(f"{name} is {value}; it must be {start} and at most {high:.10g}", name)


def _check_tokens(p: SamplingParams, limits: Limits) -> None:
    if p.max_tokens is not None and p.max_tokens < 1:
        raise RequestError(f"max_tokens is {p.max_tokens}; it must be at least 1", "max_tokens")
    if p.min_tokens < 0:
        raise RequestError(f"min_tokens is {p.min_tokens}; it must be at least 0", "min_tokens")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens is {p.min_tokens}, more than max_tokens {p.max_tokens}", "min_tokens")
    if len(p.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(p.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
        )
    for token, bias in p.logit_bias.items():
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"logit_bias names token {token}; ids go from 0 to {limits.vocab_size - 1}", "logit_bias"
            )
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of token {token} is {bias}; it must be between -100 and 100", "logit_bias")


def _check_stop(p: SamplingParams, limits: Limits) -> None:
    if len(p.stop) > MAX_STOP:
        raise RequestError(f"stop has {len(p.stop)} strings; at most {MAX_STOP} are allowed", "stop")
    for text in p.stop:
        if not text:
            raise RequestError("stop contains an empty string; every stop string needs at least one character", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(f"stop string of {len(text)} characters; at most {MAX_STOP_CHARS} are allowed", "stop")
        if _half_a_pair(text):
            raise RequestError("stop contains half of a surrogate pair, which is not valid Unicode", "stop")
    if len(p.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(p.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
            "stop_token_ids",
        )
    for token in p.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids contains {token}; ids go from 0 to {limits.vocab_size - 1}", "stop_token_ids"
            )


def _half_a_pair(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def check_handling(handling: Handling, classes: Collection[str]) -> None:
    """Raises RequestError for a priority that is not among the scheduler's `classes`, or a salt that is no good."""
    if handling.priority not in classes:
        raise RequestError(f"priority is {handling.priority!r}; it must be one of {', '.join(classes)}", "priority")
    salt = handling.cache_salt
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed", "cache_salt")
    if _half_a_pair(salt):
        raise RequestError("cache_salt contains half of a surrogate pair, which is not valid Unicode", "cache_salt")


def check_n(n: int) -> int:
    """How many answers a prompt gets."""
    if not 1 <= n <= MAX_N:
        raise RequestError(f"n is {n}; it must be between 1 and {MAX_N}", "n")
    return n


def fit(prompt: list[int], params: SamplingParams, limits: Limits, param: str = "prompt") -> SamplingParams:
    """The parameters with `max_tokens` filled in; raises RequestError when prompt and answer do not fit.

    `param` is what the request calls its prompt ("messages" in a chat).
    """
    n = len(prompt)
    if n == 0:
        raise RequestError(f"{param} is empty: it has no tokens; at least one is needed", param)
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < limits.vocab_size:
            raise RequestError(f"{param} has token id {token}; ids go from 0 to {limits.vocab_size - 1}", param)
    if n >= limits.max_seq_len:
        raise RequestError(
            f"{param} has {n} tokens; this engine's max_seq_len is {limits.max_seq_len}, of which at least one is for "
            f"the answer. Shorten it, or build with a profile of a larger max_seq_len",
            param,
            "context_length_exceeded",
        )
    if params.max_tokens is not None and n + params.max_tokens > limits.max_seq_len:
        raise RequestError(
            f"{param} has {n} tokens and max_tokens is {params.max_tokens}: together {n + params.max_tokens}, more "
            f"than this engine's max_seq_len of {limits.max_seq_len}. Ask for at most {limits.max_seq_len - n} tokens",
            param,
            "context_length_exceeded",
        )
    if n + (params.max_tokens or 1) > limits.pool_tokens:
        raise RequestError(
            f"{param} has {n} tokens and wants {params.max_tokens or 1} more; the KV pool holds {limits.pool_tokens}. "
            f"Shorten it, or give the server more --kv-bytes",
            param,
            "context_length_exceeded",
        )
    room = limits.max_tokens - n
    if params.min_tokens > room:
        raise RequestError(f"min_tokens is {params.min_tokens}; there is room for {room} tokens", "min_tokens")
    return msgspec.structs.replace(params, max_tokens=params.max_tokens or room)

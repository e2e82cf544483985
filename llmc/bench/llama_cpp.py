"""llama.cpp as a peer, through its C API: no Python runs within a step. The wheel of xllamacpp exports it; another
library, compiled for exactly this machine, say, is named by LLMC_LLAMA_CPP=/path/to/libllama.so.

Comes in: a GGUF file. Goes out: seconds. Must not know: plans.

The parameters of a context are passed by value, and their layout changes between versions of llama.cpp. Of them only
the fields up to the numbers of threads are set here, the rest goes back as it came from the library. Where they lie is
checked against the defaults that llama.cpp documents, and what was set is asked for again; a library that differs is
refused.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, c_bool, c_char_p, c_int8, c_int32, c_uint32, c_void_p
from importlib.util import find_spec
from pathlib import Path

from llmc.artifacts.errors import CheckpointError, EnvironmentFault
from llmc.bench.work import Work, prompt

_OPAQUE = 512  # bytes: more than either struct of parameters has
_CONTEXT_FIELDS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "unnamed", "n_threads",
                   "n_threads_batch")  # fmt: skip
#: As llama_context_default_params() gives them.
_DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4, "n_threads_batch": 4}
#: Tokens of a llama_decode at most.
_BATCH = 2048


class _ModelParams(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_uint8 * _OPAQUE),)


class _ContextParams(ctypes.Structure):
    _fields_ = (*((name, c_uint32) for name in _CONTEXT_FIELDS), ("opaque", ctypes.c_uint8 * _OPAQUE))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_SIGNATURES = {
    "llama_model_default_params": (_ModelParams, ()),
    "llama_context_default_params": (_ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, _ModelParams)),
    "llama_init_from_model": (c_void_p, (c_void_p, _ContextParams)),
    "llama_batch_init": (_Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, _Batch)),
    "llama_synchronize": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_n_threads": (c_int32, (c_void_p,)),
    "llama_n_threads_batch": (c_int32, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, ctypes.c_size_t)),
    "llama_log_set": (None, (c_void_p, c_void_p)),
}
_Silent = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_silent = _Silent(lambda level, text, data: None)


def prepare() -> None:
    """Finds the library and checks its layout. Raises EnvironmentFault where it is missing or another."""
    _library()


def _file() -> Path:
    """Of the library."""
    if named := os.environ.get("LLMC_LLAMA_CPP"):
        if not Path(named).is_file():
            raise EnvironmentFault(f"LLMC_LLAMA_CPP={named}: no such file; name a libllama.so, or unset it")
        return Path(named)
    spec = find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFault("xllamacpp is not installed; `pip install 'llmc[bench]'` brings it")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so"))
    if not files:
        raise EnvironmentFault(f"{spec.origin}: has no xllamacpp*.so beside it; the wheel of 2026.10 does")
    return files[0]


def _library() -> ctypes.CDLL:
    file = _file()
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise EnvironmentFault(f"{file}: cannot be loaded: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise EnvironmentFault(f"{file}: exports no {name}; the wheel of xllamacpp 2026.10 does")
        function.restype, function.argtypes = result, arguments
    params = library.llama_context_default_params()
    found = {name: int(getattr(params, name)) for name in _DEFAULTS}
    if found != _DEFAULTS:
        raise EnvironmentFault(
            f"{file}: llama_context_params are not laid out as in the wheel of xllamacpp 2026.10: "
            f"defaults {found}, expected {_DEFAULTS}"
        )
    return library


class Runner:
    """As in peer_main. Each work has a context of its own, so that no other's cells are looked through."""

    def __init__(self, path: Path, threads: int) -> None:
        self._lib, self._threads = _library(), threads
        self._lib.llama_log_set(ctypes.cast(_silent, c_void_p), None)
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise CheckpointError(f"{path}: llama.cpp cannot load it")
        about = ctypes.create_string_buffer(128)
        self._lib.llama_model_desc(self._model, about, len(about))
        self.name = f"llama.cpp {about.value.decode().split()[-1]}"
        self._vocab = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._batch = self._lib.llama_batch_init(_BATCH, 0, 1)
        self._contexts: dict[Work, int] = {}

    def _context(self, work: Work, steps: int) -> int:
        """A context for `batch` sequences; cells come in multiples of 256, and a first run has fewer steps."""
        params = self._lib.llama_context_default_params()
        each = -(-(work.context + max(steps, 128)) // 256) * 256
        cells = each * work.batch
        params.n_ctx, params.n_batch, params.n_seq_max = cells, min(_BATCH, cells), work.batch
        params.n_threads = params.n_threads_batch = self._threads
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise EnvironmentFault(f"llama.cpp has no memory for {work.name}")
        asked = (cells, min(_BATCH, cells), work.batch, self._threads, self._threads)
        names = ("n_ctx", "n_batch", "n_seq_max", "n_threads", "n_threads_batch")
        found = tuple(getattr(self._lib, f"llama_{name}")(context) for name in names)
        if found != asked:
            raise EnvironmentFault(
                f"xllamacpp: asked for {asked} of {names}, it has {found}; 2026.10 has what is asked"
            )
        return int(context)

    def _decode(self, context: int, tokens: list[tuple[int, int, int, bool]]) -> None:
        """One llama_decode of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self._lib.llama_decode(context, batch)
        if code:
            raise EnvironmentFault(f"llama_decode of {len(tokens)} tokens answered {code}")
        self._lib.llama_synchronize(context)

    def _prefill(self, context: int, count: int, sequence: int) -> None:
        ids = prompt(count, self._vocab)
        most = self._lib.llama_n_batch(context)
        for start in range(0, count, most):
            end = min(start + most, count)
            self._decode(context, [(ids[i], i, sequence, i + 1 == count) for i in range(start, end)])

    def _forget(self, context: int, sequence: int, position: int) -> None:
        """Drops what a sequence holds from `position` on."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(context), sequence, position, -1)

    def run(self, work: Work, steps: int) -> float:
        """As in `System`."""
        new = work not in self._contexts
        context = self._contexts[work] if not new else self._contexts.setdefault(work, self._context(work, steps))
        if work.kind == "prefill":
            self._forget(context, 0, 0)
            start = time.perf_counter()
            self._prefill(context, work.context, 0)
            return time.perf_counter() - start
        for sequence in range(work.batch):
            if new:
                self._prefill(context, work.context, sequence)
            self._forget(context, sequence, work.context)
        ids = prompt(work.context + steps, self._vocab)
        start = time.perf_counter()
        for position in range(work.context, work.context + steps):
            self._decode(context, [(ids[position], position, i, True) for i in range(work.batch)])
        return (time.perf_counter() - start) / steps

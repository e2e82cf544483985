"""The `Checkpoint`: what the rest of the compiler sees of a model, whatever it was stored as.

Comes in: a `Source`. Goes out: config, tokenizer, tensors by Hugging Face names, the pin, `ModelInfo`. Must not know:
file formats. torch and transformers are imported only by the methods that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError, UnsupportedError
from llmc.artifacts.hashing import checkpoint_digest, hash_source, sha256_file
from llmc.artifacts.schema import CheckpointPin, ModelInfo
from llmc.builder.checkpoint.source import Quantization, Source, TensorInfo, Texts
from llmc.builder.checkpoint.tokenizer import TokenizerFacts, read_tokenizer

__all__ = ["Checkpoint", "TensorInfo"]

#: Fields of configs that limit the length of a sequence.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx",
            "context_length", "max_target_positions", "model_max_length")  # fmt: skip
#: Tokens of a sequence where neither the checkpoint nor a profile limits it.
UNLIMITED = 2048


class Checkpoint:
    """An opened checkpoint. Nothing of the weights is read until `read`; nothing is hashed until `pin`."""

    def __init__(self, path: Path, source: Source, sha256: Callable[[Path], str] = sha256_file) -> None:
        self.path = path
        self._sha256 = sha256
        self._source = source

    @property
    def format(self) -> str:
        """Either "huggingface" or "gguf"."""
        return self._source.format

    @property
    def name(self) -> str:
        """A GGUF file's name, or what a folder's config says of itself: never a path."""
        return self._source.name

    @property
    def config(self) -> dict[str, Any]:
        """config.json's content."""
        return self._source.config

    @property
    def _texts(self) -> Texts:
        return self._source.texts

    @cached_property
    def _tokenizer(self) -> TokenizerFacts:
        where = self.path if self.format == "gguf" else self.path / "tokenizer.json"
        return read_tokenizer(where, self._texts.tokenizer_json, self._texts.tokenizer_config)

    @property
    def tokenizer_json(self) -> bytes:
        """tokenizer.json; of a GGUF, as transformers converts it."""
        return self._texts.tokenizer_json

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json's content; empty if there is none."""
        return self._texts.tokenizer_config

    @property
    def chat_template(self) -> str | None:
        """Jinja text, or None."""
        return self._texts.chat_template

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json's content; empty if there is none."""
        return self._texts.generation_config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is stored, by Hugging Face names; a tied lm_head is not among them."""
        return self._source.tensors

    @property
    def quantization(self) -> Quantization | None:
        """What the weights were quantized with before, with the places of their bytes and scales; None: they were not.

        `read` gives the values that they stand for, in float32.
        """
        return self._source.quantization

    def stored(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor that `quantization` names, as stored: E4M3 of a weight, f32[rows] of its scales."""
        return self._source.stored(name, start, stop)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of all that `stored` gives of a tensor."""
        return self._source.stored_shape(name)

    @cached_property
    def _pin(self) -> CheckpointPin:
        try:
            files = tuple(hash_source(self._source.root, name, self._sha256) for name in self._source.files)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
        return CheckpointPin(checkpoint_digest(files), self.format, files)

    def pin(self) -> CheckpointPin:
        """Hashes every source file (once): minutes for a large model, so apart from opening."""
        return self._pin

    @property
    def digest(self) -> str:
        """The pin's digest."""
        return self._pin.digest

    def hf_config(self) -> Any:
        """A new `PretrainedConfig` of the model's own class; raises UnsupportedError for a type transformers lacks."""
        from transformers import CONFIG_MAPPING

        kind = self.config.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise UnsupportedError(
                f"{self.path}: config.json: model_type {kind!r} is none that this transformers release knows"
                + ("; code inside checkpoints is never run" if "auto_map" in self.config else "")
            )
        try:
            return CONFIG_MAPPING[kind].from_dict(_with_floats(dict(self.config)))
        except Exception as error:  # each model's config class raises what it likes
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self.path}: config.json: transformers refuses it: {reason}") from error

    def model_info(self) -> ModelInfo:
        """What the runtime must know; `eos_token_ids` is sorted."""
        config = self.hf_config().get_text_config()  # its attributes have one name in all families
        tokenizer = self._tokenizer
        ends = (
            self._ids("config.json", "eos_token_id", getattr(config, "eos_token_id", None))
            | self._ids("generation_config.json", "eos_token_id", self.generation_config.get("eos_token_id"))
            | tokenizer.eos
        )
        starts = self._ids("config.json", "bos_token_id", getattr(config, "bos_token_id", None))
        vocab_size = _required(self.path, config, "vocab_size")
        return ModelInfo(
            name=self.name,
            model_type=str(self.config["model_type"]),
            architecture=str((self.config.get("architectures") or ["unknown"])[0]),
            num_parameters=self._source.num_parameters,
            vocab_size=vocab_size,
            max_position_embeddings=self.longest or UNLIMITED,
            eos_token_ids=tuple(sorted(i for i in ends if 0 <= i < vocab_size)),
            bos_token_id=next(iter(sorted(starts or tokenizer.bos)), None),
            add_bos=tokenizer.add_bos,
        )

    @cached_property
    def longest(self) -> int | None:
        """How many tokens a sequence may have: what the config says or, where it has no limit (ALiBi, recurrent), the
        tokenizer; None where neither does. Raises what `hf_config` does, CheckpointError for what is no number.
        """
        config = self.hf_config().get_text_config()
        for key in _LENGTHS:
            if getattr(config, key, None) is not None:
                return _required(self.path, config, key)
        limit = self.tokenizer_config.get("model_max_length")
        return limit if isinstance(limit, int) and 1 < limit < 1 << 31 else None

    @property
    def stretch(self) -> float:
        """How many times `longest` a sequence may have if a profile asks for it: the factor of dynamic NTK scaling,
        whose frequencies are made for a length; 1 where a layer has another rule. Raises CheckpointError for what is no
        such number.
        """
        rules = getattr(self.hf_config().get_text_config(), "rope_parameters", None) or {}
        each = [rule for rule in (rules, *rules.values()) if isinstance(rule, Mapping) and "rope_type" in rule]
        factors = [rule["factor"] if rule["rope_type"] == "dynamic" else 1.0 for rule in each]
        for factor in factors:
            if not (isinstance(factor, int | float) and 1 <= factor < math.inf):
                raise CheckpointError(f"{self.path}: config.json: factor of rope is {factor!r}, at least 1 is needed")
        return float(min(factors, default=1.0))

    def _ids(self, file: str, key: str, value: Any) -> frozenset[int]:
        """A token id, a list of them or None."""
        values = value if isinstance(value, list) else [value]
        for number in values:
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise CheckpointError(
                    f"{self.path}: {file}: {key} is {value!r}, a token id or a list of them is needed"
                )
        return frozenset(number for number in values if number is not None)

    def resolve(self, name: str) -> str:
        """The stored tensor that a parameter of the model takes its values from.

        Differs from `name` for files saved from the bare base model, whose names lack the first part (`wte.weight` for
        `transformer.wte.weight`). A tied parameter has several names, and is stored under one of them. Raises
        CheckpointError if there is none.
        """
        found = self._find(name)
        if found is None:
            raise CheckpointError(
                f"{self.path}: has no tensor {name!r}, which the model of config.json ({self._architecture}) needs; "
                f"the config belongs to another checkpoint, or a file is missing"
            )
        return found

    def _find(self, name: str) -> str | None:
        for candidate in (name, name.partition(".")[2]):
            if candidate in self.tensors:
                return candidate
        return None

    @property
    def _architecture(self) -> str:
        return str((self.config.get("architectures") or [self.config.get("model_type")])[0])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Rows start:stop of axis 0 (all by default) in the stored dtype; a GGUF's are dequantised to float32.

        `name` may be any that `resolve` takes. Raises CheckpointError when it is missing or the file ends too soon.
        """
        stored = self.resolve(name)
        shape = self.tensors[stored].shape
        first, last, _ = slice(start, stop).indices(shape[0] if shape else 1)
        return self._source.read(stored, first, max(first, last))


#: How transformers writes numbers that JSON has no form for: {"__float__": "Infinity"}.
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def _with_floats(value: Any) -> Any:
    """The value with such numbers as numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return _FLOATS.get(value["__float__"], value)
        return {key: _with_floats(v) for key, v in value.items()}
    return [_with_floats(v) for v in value] if isinstance(value, list) else value


def _required(path: Path, config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: config.json: {key} is {value!r}, a whole number from 1 on is needed")
    return value

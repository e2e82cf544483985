"""A GGUF file seen as a Hugging Face checkpoint: names, layout and tokenizer as transformers converts them.

Comes in: a file. Goes out: a `Source` whose tensors are float32 under Hugging Face names. Must not know: directories.
transformers' own tables and processors do the conversion, one tensor at a time, so that nothing is converted before it
is asked for; its loader converts the whole file at once.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import UnsupportedError
from llmc.builder.checkpoint.gguf_header import GgufHeader, read_header
from llmc.builder.checkpoint.gguf_tokenizer import chat_template, generation_config, tokenizer_files
from llmc.builder.checkpoint.source import Source, TensorInfo, Texts, read_exactly

#: transformers' processors that make one Hugging Face tensor of one GGUF tensor. The others merge or split experts.
_ONE_TO_ONE = (
    "TensorProcessor",
    "LlamaTensorProcessor",
    "GPT2TensorProcessor",
    "Gemma2TensorProcessor",
    "NemotronTensorProcessor",
    "BloomTensorProcessor",
)
#: The two tensors as tall as the vocabulary: no processor touches their values, so that rows are read alone.
_PLAIN = ("token_embd.weight", "output.weight")
#: Bytes of one row for `dequantize`: 16 of them and what becomes of them fit a processor's second cache.
_JOINED = 6144
_REMEDY = "build from the Hugging Face directory instead"


class GgufSource(Source):
    """An opened file. Opening reads its header; config, tokenizer and names need transformers and come on first use."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.root = path.parent
        self.files = (path.name,)
        self.name = path.name.removesuffix(".gguf")
        self._path = path
        self._header = read_header(path)
        _refuse_scaled_rope(self._header)
        self._kept: tuple[str, np.ndarray] | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config that transformers derives from the metadata, with the causal model's class as its architecture."""
        from transformers import AutoConfig

        try:
            with tempfile.TemporaryDirectory(prefix="llmc-gguf-") as folder:
                _write_outline(self._header, Path(folder) / self._path.name)
                config = AutoConfig.from_pretrained(folder, gguf_file=self._path.name)
        except (ValueError, KeyError, AttributeError) as error:
            raise UnsupportedError(
                f"{self._path}: transformers has no config for GGUF architecture {self._header.architecture!r} "
                f"({error}); {_REMEDY}"
            ) from error
        value: dict[str, Any] = json.loads(config.to_json_string())
        for key in ("_name_or_path", "_model_name_or_path"):  # where and what it was called: not the model's
            value.pop(key, None)
        return value | {"architectures": [_model_class(self._path, config).__name__]}

    @cached_property
    def texts(self) -> Texts:
        """Converted by transformers from the vocabulary in the metadata."""
        tokenizer_json, tokenizer_config = tokenizer_files(self._header)
        template = chat_template(self._header)
        return Texts(tokenizer_json, tokenizer_config, template, generation_config(self._header))

    @cached_property
    def _processor(self) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        processor = TENSOR_PROCESSORS.get(self._header.architecture, TensorProcessor)(config=self.config)
        if type(processor).__name__ not in _ONE_TO_ONE:
            raise UnsupportedError(
                f"{self._path}: the tensors of GGUF architecture {self._header.architecture!r} are not stored one to "
                f"one; {_REMEDY}"
            )
        return processor

    @cached_property
    def _gguf_names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name."""
        import torch
        from transformers import AutoConfig
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        config = AutoConfig.for_model(**self.config)
        with torch.device("meta"):
            model = _model_class(self._path, config)(config)
        to_hf = get_gguf_hf_weights_map(_NamesOnly(model), self._processor)
        unknown = [name for name in self._header.tensors if name not in to_hf]
        if unknown:  # some families were converted from the base model, whose names lack its prefix
            to_hf = get_gguf_hf_weights_map(model, self._processor)
            unknown = [name for name in self._header.tensors if name not in to_hf]
        if unknown:
            raise UnsupportedError(
                f"{self._path}: tensor {unknown[0]!r} ({len(unknown)} such) has no counterpart in transformers' "
                f"{type(model).__name__}, and leaving it out would change the model; {_REMEDY}"
            )
        return {to_hf[name]: name for name in self._header.tensors}

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All float32, whatever the blocks are, in the order of their names."""
        return {hf: TensorInfo("f32", self._shape(gguf)) for hf, gguf in sorted(self._gguf_names.items())}

    def _shape(self, gguf_name: str) -> tuple[int, ...]:
        shape = self._header.tensors[gguf_name].shape
        return shape[::-1] if self._transposes(gguf_name) else shape

    def _transposes(self, gguf_name: str) -> bool:
        """GPT-2's Conv1D holds [in, out]; of the one-to-one processors only its own changes a shape."""
        if type(self._processor).__name__ != "GPT2TensorProcessor" or gguf_name in _PLAIN:
            return False
        probe = np.empty((1, 2), np.float32)
        return self._processor.process(probe, gguf_name).weights.shape == (2, 1)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(t.shape) for t in self._header.tensors.values())

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start:stop, dequantised. A reordered tensor is converted whole; the last one is kept."""
        gguf_name = self._gguf_names[name]
        if gguf_name in _PLAIN:
            return self._dequantise(gguf_name, start, stop)
        if self._kept is None or self._kept[0] != name:
            stored = self._header.tensors[gguf_name].shape
            whole = self._dequantise(gguf_name, 0, stored[0] if stored else 1)
            weights = self._processor.process(whole, gguf_name).weights
            self._kept = (name, np.ascontiguousarray(weights, np.float32))
        value = self._kept[1]
        return value[start:stop] if value.ndim else value

    def _dequantise(self, gguf_name: str, start: int, stop: int) -> np.ndarray:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._header.tensors[gguf_name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        row = tensor.nbytes // rows
        if rows == 1:  # a vector may be one block: taken whole, then cut
            data = read_exactly(self._path, tensor.offset, tensor.nbytes, gguf_name)
            return dequantize(data, GGMLQuantizationType(tensor.kind)).reshape(tensor.shape)[start:stop]
        data = read_exactly(self._path, tensor.offset + start * row, (stop - start) * row, gguf_name)
        # Block formats never cross the last axis.
        data = data.reshape((stop - start) * math.prod(tensor.shape[1:-1]), -1)
        values = dequantize(_joined(data), GGMLQuantizationType(tensor.kind))
        return values.reshape(stop - start, *tensor.shape[1:])


def _joined(rows: np.ndarray) -> np.ndarray:
    """The same bytes in fewer rows: `dequantize` loops over 16 of them at a time, which short ones make slow."""
    count, nbytes = rows.shape
    together = next(n for n in range(max(_JOINED // max(nbytes, 1), 1), 0, -1) if count % n == 0)
    return rows.reshape(count // together, together * nbytes)


class _NamesOnly:
    """A model without children. transformers' mapping builds its tables anew for every module below: seconds."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _write_outline(header: GgufHeader, path: Path) -> None:
    """A GGUF file with what a config follows from: metadata and the tensors' names, neither vocabulary nor values.
    transformers' reader would take seconds for every token of it.
    """
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, header.architecture)
    size = {f"{header.architecture}.vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ()))}
    for key, value in (size | header.metadata).items():
        vocabulary = key.startswith("tokenizer.") and isinstance(value, list | str)
        if key != "general.architecture" and not vocabulary and value != []:
            first = value[0] if isinstance(value, list) else value
            kind = GGUFValueType.INT64 if type(first) is int else GGUFValueType.get_type(first)
            kind = GGUFValueType.FLOAT64 if isinstance(first, float) else kind
            if isinstance(value, list):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
            else:
                writer.add_key_value(key, value, kind)
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _model_class(path: Path, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedError(
            f"{path}: transformers has no causal language model of type {config.model_type!r}"
        ) from None


def _refuse_scaled_rope(header: GgufHeader) -> None:
    """transformers drops the scaling of rotary positions when it converts; the model would be another one."""
    key = f"{header.architecture}.rope.scaling.type"
    if header.metadata.get(key, "none") != "none":
        raise UnsupportedError(
            f"{header.path}: {key} is {header.metadata[key]!r}, which the conversion of a GGUF loses; {_REMEDY}"
        )

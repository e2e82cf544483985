"""A Hugging Face directory: config, tokenizer files, one or sharded safetensors.

Comes in: a folder. Goes out: a `Source`. Must not know: torch, transformers, GGUF.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import CheckpointError
from llmc.builder.checkpoint.quantized import read_scheme
from llmc.builder.checkpoint.safetensors_file import SafetensorsFile
from llmc.builder.checkpoint.source import Scheme, Source, TensorInfo, Texts, refuse_lfs_pointer

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_OPTIONAL = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "hf_quant_config.json")
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


class DirectorySource(Source):
    """An opened folder. Opening reads the JSON files and the headers of all shards, and no weights."""

    format = "huggingface"

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / CONFIG).is_file():
            raise CheckpointError(_no_config(root))
        self._config = read_json(root / CONFIG)
        _require_tokenizer(root)
        weight_files, self._shards, self._where = _open_weights(root)
        optional = [name for name in _OPTIONAL if (root / name).is_file()]
        self.name = self._model_name()
        self.files = (CONFIG, TOKENIZER, *optional, *weight_files)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._config

    def _model_name(self) -> str:
        """As the config has it, else by kind and size: the folder's own name must not change a plan's bytes."""
        known = str(self._config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
        return known or f"{self._config.get('model_type')}-{self.num_parameters / 1e6:.1f}M"

    @cached_property
    def texts(self) -> Texts:
        """The other JSON files; those that are absent count as empty."""
        tokenizer_config = self._optional("tokenizer_config.json")
        return Texts(
            (self.root / TOKENIZER).read_bytes(),
            tokenizer_config,
            _chat_template(self.root, tokenizer_config),
            self._optional("generation_config.json"),
        )

    @cached_property
    def scheme(self) -> Scheme | None:
        """What config.json or ModelOpt's own file says of the weights' quantization."""
        name = "hf_quant_config.json"
        return read_scheme(str(self.root), self._config, self._optional(name) if name in self.files else None)

    def _optional(self, name: str) -> dict[str, Any]:
        return read_json(self.root / name) if name in self.files else {}

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All shards' tensors, in the order of their names."""
        return {name: self._shards[shard].entries[name].info for name, shard in sorted(self._where.items())}

    @property
    def num_parameters(self) -> int:
        """Elements of the float tensors."""
        floats = ("f", "bf")
        return sum(math.prod(t.shape) for t in self.tensors.values() if t.dtype.startswith(floats))

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start:stop in the dtype of the file."""
        return self._shards[self._where[name]].read(name, start, stop)


def _no_config(root: Path) -> str:
    ggufs = sorted(root.glob("*.gguf"))
    if ggufs:
        return f"{root}: has no {CONFIG}, but a GGUF file: pass it itself, `--model {ggufs[0]}`"
    if not any(root.iterdir()):
        return f"{root}: is an empty folder; --model takes a Hugging Face checkpoint's folder or a GGUF file"
    return f"{root}: has no {CONFIG}; --model takes a Hugging Face checkpoint's folder or a GGUF file"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError for a file that has none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    refuse_lfs_pointer(path, raw)
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, an object is expected; fetch it again")
    return value


def _require_tokenizer(root: Path) -> None:
    path = root / TOKENIZER
    if path.is_file():
        refuse_lfs_pointer(path, path.open("rb").read(64))
        return
    others = [name for name in _OTHER_TOKENIZERS if (root / name).is_file()]
    found = f" ({', '.join(others)} alone cannot be served)" if others else ""
    raise CheckpointError(
        f"{root}: has no {TOKENIZER}{found}; make one with transformers: "
        f"AutoTokenizer.from_pretrained({str(root)!r}).save_pretrained({str(root)!r}), or copy the one that the model "
        f"was published with"
    )


def _chat_template(root: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja goes before tokenizer_config.json, as in transformers; of named ones, `default`."""
    path = root / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{root / 'tokenizer_config.json'}: chat_template is a JSON {type(template).__name__}, text is expected"
        )
    return template


def _open_weights(root: Path) -> tuple[tuple[str, ...], dict[str, SafetensorsFile], dict[str, str]]:
    """Files read, opened shards by file name, and shard of each tensor."""
    if (root / SINGLE).is_file():
        shard = SafetensorsFile.open(root / SINGLE)
        return (SINGLE,), {SINGLE: shard}, dict.fromkeys(shard.entries, SINGLE)
    if (root / INDEX).is_file():
        return _open_sharded(root)
    loose = sorted(p.name for p in root.glob("*.safetensors"))
    if len(loose) == 1:
        shard = SafetensorsFile.open(root / loose[0])
        return (loose[0],), {loose[0]: shard}, dict.fromkeys(shard.entries, loose[0])
    if loose:
        raise CheckpointError(f"{root}: has {len(loose)} safetensors files but no {INDEX}; fetch the index too")
    others = sorted(p.name for pattern in _OTHER_WEIGHTS for p in root.glob(pattern))
    found = f"; {others[0]} is not read, because such files can run code: convert it to safetensors" if others else ""
    raise CheckpointError(f"{root}: has no weights: neither {SINGLE} nor {INDEX}{found}")


def _open_sharded(root: Path) -> tuple[tuple[str, ...], dict[str, SafetensorsFile], dict[str, str]]:
    where = read_json(root / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{root / INDEX}: has no weight_map; fetch it again")
    names = sorted({str(name) for name in where.values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{root / INDEX}: names the shard {outside[0]!r}, which is not a file of this folder")
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        lost = next(tensor for tensor, name in where.items() if name == missing[0])
        raise CheckpointError(
            f"{root}: shard {missing[0]} is missing ({len(missing)} of {len(names)} shards), which {INDEX} names for "
            f"tensor {lost!r} among others; fetch it"
        )
    shards = {name: SafetensorsFile.open(root / name) for name in names}
    for tensor, name in where.items():
        if tensor not in shards[name].entries:
            raise CheckpointError(f"{root / name}: has no tensor {tensor!r}, which {INDEX} promises; fetch both again")
    return (INDEX, *names), shards, where

"""Calibration data: token ids from text files, or from documentation that comes with Python.

Comes in: a checkpoint and perhaps a path. Goes out: `Samples`. Must not know: what is measured on them.

A sample is the head of a document, so that positions, and what the model does to its first token, are as in use. Longer
documents give several samples, each starting anew.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.builder.checkpoint import Checkpoint

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

#: Samples that are cut for each one taken, so that the choice is spread over more than a file's first page.
_CHOICE = 16
_CHARS_PER_TOKEN = 8
_SUFFIXES = (".txt", ".jsonl")
#: Characters of documentation that a module must have to be taken, and how many samples it gives at most.
_LEAST_DOCUMENTATION, _OF_ONE_FILE = 4000, 2


@dataclass(frozen=True)
class Samples:
    """Token ids, one tuple a sample; `source` says in words where they come from, without paths."""

    source: str
    ids: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens in all samples together."""
        return sum(len(sample) for sample in self.ids)

    @property
    def sha256(self) -> str:
        """Over each sample's length and ids, as little-endian 32-bit integers."""
        digest = hashlib.sha256()
        for sample in self.ids:
            digest.update(np.asarray([len(sample), *sample], "<i4").tobytes())
        return digest.hexdigest()


def read_samples(checkpoint: Checkpoint, path: Path, samples: int, tokens: int, seed: int) -> Samples:
    """At most `samples` samples of at most `tokens` tokens from a .txt, a .jsonl or a folder of them.

    A line of a .jsonl is `{"text": "..."}` or `{"messages": [{"role": ..., "content": ...}, ...]}`. Raises UsageError
    for a missing path, another kind of file, a bad line (with its number) or no text at all.
    """
    from tokenizers import Tokenizer

    files = _files(path)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    wanted = samples * _CHOICE
    pieces: list[tuple[int, ...]] = []
    for document in _documents(checkpoint, files, wanted * tokens * _CHARS_PER_TOKEN):
        ids = tokenizer.encode(document.text, add_special_tokens=not document.rendered).ids
        pieces += _cut(ids, tokens, ids[:1] if checkpoint.model_info().add_bos else [])
        if len(pieces) >= wanted:
            break
    if not pieces:
        raise UsageError(f"{path}: holds no text to calibrate with")
    chosen = sorted(random.Random(seed).sample(range(len(pieces)), min(samples, len(pieces))))
    return Samples(f"text of {', '.join(f.name for f in files)}", tuple(pieces[i] for i in chosen))


def _cut(ids: list[int], tokens: int, head: list[int]) -> list[tuple[int, ...]]:
    """Pieces of `tokens` ids, all but the first behind `head`; a last piece under half as long is left out."""
    if not ids:
        return []
    pieces, rest = [tuple(ids[:tokens])], ids[tokens:]
    step = tokens - len(head)
    while len(rest) >= step // 2 and rest:
        pieces.append((*head, *rest[:step]))
        rest = rest[step:]
    return pieces


@dataclass(frozen=True)
class _Document:
    text: str
    rendered: bool  # by the chat template, which writes its special tokens itself


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder of calibration data")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        if not files:
            raise UsageError(f"{path}: holds no {' or '.join(_SUFFIXES)} file to calibrate with")
        return files
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{path}: calibration data is a {', a '.join(_SUFFIXES)} file or a folder of them")
    return [path]


def _documents(checkpoint: Checkpoint, files: list[Path], limit: int) -> Iterator[_Document]:
    """Documents in the files' order; at most `limit` characters of a .txt."""
    for file in files:
        try:
            with file.open(encoding="utf-8") as stream:
                if file.suffix == ".txt":
                    text = stream.read(limit)
                    if text.strip():
                        yield _Document(text, False)
                    continue
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield _parse_line(checkpoint, f"{file} line {number}", line)
        except UnicodeDecodeError as error:
            raise UsageError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from error


def _parse_line(checkpoint: Checkpoint, where: str, line: str) -> _Document:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return _Document(value["text"], False)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return _Document(_render(checkpoint, where, value["messages"]), True)
    raise UsageError(f'{where}: has neither a "text" that is a string nor "messages" that are a list')


def _render(checkpoint: Checkpoint, where: str, messages: list[Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    if checkpoint.chat_template is None:
        raise UsageError(f"{where}: has messages, but {checkpoint.path} has no chat template to render them with")
    config = checkpoint.tokenizer_config
    special = {
        key: token["content"] if isinstance(token, dict) else token
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := config.get(key)) is not None
    }
    try:
        rendered, _ = render_jinja_template([messages], chat_template=checkpoint.chat_template, **special)
    except Exception as error:  # whatever the template raises on these messages
        raise UsageError(f"{where}: the chat template refuses its messages: {error}") from None
    return str(rendered[0])


def documentation(checkpoint: Checkpoint, samples: int, tokens: int, seed: int) -> Samples:
    """The same from the documentation strings of Python's standard library: text that every machine has.

    `pydoc_data.topics`, on which builds are evaluated, is not part of it.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    head = [start_token(checkpoint)] if checkpoint.model_info().add_bos else []
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng, pieces = random.Random(seed), list[tuple[int, ...]]()
    rng.shuffle(files)
    for file in files:
        text = _docstrings(file)
        if len(text) > _LEAST_DOCUMENTATION:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            pieces += [piece for piece in _cut([*head, *ids], tokens, head) if len(piece) == tokens][:_OF_ONE_FILE]
        if len(pieces) >= samples:
            break
    if not pieces:
        raise EnvironmentFault(
            f"Python's standard library in {sysconfig.get_path('stdlib')} has too little documentation to calibrate "
            f"with samples of {tokens} tokens; pass text with --calib"
        )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Samples(f"documentation strings of Python {python}'s standard library", tuple(pieces[:samples]))


def _docstrings(file: Path) -> str:
    """All documentation strings of a module, as its source has them."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


def start_token(checkpoint: Checkpoint) -> int:
    """What a text starts from: BOS, or else an end token (which separated the texts in training), or else token 0."""
    info = checkpoint.model_info()
    if info.bos_token_id is not None:
        return info.bos_token_id
    return info.eos_token_ids[0] if info.eos_token_ids else 0

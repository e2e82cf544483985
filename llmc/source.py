"""The checkpoint with its Hugging Face twin. Comes in: a `Checkpoint`. Goes out: token ids, the twin. Must not know:
plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmc.builder.checkpoint import Checkpoint


@dataclass(frozen=True)
class Source:
    """The twin is loaded once, and only if something asks for it. `longest`: tokens of the longest sequence that is
    served; see `load_reference`.
    """

    checkpoint: Checkpoint
    longest: int | None = None

    @cached_property
    def reference(self) -> Any:
        """The torch module at float32."""
        from llmc.builder.reference import load_reference

        return load_reference(self.checkpoint, longest=self.longest)

    def encode(self, text: str) -> list[int]:
        """Token ids of text, with the BOS that the tokenizer itself adds."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.checkpoint.tokenizer_json.decode())
        tokenizer.no_truncation()  # a file can switch either on, for whoever used it last
        tokenizer.no_padding()
        return list(tokenizer.encode(text).ids)

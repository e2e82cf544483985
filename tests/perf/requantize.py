"""Writes a GGUF file anew with its matrices in another type: the files that llama.cpp is timed on.

    python -m tests.perf.requantize MODEL.gguf Q8_0 OUT.gguf

Vectors become float32, as llama.cpp has them. The values are those of the file given: speed does not ask for more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

_FILE_TYPES = {"Q8_0": LlamaFileType.MOSTLY_Q8_0, "F16": LlamaFileType.MOSTLY_F16, "Q4_1": LlamaFileType.MOSTLY_Q4_1}


def requantize(source: Path, kind: str, target: Path) -> None:
    """`kind` is one of _FILE_TYPES. Raises KeyError for another."""
    reader, file_type = GGUFReader(source), _FILE_TYPES[kind]
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value_type = field.types[0]
        inner = field.types[-1] if value_type == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        wanted = GGMLQuantizationType[kind] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Takes the three arguments."""
    source, kind, target = sys.argv[1:]
    aside = Path(target).with_suffix(".part")
    requantize(Path(source), kind, aside)
    aside.rename(target)
    print(f"{target}: {Path(target).stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

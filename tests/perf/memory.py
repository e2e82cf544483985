"""Prints the peak memory of building and calibrating a large checkpoint, over what interpreter and libraries take.

    python -m tests.perf.memory [--gigabytes 8] [--folder DIR] [--only bf16,calibrate,fp8] [--samples N]

The checkpoint is random, bf16, in shards, and made here: a Llama of hidden size 3072, 8192 wide, with as many layers as
its size takes. Each build is a process of its own: what it holds after importing its libraries is taken off its peak.
The memory of g++ is not part of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.builder.reference import RESIDENT
from tests.perf.synthetic import make_checkpoint

#: What a build may take over interpreter and libraries, whatever the checkpoint's size.
BOUND = 1.5e9
STEPS = ("bf16", "calibrate", "fp8")


@dataclass(frozen=True)
class Shape:
    """Of a Llama whose weights take about `nbytes` in bf16."""

    nbytes: float
    hidden: int = 3072
    ffn: int = 8192
    vocab: int = 32000
    heads: int = 24

    @property
    def layers(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        return max(round((self.nbytes / 2 - 2 * self.vocab * self.hidden) / layer), 1)

    def config(self) -> dict[str, Any]:
        """Fields of the Hugging Face config."""
        return {
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
            "pad_token_id": 2,
        }  # fmt: skip


def run(step: str, model: Path, folder: Path, resident: int, samples: int) -> dict[str, float]:
    """One step in this process: bytes at the start, at the peak, seconds. `resident`: see builder/reference.py.
    `samples` of the calibration, 0: as many as it takes by itself.
    """
    import resource

    import gguf  # noqa: F401
    import modelopt.torch.quantization.calib  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    from llmc import flow
    from llmc.builder import reference
    from llmc.builder.build import peak_memory
    from llmc.builder.checkpoint import open_checkpoint
    from llmc.calibration import CalibrationOptions, calibrate

    reference.RESIDENT = resident
    torch.ones(8, 8) @ torch.ones(8, 8)  # its threads
    start = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    began, table = time.perf_counter(), folder / "table.json"
    if step == "calibrate":
        calibrate(open_checkpoint(model), CalibrationOptions(samples=samples or None), table)
    else:
        options: dict[str, Any] = {"precision": "bf16"} if step == "bf16" else {"precision": "fp8", "calib": table}
        flow.build(model, folder / "engine.plan", **options, evaluate=False, cache=False)
    return {"start": start, "peak": peak_memory(), "seconds": time.perf_counter() - began}


def measure(step: str, model: Path, folder: Path, resident: int = RESIDENT, samples: int = 0) -> dict[str, float]:
    """The step in a process of its own."""
    words = [step, str(model), str(folder), str(resident), str(samples)]
    command = [sys.executable, "-m", "tests.perf.memory", "--run", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--samples", type=int, default=0, help="of the calibration; fewer are faster")
    parser.add_argument(
        "--run", nargs=5, metavar=("STEP", "MODEL", "FOLDER", "RESIDENT", "SAMPLES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.run:
        step, model, folder, resident, samples = options.run
        print(json.dumps(run(step, Path(model), Path(folder), int(resident), int(samples))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder, shape = Path(made), Shape(options.gigabytes * 1e9)
        model = make_checkpoint(folder / "model", shape.config())
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        print(f"checkpoint: {size / 1e9:.2f} GB in bf16, {shape.layers} layers")
        for step in options.only.split(","):
            found = measure(step, model, folder, samples=options.samples)
            over = found["peak"] - found["start"]
            print(
                f"{step}: peak {found['peak'] / 1e9:.2f} GB, {over / 1e9:.2f} GB over interpreter and libraries "
                f"({found['start'] / 1e9:.2f} GB), bound {BOUND / 1e9:.1f} GB, {found['seconds']:.0f} s",
                flush=True,
            )
            if over > BOUND:
                raise SystemExit(f"{step}: over the bound")


if __name__ == "__main__":
    main()

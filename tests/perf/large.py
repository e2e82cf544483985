"""Builds a model of a billion parameters with random weights, and times it beside llama.cpp, same shape and bits.

    python -m tests.perf.large [--target cpu:x86-64-amx] [--folder DIR] [--out build/bench-1b.md] [--repeats 3]

The shape is Llama-3.2-1B's: 1.24 billion parameters, a vocabulary of 128,256, 8 KV heads for 32, tied embeddings. Each
build is a process of its own, whose peak memory is printed. Takes 12 GB of disk, and nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.perf.synthetic import make_checkpoint, make_gguf

#: Fields of its config.json; shorter, so that no cache is sized for 128k tokens.
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
#: Of plan and peer.
PAIRS = {"fp8": "Q8_0", "bf16": "F16"}


def build(folder: Path, precision: str, target: str) -> Path:
    """The plan of a random checkpoint of that precision, made here; the checkpoint is not kept."""
    plan = folder / f"{precision}-{target.replace(':', '-')}.plan"
    if not plan.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            model = make_checkpoint(Path(made) / "random", LLAMA_1B, fp8=precision == "fp8")
            option = ["--fp8"] if precision == "fp8" else ["--dtype", precision]
            words = ["build", "--model", str(model), *option, "--target", target, "-o", str(plan)]
            words += ["--lm-head-dtype", "fp8"] if precision == "fp8" else []  # as Q8_0's is rounded
            words += ["--no-evaluate", "--no-cache", "--json"]
            done = subprocess.run([sys.executable, "-m", "llmc", *words], check=True, stdout=subprocess.PIPE, text=True)
        report = json.loads(done.stdout)
        seconds, peak = sum(report["seconds"].values()), report["peak_memory_bytes"]
        print(f"{plan.name}: {plan.stat().st_size / 1e9:.2f} GB, {seconds:.0f} s, peak {peak / 1e9:.2f} GB", flush=True)
    return plan


def main() -> None:
    """Makes what is missing, then times it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("build/large"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", default="3")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for precision, kind in PAIRS.items():
        plan, peer = build(options.folder, precision, options.target), options.folder / f"{kind}.gguf"
        if not peer.exists():
            make_gguf(peer.with_suffix(".part"), LLAMA_1B, kind).rename(peer)
        words = [str(plan), "--against", f"llama.cpp={peer}", "--repeats", options.repeats, "--steps", "8"]
        words += ["--prefill", "512", "--batch", "1", "4", "16", "--context", "2048"]
        done = subprocess.run([sys.executable, "-m", "tests.perf.peers", *words], check=True, stdout=subprocess.PIPE)
        print(done.stdout.decode(), flush=True)
        if options.out is not None:
            with options.out.open("ab") as file:
                file.write(done.stdout + b"\n")


if __name__ == "__main__":
    main()

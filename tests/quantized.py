"""Checkpoints that were quantized before llmc saw them, written by the tools that write them in the field."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from llmc.tiny import tiny_config
from llmc.tiny_model import random_model
from tests.models import save_checkpoint, tiny_model, tiny_tokenizer

_SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def _model(family: str, **overrides: Any) -> PreTrainedModel:
    model = tiny_model(family, **{**_SIZES, "tie_word_embeddings": False, **overrides})
    model.config.architectures = [type(model).__name__]
    return model


def save_modelopt(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """nvidia-modelopt's export of FP8 with one scale a weight and static activations."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = _model(family, **overrides).to(torch.bfloat16)
    ids = torch.randint(6, 300, (8, 32), generator=torch.Generator().manual_seed(3))
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda quantized: quantized(ids))
    export_hf_checkpoint(model, export_dir=folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_compressed(
    folder: Path,
    family: str = "llama",
    *,
    strategy: str = "channel",
    dynamic: bool = True,
    number: str = "float",
    ignore: tuple[str, ...] = ("lm_head",),
    **overrides: Any,
) -> Path:
    """compressed-tensors' float-quantized or (`number` int) int-quantized format. Static activations get scales from
    the largest input of a batch; modules of `ignore` stay as they are.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = _model(family, **overrides)
    largest = _largest_inputs(model)
    shared: dict[str, Any] = {"num_bits": 8, "type": number, "symmetric": True}
    most = 448 if number == "float" else 127
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**shared, strategy=strategy, dynamic=False),
        input_activations=QuantizationArgs(**shared, strategy="token" if dynamic else "tensor", dynamic=dynamic),
    )
    config = QuantizationConfig(config_groups={"linears": scheme}, ignore=list(ignore), format=f"{number}-quantized")
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.abs().amax(1, keepdim=True)
            module.weight_scale.data.copy_((rows if strategy == "channel" else rows.max()) / most)
            if not dynamic:
                module.input_scale.data.fill_(largest[name] / most)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _largest_inputs(model: PreTrainedModel) -> dict[str, float]:
    largest: dict[str, float] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: largest.update({name: float(args[0].abs().max())}))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    model(torch.randint(6, 300, (8, 32), generator=torch.Generator().manual_seed(3)))
    for hook in hooks:
        hook.remove()
    return largest


def save_blocks(folder: Path, block: int = 16, **overrides: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """Fine-grained FP8: a scale for each square block, `weight_scale_inv`. Returns the weights that it stands for."""
    from safetensors.torch import load_file, save_file

    model = _model("llama", **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "proj" not in name:
            continue
        rows, columns = (-(-d // block) for d in weight.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.reshape(rows, block, columns, block)
        scale = tiles.abs().amax((1, 3)) / 448
        stored = (tiles / scale[:, None, :, None]).reshape(padded.shape).to(torch.float8_e4m3fn)
        whole = stored.float() * scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        values[name] = whole[: weight.shape[0], : weight.shape[1]].numpy()
        tensors[name] = stored[: weight.shape[0], : weight.shape[1]].contiguous()
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


def save_experts(folder: Path, *, dynamic: bool = True) -> Path:
    """A Mixtral as compressed-tensors writes one: each expert's matrices a tensor of its own, scales by channel, a
    quantized cache declared; heads, embedding and routers are left alone. Static scales differ between experts.
    """
    from safetensors.torch import load_file, save_file

    model = random_model(tiny_config("mixtral"))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(name for name in tensors if ".experts." in name or "_proj." in name):
        weight, module = tensors[name], name.removesuffix(".weight")
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        if not dynamic:
            tensors[f"{module}.input_scale"] = torch.tensor([0.01 + 0.001 * (len(tensors) % 7)])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    shared: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = shared | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": shared | {"strategy": "channel"}, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "kv_cache_scheme": shared | {"strategy": "tensor", "dynamic": False},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_packed(folder: Path, method: str, group: int = 128, *, v2: bool = False, **overrides: Any) -> Path:
    """GPTQ's or AWQ's 4-bit format, written by its published layout from random numbers; `plain` beside it is the same
    model with the weights that these stand for.
    """
    sizes = {"hidden_size": 288, "intermediate_size": 304, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = tiny_model("llama", **{**sizes, "tie_word_embeddings": False, **overrides})
    rng, packed = np.random.default_rng(0), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rows, columns = module.weight.shape
            groups = -(-columns // group) if group > 0 else 1
            numbers = rng.integers(0, 16, (rows, columns), dtype=np.uint32)
            zeros = rng.integers(6, 10, (rows, groups), dtype=np.uint32)
            scales = (rng.random((rows, groups)) * 0.01 + 0.005).astype(np.float16)
            index = np.arange(columns) // (group if group > 0 else columns)
            weight = (numbers.astype(np.float32) - zeros[:, index]) * scales[:, index].astype(np.float32)
            module.weight.data = torch.from_numpy(weight)
            stored = (zeros - (0 if v2 or method == "awq" else 1)).T & 15
            order = range(8) if method == "gptq" else (0, 2, 4, 6, 1, 3, 5, 7)
            packed[f"{name}.qweight"] = _words(numbers).T if method == "gptq" else _words(numbers.T, order)
            packed[f"{name}.qzeros"] = _words(stored, order)
            packed[f"{name}.scales"] = torch.from_numpy(scales.T.copy())
            if method == "gptq":
                packed[f"{name}.g_idx"] = torch.from_numpy(index.astype(np.int32))
    save_checkpoint(folder / "plain", "llama", model=model)
    copy = save_checkpoint(folder / method, "llama", model=model)
    weights = load_file(copy / "model.safetensors")
    kept = {n: value for n, value in weights.items() if f"{n.removesuffix('.weight')}.qweight" not in packed}
    save_file({n: v.contiguous() for n, v in (kept | packed).items()}, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    declared = {"quant_method": method, "bits": 4, "group_size": group}
    declared |= {"desc_act": False, "checkpoint_format": "gptq_v2" if v2 else "gptq"} if method == "gptq" else {}
    declared |= {"version": "gemm", "zero_point": True} if method == "awq" else {}
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return copy


def _words(numbers: np.ndarray, order: Sequence[int] = range(8)) -> torch.Tensor:
    """[R, 8 * C] of numbers below 16 -> i32[R, C]: nibble i of a word is column order[i] of its eight."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(order):
        words |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))

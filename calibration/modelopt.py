"""What of a calibration nvidia-modelopt computes: largest magnitudes, and SmoothQuant's factors.

Comes in: tensors. Goes out: tensors. Must not know: models, formats, what becomes of the numbers.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from llmc.artifacts.errors import EnvironmentFault


class Modelopt:
    """modelopt, which takes seconds to import, and warns of things that are not so."""

    def __init__(self) -> None:
        """Raises EnvironmentFault where it is not installed."""
        try:
            with _quiet():
                import modelopt.torch.quantization
        except ImportError as error:
            raise EnvironmentFault(f"calibration needs nvidia-modelopt ({error}): pip install 'llmc[build]'") from error
        self.version = str(modelopt.__version__)
        self._quantization: Any = modelopt.torch.quantization

    def amax(self, values: torch.Tensor, axis: int | None) -> torch.Tensor:
        """The largest magnitude of a tensor, over all of it, or for each entry of an axis (MaxCalibrator)."""
        calibrator = self._quantization.calib.MaxCalibrator(num_bits=(4, 3), axis=axis)
        calibrator.collect(values)
        found: torch.Tensor = calibrator.compute_amax()
        return found

    def factors(self, inputs: torch.Tensor, weights: torch.Tensor, exponent: float) -> torch.Tensor:
        """f32[K]: what SmoothQuant multiplies the columns of an input by, whose largest magnitudes are `inputs` [K],
        `weights` [K] those of the weights' columns; 1 where either is zero.

        Xiao et al. 2022 (arXiv:2211.10438), as modelopt's `smoothquant` computes it: of a layer with these magnitudes.
        """
        # Its own treatment of zeros fails, and of factors below 2^-31; beyond 1e-4 to 1e4 it clips them.
        known = (inputs > 0) & (weights > 0)
        inputs = torch.where(known, inputs.clamp_max(1e6), torch.ones_like(inputs))
        layer = torch.nn.Sequential(torch.nn.Linear(len(inputs), 1, bias=False))
        layer[0].weight.data = torch.where(known, weights.clamp_min(1e-6), torch.ones_like(weights))[None]
        config = {**self._quantization.INT8_SMOOTHQUANT_CFG, "algorithm": {"method": "smoothquant", "alpha": exponent}}
        with _quiet(), torch.inference_mode(False), torch.no_grad():
            smoothed = self._quantization.quantize(layer, config, lambda model: model(inputs[None].clone()))
        factors: torch.Tensor = smoothed[0].input_quantizer.pre_quant_scale
        return factors.detach().flatten()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, modelopt neither prints nor warns."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield

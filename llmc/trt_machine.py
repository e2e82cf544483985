"""Whether TensorRT can build an engine for a GPU on this machine. Comes in: an SM. Goes out: nothing, or
EnvironmentFault that says what is missing and what to use instead. Must not know: models, plans.
"""

from __future__ import annotations

from llmc.artifacts.errors import EnvironmentFault


def require_builder(sm: int) -> None:
    """For a plan: TensorRT with its plug-ins, and the GPU."""
    from llmc.builder.trt.library import tensorrt_with_plugins

    tensorrt_with_plugins(sm)
    require_gpu(
        sm,
        f"--target tensorrt:sm_{sm}",
        f"--target cuda:sm_{sm} builds a plan without one, and with TensorRT-RTX `llmc export --tensorrt` writes "
        "engines for sm_89 and sm_120",
    )


def require_gpu(sm: int, option: str, instead: str) -> None:
    """TensorRT itself measures its kernels on the GPU, and builds for no other; TensorRT-RTX needs none."""
    from llmc.runtime.cuda.gpus import survey

    try:
        gpus = survey().gpus
    except EnvironmentFault as error:
        raise EnvironmentFault(f"TensorRT builds an engine on the GPU that it is for: {error}; {instead}") from error
    if not any(gpu.sm == sm for gpu in gpus[:1]):
        shown = f"sm_{gpus[0].sm} ({gpus[0].name})" if gpus else "none"
        raise EnvironmentFault(f"{option}: TensorRT builds for this machine's first GPU, which is {shown}; {instead}")

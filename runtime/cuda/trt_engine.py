"""A rank whose steps a TensorRT engine computes, on its GPU.

Comes in: a plan's engine and what surrounds it, steps. Goes out: logits, in the step memory. Must not know: requests,
scheduling, how the engine was built.

Each optimization profile has an execution context of its own: a context that changes between profiles would have to be
told all addresses again. As one step follows the other, all contexts share one arena. Addresses never change, so that a
step sets shapes and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.artifacts.errors import EnvironmentFault, PlanError
from llmc.artifacts.plan import Plan
from llmc.artifacts.trt_program import DECODE, DTYPES, MIXED, TrtProgram, decode_trt_program
from llmc.runtime.cuda import driver, trt_library
from llmc.runtime.cuda.memory import DeviceMemory
from llmc.runtime.cuda.nccl import Communicator
from llmc.runtime.cuda.rank import GpuRank
from llmc.runtime.native import StepArrays
from llmc.runtime.step_memory import StepMemory

if TYPE_CHECKING:
    from llmc.runtime.rank_main import RankConfig  # which is running as __main__


def load(config: RankConfig) -> tuple[TrtRank, StepMemory]:
    """A rank that is ready. Raises LlmcError where it cannot be."""
    plan = Plan.open(f"/proc/self/fd/{config.plan_fd}", verify=False)
    names = plan.manifest.ranks[config.rank]
    program = decode_trt_program(plan.section(names.code), f"{config.plan}: {names.code}")
    if config.num_blocks > program.max_blocks:
        most = program.max_blocks * sum(rank.kv_block_bytes for rank in plan.manifest.ranks)
        raise EnvironmentFault(
            f"a pool of {config.num_blocks} KV blocks: the plan's engines were built for {program.max_blocks} at most; "
            f"--kv-bytes {most} has as many"
        )
    trt = trt_library.load()
    driver.open_device(config.rank)
    memory = StepMemory(config.layout, config.memory_fd)
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(plan.section(program.engine))
    if engine is None:
        raise EnvironmentFault(
            f"{config.plan}: {program.engine}: TensorRT {trt.__version__} cannot load it; rebuild the plan on this GPU"
        )
    nothing = np.empty(0, np.uint8)  # the weights are in the engine
    device = DeviceMemory(program, nothing, nothing, config.kv_bytes, config.state_bytes)
    return TrtRank(trt, config, program, engine, device, memory), memory


class TrtRank(GpuRank):
    """See above. Raises PlanError where the engine's tensors are not those that the plan tells of."""

    def __init__(
        self, trt: Any, config: RankConfig, program: TrtProgram, engine: Any, device: DeviceMemory, memory: StepMemory
    ) -> None:
        _require_tensors(trt, engine, program, config.plan)
        self.device, self._engine = device, engine
        self._addresses = {t.name: device.bases[t.space] + config.num_blocks * t.block_offset for t in program.tensors}
        inputs = {t.name: t.shape for t in program.tensors if not t.output}
        pools = [t for t in program.tensors if t.space == "kv" and not t.output]
        super().__init__(config, program, device.bases, [(self._addresses[t.name], t.row_bytes) for t in pools], memory)
        self._communicator = Communicator(config.rank, config.tp, memory.comm) if config.tp > 1 else None
        self._pools_shapes = {t.name: _sized(t.shape, {"num_blocks": config.num_blocks}) for t in pools}
        self._step_shapes = {name: shape for name, shape in inputs.items() if name not in self._pools_shapes}
        self._contexts = [self._context(trt, profile) for profile in (DECODE, MIXED)]
        self._events = (driver.Event(), driver.Event())

    def _context(self, trt: Any, profile: int) -> Any:
        """An execution context for steps of one profile, which has all that does not change from step to step."""
        context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise EnvironmentFault(f"rank {self.config.rank}: TensorRT makes no execution context; its log says why")
        self._want(context.set_optimization_profile_async(profile, int(self._stream.handle)), f"profile {profile}")
        self._stream.wait()
        context.set_device_memory(self._bases["arena"], self.device.sizes["arena"])
        if self._communicator is not None:
            self._want(context.set_communicator(self._communicator.capsule()), "NCCL's communicator")
        for name, address in self._addresses.items():
            self._want(context.set_tensor_address(name, address), f"the address of {name}")
        for name, shape in self._pools_shapes.items():
            self._want(context.set_input_shape(name, shape), f"{name} of {shape}")
        return context

    def _compute(self, step: StepArrays, timed: bool) -> None:
        self.device.write(step, 0)
        rows = len(step.rows)
        if not rows:  # the engine has one row at least; nobody looks at it
            self.device.arrays["rows"][0], rows = 0, 1
        seqs = len(step.context_len)
        sizes = {"T": len(step.ids), "S": rows, "num_seqs": seqs, "num_seqs_and_1": seqs + 1}
        self.device.upload(self._stream, sizes["T"], seqs, rows)
        context = self._contexts[DECODE if self._is_decode(step) else MIXED]
        for name, dims in self._step_shapes.items():
            shape = _sized(dims, sizes)
            self._want(context.set_input_shape(name, shape), f"{name} of {shape}")
        if timed:
            self._events[0].record(self._stream)
        self._want(context.execute_async_v3(int(self._stream.handle)), "the step")
        if timed:
            self._events[1].record(self._stream)

    def _note(self, stamps: np.ndarray) -> None:
        """The whole step is one launch."""
        stamps[0], stamps[1:] = 0, self._events[1].nanoseconds_since(self._events[0])

    def _want(self, done: bool, what: str) -> None:
        if not done:
            raise EnvironmentFault(f"rank {self.config.rank}: TensorRT refuses {what}; its log says why")


def _sized(shape: tuple[int | str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)


def _require_tensors(trt: Any, engine: Any, program: TrtProgram, where: str) -> None:
    """Raises PlanError where tensors have other names, dtypes or directions."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    have = {n: (engine.get_tensor_dtype(n), engine.get_tensor_mode(n) == trt.TensorIOMode.OUTPUT) for n in names}
    want = {t.name: (getattr(trt.DataType, DTYPES[t.dtype]), t.output) for t in program.tensors}
    wrong = sorted(name for name in {*have, *want} if have.get(name) != want.get(name))
    if wrong:
        raise PlanError(f"{where}: {program.engine} and the plan differ in {', '.join(wrong)}; rebuild the plan")

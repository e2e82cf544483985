"""What `manifest.json` says: one file of frozen dataclasses and a version. Standard library only.

Comes in: nothing. Goes out: `Manifest` and its parts; plan.py has their JSON. A reader refuses a plan whose
`format` differs from FORMAT_VERSION before it looks at anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Raised by one whenever a reader of the older number could misread the newer file.
FORMAT_VERSION = 3

#: The section with the sampler of a plan whose kernels run on a GPU.
HOST_LIBRARY = "code/host.so"


@dataclass(frozen=True)
class SourceFile:
    """A file of the checkpoint: path relative to the checkpoint's folder, size in bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointPin:
    """What the plan was compiled from. `digest` is SHA-256 over the sorted lines `sha256  name` of `files`."""

    digest: str
    format: str  # "huggingface" | "gguf"
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class Section:
    """A member of the zip other than the manifest. `offset` is where its bytes start in the file, page aligned;
    `blake3` their BLAKE3 hash (O'Connor et al., 2020) in hex.
    """

    name: str
    offset: int
    size: int
    blake3: str


@dataclass(frozen=True)
class Target:
    """`kind` "cpu", `isa` "x86-64-v3", or "cuda" or "tensorrt", "sm_90"; `features` are the /proc/cpuinfo flags that a
    machine must show. `driver`: the least version of the GPU's driver, as cuDriverGetVersion counts (13000 is CUDA
    13.0); 0: none.
    """

    kind: str
    isa: str
    features: tuple[str, ...] = ()
    driver: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether its steps run on a GPU, one a rank."""
        return self.kind != "cpu"


@dataclass(frozen=True)
class TokenRange:
    """Steps of min..max tokens run the code tuned for opt tokens."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class ShapeProfile:
    """A resolved shape profile. `outside` says what happens to requests beyond it: only "reject" exists."""

    name: str
    token_ranges: tuple[TokenRange, ...]
    max_num_seqs: int
    max_seq_len: int
    block_size: int
    outside: str = "reject"

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of the largest step."""
        return self.token_ranges[-1].max


@dataclass(frozen=True)
class ModelInfo:
    """What the runtime must know of the model. `eos_token_ids`: those of config, generation config and tokenizer."""

    name: str
    model_type: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool  # the tokenizer itself puts BOS before a plain prompt


@dataclass(frozen=True)
class KVLayer:
    """One attention layer's share of a block on one rank. Offsets and sizes in bytes, within one block of the pool.
    `latent`: how many of a row's columns are value as well as key; None where values are stored beside the keys.
    """

    layer: int
    kv_heads: int
    head_dim: int
    dtype: str
    offset: int
    nbytes: int
    window: int | None = None
    latent: int | None = None


@dataclass(frozen=True)
class StateLayer:
    """One recurrence's share of a state slot on one rank: what a sequence carries from step to step.

    `layer` is the layer that it belongs to (None outside the numbered ones), `kind` its operator, `shape` that of the
    state. Offsets and sizes in bytes, within one slot; kernels may store more than the shape has elements.
    """

    layer: int | None
    kind: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RankProgram:
    """One rank's code and data: section names, arena size, KV bytes per block, the vocabulary columns it computes.

    A model without attention has no KV layers, one without recurrences no state layers, and 0 bytes of them.
    """

    rank: int
    code: str
    weights: str
    graph: str
    weights_bytes: int
    arena_bytes: int
    kv_block_bytes: int
    kv_layers: tuple[KVLayer, ...]
    vocab_start: int
    vocab_size: int
    launches: int  # kernel launches of one step
    launches_per_layer: float
    state_slot_bytes: int = 0  # of one sequence
    state_layers: tuple[StateLayer, ...] = ()


@dataclass(frozen=True)
class PassReport:
    """What a pass did: matches found and expected (None: any number will do), nodes before and after, notes."""

    name: str
    matched: int
    expected: int | None
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildInfo:
    """The build that wrote the plan. No times and no paths: the same inputs give the same bytes."""

    compiler: str  # "llmc 0.1.0"
    toolchain: str  # first line of g++ --version
    flags: tuple[str, ...]
    precision: str  # "fp32" | "bf16" | "fp8" | "int8" | "int4"
    kv_dtype: str
    tp: int
    config: dict[str, object] = field(default_factory=dict)  # the resolved build options
    libraries: dict[str, str] = field(default_factory=dict)
    passes: tuple[PassReport, ...] = ()
    launches_eager: int = 0  # nodes of the traced graph that an eager runner would launch, per step
    launches_eager_per_layer: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """All of manifest.json."""

    format: int
    checkpoint: CheckpointPin
    target: Target
    model: ModelInfo
    profile: ShapeProfile
    build: BuildInfo
    ranks: tuple[RankProgram, ...]
    shared_weights: str
    shared_bytes: int
    comm_bytes: int  # memory that ranks share for all-reduce and barriers
    abi: int
    sections: tuple[Section, ...]

    @property
    def kv_block_bytes(self) -> int:
        """One block of the KV pool, over all ranks."""
        return sum(rank.kv_block_bytes for rank in self.ranks)

    @property
    def state_slot_bytes(self) -> int:
        """One sequence's recurrent state, over all ranks. Where it is not 0 a prefix cannot be reused: its blocks hold
        keys and values, and nothing holds the state that a sequence had behind it.
        """
        return sum(rank.state_slot_bytes for rank in self.ranks)

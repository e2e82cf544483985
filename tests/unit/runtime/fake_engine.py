"""A plan whose code is `fake_engine.cpp`, the same model in Python, and a client that speaks with a real core."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from llmc.artifacts.plan import PlanWriter
from llmc.artifacts.schema import (
    FORMAT_VERSION,
    BuildInfo,
    CheckpointPin,
    KVLayer,
    Manifest,
    ModelInfo,
    RankProgram,
    ShapeProfile,
    Target,
    TokenRange,
)
from llmc.plugins.all_reduce.cpu import comm_bytes
from llmc.runtime.channel import Channel
from llmc.runtime.messages import (
    Abort,
    Alive,
    Fatal,
    FromCore,
    Handling,
    Output,
    Ready,
    SamplingParams,
    Shutdown,
    Stats,
    Submit,
)
from llmc.runtime.options import CoreOptions
from tests.unit.runtime.stopwatch import Stopwatch, standing_still

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("fake_engine.cpp")
VOCAB, EOS, NAN_TOKEN, SALT = 50, 49, 48, 4711
BLOCK_SIZE = 4
CORE = ("-m", "llmc.runtime.core_main")


@functools.cache
def engine_code() -> bytes:
    """The compiled fake engine."""
    flags = ["-std=c++20", "-O1", "-march=x86-64-v3", "-ffp-contract=off", "-fPIC", "-shared"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "engine.so"
        subprocess.run(["g++", *flags, f"-I{ROOT}", str(SOURCE), "-o", str(out)], check=True)
        return out.read_bytes()


def write_engine_plan(
    path: Path,
    *,
    tp: int = 1,
    max_seq_len: int = 96,
    max_num_seqs: int = 8,
    max_tokens: int = 32,
    step_us: int = 0,
    block_size_in_code: int = BLOCK_SIZE,
    hang_token: int = -1,
) -> Path:
    """A plan of `tp` ranks; every step lasts `step_us` at least. One that holds `hang_token` lasts until there is a
    file where the environment variable FAKE_GATE says: for ever without one.
    """
    bounds = [VOCAB * rank // tp for rank in range(tp + 1)]
    with PlanWriter(path) as writer:
        ranks = []
        for rank in range(tp):
            start, size = bounds[rank], bounds[rank + 1] - bounds[rank]
            numbers = (NAN_TOKEN, step_us, start, size, VOCAB, block_size_in_code, max_tokens, hang_token)
            writer.add(f"code/rank{rank}.so", engine_code())
            writer.add(f"weights/rank{rank}.bin", struct.pack("<8i", *numbers))
            layer = KVLayer(0, 1, 1, "i32", 0, BLOCK_SIZE * 8)
            names = (f"code/rank{rank}.so", f"weights/rank{rank}.bin", f"graph/rank{rank}.ir")
            ranks.append(RankProgram(rank, *names, 32, 64, BLOCK_SIZE * 8, (layer,), start, size, 1, 1.0))
        writer.add("weights/shared.bin", struct.pack("<i", SALT))
        writer.seal(
            Manifest(
                FORMAT_VERSION,
                CheckpointPin("c" * 64, "huggingface", ()),
                Target("cpu", "x86-64-v3"),
                ModelInfo("fake", "fake", "Fake", 0, VOCAB, max_seq_len, (EOS,), None, False),
                ShapeProfile("test", (TokenRange(1, 8, max_tokens),), max_num_seqs, max_seq_len, BLOCK_SIZE),
                BuildInfo("llmc test", "g++", (), "fp32", "f32", tp),
                tuple(ranks),
                "weights/shared.bin",
                4,
                comm_bytes(1, 16, tp),
                1,
                (),
            )
        )
        return writer.publish()


def next_token(tokens: list[int]) -> int:
    """The model's greedy choice."""
    state = SALT
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    logits = [-1 if v == NAN_TOKEN else state * (v + 7) % 1009 for v in range(VOCAB)]
    return logits.index(max(logits))


def greedy(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens after a prompt, end tokens ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Client:
    """A front end in miniature: starts `core_main` and collects what it says. Use it in a `with`. `gate`: FAKE_GATE."""

    def __init__(self, plan: Path, *, program: Seq[str] = CORE, gate: Path | None = None, **options: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            text = msgspec.json.encode(CoreOptions(**options)).decode()  # type: ignore[arg-type]
            self.process = subprocess.Popen(
                [sys.executable, "-P", *program, str(plan), str(theirs.fileno()), text],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stderr=subprocess.PIPE,
                env={**os.environ, **({} if gate is None else {"FAKE_GATE": str(gate)})},
            )
        self.channel: Channel[FromCore] = Channel(ours, FromCore)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Output] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.stats: list[Stats] = []
        self.ready: Ready | None = None
        self.fatal: Fatal | None = None
        self.beats = 0

    def __enter__(self) -> Client:
        self.wait(lambda: self.ready is not None or self.fatal is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        try:
            self.exit_code()
        finally:
            self.process.kill()
            self.process.communicate()

    def submit(self, name: str, prompt: list[int], handling: Handling = Handling(), **params: object) -> None:  # noqa: B008
        """Sends a request; greedy unless told otherwise."""
        self.tokens[name], self.outputs[name] = [], []
        sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
        self.channel.send(Submit(name, prompt, sampling, handling))

    def abort(self, name: str) -> None:
        self.channel.send(Abort(name))

    def shut_down(self, drain: bool = True) -> None:
        self.channel.send(Shutdown(drain))

    def wait(self, done: Callable[[], object], seconds: float = 30.0) -> None:
        """Reads messages until `done()`. Raises ChannelClosed if the core goes first, TimeoutError after `seconds`."""
        watch = Stopwatch()
        while not done():
            late = watch.seconds() > seconds
            messages = self.channel.receive(0.1)
            if late and not messages:
                raise TimeoutError(f"nothing for {seconds} s; ended: {sorted(self.ended)}")
            for message in messages:
                self._take(message)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """The core stands still meanwhile: what is submitted within it takes in at once, before its next step."""
        return standing_still(self.process.pid)

    def exit_code(self) -> int:
        """Waits for the core's end."""
        if not Stopwatch().wait(lambda: self.process.poll() is not None, 10):
            raise TimeoutError("the core does not end")
        return self.process.returncode

    def idle(self) -> bool:
        """Whether the core has worked, and says that it rests."""
        return bool(self.stats) and self.stats[-1].steps > 0 and self.stats[-1].running == self.stats[-1].waiting == 0

    def wait_all(self) -> None:
        """Until every request has ended."""
        self.wait(lambda: self.ended.keys() == self.tokens.keys())

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Output):
            assert message.request_id not in self.ended, "a request ended twice, or went on after its end"
            self.tokens[message.request_id] += message.tokens
            self.outputs[message.request_id].append(message)
            if message.finish_reason is not None:
                self.ended[message.request_id] = message
        elif isinstance(message, Stats):
            self.stats.append(message)
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Alive):
            self.beats += 1
        else:
            self.fatal = message

    def rank_pids(self) -> list[int]:
        """The processes of the ranks, in their order."""
        return children(self.process.pid)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.rank_pids()[rank], number)


def children(pid: int) -> list[int]:
    """The child processes of a process, oldest first."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(int(word) for word in text.split())


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it goes while its state is read
        return False


def shared_memory() -> set[str]:
    """Names of files that stand in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What has come there since `before`, is no living process's and stays: tests in other processes may have files
    there, which they have not mapped yet, or are about to remove.
    """
    Stopwatch().wait(lambda: not _nobodys(before), 5)
    return _nobodys(before)


def _nobodys(before: set[str]) -> set[str]:
    come = shared_memory() - before
    for maps in Path("/proc").glob("[0-9]*/maps") if come else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            text = maps.read_text()
            come = {name for name in come if f"/dev/shm/{name}" not in text}
    return come & shared_memory()


def wait_until(done: Callable[[], bool]) -> None:
    assert Stopwatch().wait(done, 10)

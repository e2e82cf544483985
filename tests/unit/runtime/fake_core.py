"""A core that computes nothing: it answers a prompt with the prompt itself, over and over. For tests of the protocol.

`python fake_core.py PLAN FD OPTIONS`, as the real one. FAKE_STEP_SECONDS slows its steps down; with FAKE_GATE no
sequence gains more than one token before that file is there, and with FAKE_LOAD_GATE it loads until that is there;
FAKE_LOAD_ERROR makes it fail to load; a prompt that starts with token HANG makes it hang, with DIE report a
fatal error, with REFUSE end that request with an error; unless FAKE_HARMLESS is set.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time

import msgspec

from llmc.artifacts.plan import Plan
from llmc.runtime.messages import (
    Abort,
    Alive,
    Fatal,
    Logprob,
    Output,
    Ready,
    Shutdown,
    Stats,
    Submit,
    ToCore,
    TokenLogprobs,
)

HANG, DIE, REFUSE = (-1, -1, -1) if "FAKE_HARMLESS" in os.environ else (3, 4, 5)


class FakeCore:
    def __init__(self, plan: Plan, sock: socket.socket) -> None:
        self.plan = plan
        self.sock = sock
        self.buffer = bytearray()
        self.decoder = msgspec.msgpack.Decoder(ToCore)
        self.running: dict[str, tuple[Submit, int]] = {}
        self.steps = self.prompt_tokens = self.generated = 0
        self.step_seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
        self.gate = os.environ.get("FAKE_GATE")

    def send(self, *messages: object) -> None:
        frames = [msgspec.msgpack.encode(m) for m in messages]
        self.sock.sendall(b"".join(len(f).to_bytes(4, "little") + f for f in frames))

    def receive(self, block: bool) -> list[ToCore]:
        while block or select.select([self.sock], [], [], 0)[0]:
            while not select.select([self.sock], [], [], 1)[0]:
                self.send(Alive())
            data = self.sock.recv(1 << 20)
            if not data:
                sys.exit(0)
            self.buffer += data
            block = False
        found = []
        while len(self.buffer) >= 4 and len(self.buffer) >= (end := 4 + int.from_bytes(self.buffer[:4], "little")):
            found.append(self.decoder.decode(self.buffer[4:end]))
            del self.buffer[:end]
        return found

    def run(self) -> None:
        while (gate := os.environ.get("FAKE_LOAD_GATE")) and not os.path.exists(gate):
            time.sleep(0.01)
        if error := os.environ.get("FAKE_LOAD_ERROR"):
            self.send(Fatal(error))
            sys.exit(2)
        profile = self.plan.manifest.profile
        self.send(Ready(64, profile.max_num_seqs, profile.max_num_batched_tokens, 0.01))
        while True:
            for message in self.receive(block=not self.running):
                self.take(message)
            self.step()

    def take(self, message: ToCore) -> None:
        if isinstance(message, Submit):
            if message.prompt[0] == DIE:
                self.send(Fatal("rank 1 died"))
                sys.exit(1)
            if message.prompt[0] == REFUSE:
                self.send(Output(message.request_id, [], finish_reason="error", error="refused"))
                return
            self.running[message.request_id] = (message, 0)
            self.prompt_tokens += len(message.prompt)
        elif isinstance(message, Abort):
            if self.running.pop(message.request_id, None):
                self.send(Output(message.request_id, [], finish_reason=message.finish_reason))
        elif isinstance(message, Shutdown):
            sys.exit(0)

    def step(self) -> None:
        if any(s.prompt[0] == HANG for s, _ in self.running.values()):
            time.sleep(1000)
        time.sleep(self.step_seconds)
        closed = self.gate is not None and not os.path.exists(self.gate)
        if closed:
            time.sleep(0.02)
        outputs = [self.advance(s, done) for s, done in list(self.running.values()) if not (closed and done)]
        self.steps += bool(outputs)
        n = len(self.running)
        counts = (n, 0, n, 64, self.steps, self.prompt_tokens, self.generated, self.prompt_tokens, 0, 0, 0.0)
        self.send(*outputs, Stats(*counts))

    def advance(self, submit: Submit, done: int) -> Output:
        p = submit.params
        token = submit.prompt[done % len(submit.prompt)]
        done += 1
        self.generated += 1
        self.running[submit.request_id] = (submit, done)
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(self.plan.manifest.model.eos_token_ids))
        if token in stops and done > p.min_tokens:
            del self.running[submit.request_id]
            return Output(submit.request_id, [], [] if p.logprobs is not None else None, "stop", token)
        finished = done == p.max_tokens
        if finished:
            del self.running[submit.request_id]
        logprobs = None
        if p.logprobs is not None:
            top = [Logprob(token + i, -0.5 - i) for i in range(p.logprobs)]
            logprobs = [TokenLogprobs(-0.5, 1, top)]
        return Output(submit.request_id, [token], logprobs, "length" if finished else None)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the server even while it hangs
    FakeCore(Plan.open(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).run()

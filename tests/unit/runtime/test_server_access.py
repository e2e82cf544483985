"""Who may ask, for how much, over which connection, and what the log says of it."""

import json
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmc.artifacts.errors import UsageError
from llmc.runtime.server.access import ApiKeys, read_keys
from llmc.runtime.server.protocol import ChatRequest
from tests.unit.runtime.fake_engine import write_engine_plan
from tests.unit.runtime.servers import LONG, Server, fake_server, real_server
from tests.unit.runtime.test_server_core import with_tokenizer

BODY = {"prompt": "one two", "max_tokens": 2}
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def guarded(fake_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("from-file\n\n")
    arguments = ("--api-key", "first", "--api-key-file", str(file), "--allowed-origins", PAGE)
    with fake_server(fake_plan, *arguments) as running:
        yield running


def ask(server: Server, **headers: str) -> httpx.Response:
    return server.http.post("/v1/completions", json=BODY, headers=headers)


@pytest.mark.parametrize("key", ["first", "from-file"])
def test_each_key_is_good(guarded: Server, key: str) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model="fake", prompt="one", max_tokens=1).choices


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic first", "first", "Bearer first2", "Bearer é"]
)
def test_without_a_key_there_is_no_answer(guarded: Server, header: str | None) -> None:
    headers: Any = {} if header is None else {"Authorization": header.encode("latin-1")}
    response = guarded.http.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/models", 401), ("/version", 401), ("/nowhere", 401)],
)
def test_probes_and_metrics_need_none(guarded: Server, path: str, status: int) -> None:
    assert guarded.status(path) == status


def test_keys_come_from_the_environment_too(fake_plan: Path) -> None:
    with fake_server(fake_plan, LLMC_API_KEY="one two") as server:
        assert ask(server).status_code == 401
        assert ask(server, Authorization="Bearer two").status_code == 200
        command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"one two" not in command


def test_a_key_has_the_same_scope_each_time_and_no_other_has() -> None:
    keys = ApiKeys(["a", "b"])
    first, second = keys.scope_of("Bearer a"), keys.scope_of("bearer b")
    assert first is not None
    assert first == keys.scope_of("Bearer a") != second
    assert "a" not in {first, second}


@pytest.mark.parametrize(("keys", "text"), [(["a b"], None), ([""], None), (["é"], None), ([], ""), ([], None)])
def test_keys_that_are_none(tmp_path: Path, keys: list[str], text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError):
        read_keys(keys, None if keys else file)


def test_only_pages_of_allowed_origins_may_read_answers(guarded: Server) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    response = guarded.http.options("/v1/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    response = guarded.http.options("/v1/completions", headers={**asked, "Origin": "https://evil.example"})
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    assert ask(guarded, Origin=PAGE, Authorization="Bearer first").headers["access-control-allow-origin"] == PAGE


def test_no_origin_is_allowed_by_default(server: Server) -> None:
    assert "access-control-allow-origin" not in ask(server, Origin=PAGE).headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject]
    subprocess.run([*made, "-days", "1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_https(fake_plan: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with fake_server(fake_plan, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), ready=False) as server:
        server.url = server.url.replace("http:", "https:")
        server.http = httpx.Client(
            base_url=server.url, verify=ssl.create_default_context(cafile=str(cert)), timeout=LONG
        )
        server.wait_ready()
        assert ask(server).json()["usage"]["completion_tokens"] == 2
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https:", "http:") + "/health")


def test_certificates_that_cannot_be_used(fake_plan: Path, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "bad.pem").write_text("no certificate")
    for arguments in (
        ["--ssl-certfile", str(tmp_path / "none.pem")],
        ["--ssl-certfile", str(tmp_path / "bad.pem"), "--ssl-keyfile", str(key)],
        ["--ssl-certfile", str(cert)],
        ["--ssl-keyfile", str(key)],
    ):
        with fake_server(fake_plan, *arguments, ready=False) as server:
            assert server.finish() == 2
            (line,) = server.log.splitlines()
            assert line.startswith("error: --ssl-")


def test_a_request_id_is_given_back(server: Server) -> None:
    assert ask(server, **{"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {ask(server).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
    assert server.http.get("/nowhere", headers={"X-Request-Id": "x y"}).headers["x-request-id"] != "x y"


def test_the_log_is_lines_of_json(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--log-format", "json") as server:
        ask(server, **{"X-Request-Id": "mine-1"})
        with server.client.completions.create(model="fake", stream=True, prompt="one", max_tokens=3) as stream:
            list(stream)
        server.http.post("/v1/completions", json={"prompt": 5})
        server.http.get("/v1/%0Amodels")
        server.process.terminate()
        server.finish()
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {"time", "level", "logger"} <= set.intersection(*map(set, lines))
    whole, stream_line, bad, odd = (line for line in lines if line["logger"] == "llmc.requests")
    assert whole["request_id"] == "mine-1"
    assert (whole["status"], whole["prompt_tokens"], whole["completion_tokens"]) == (200, 2, 2)
    assert whole["finish_reasons"] == ["length"]
    assert stream_line["completion_tokens"] == 3
    assert (bad["status"], bad["path"]) == (400, "/v1/completions")
    assert odd["status"] == 404
    assert "one two" not in server.log


def test_the_log_can_be_without_requests(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--no-log-requests") as server:
        ask(server)
        server.process.terminate()
        server.finish()
        assert "llmc.requests" not in server.log


def test_a_log_that_nobody_reads_holds_nothing_up(fake_plan: Path) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours), fake_server(fake_plan, stderr=theirs) as server:
        os.close(theirs)
        identity = "x" * 100
        for _ in range(600):  # more than the 64 KiB that a pipe holds
            assert ask(server, **{"X-Request-Id": identity}).status_code == 200
        server.process.terminate()
        assert server.finish() == 0


def test_a_limit_on_bodies(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--max-body-bytes", "100") as server:
        assert ask(server).status_code == 200
        response = server.http.post("/v1/completions", json={"prompt": "x" * 100})
        assert response.status_code == 413
        assert "100 bytes" in response.json()["error"]["message"]
        assert server.metric("admission_rejections_total") == 1


EIGHT_MB = 8 * 2**20 - 100
LARGE = {
    "token ids": b'{"prompt":[' + b"7," * (EIGHT_MB // 2) + b"7]}",
    "texts": b'{"prompt":[' + b'"",' * (EIGHT_MB // 3) + b'""]}',
    "mixed": b'{"prompt":[' + b"7," * (EIGHT_MB // 2) + b'"x"]}',
    "messages": b'{"messages":[' + b"7," * (EIGHT_MB // 2) + b"7]}",
    "parts": b'{"messages":[{"role":"user","content":[' + b"7," * (EIGHT_MB // 2) + b"7]}]}",
    "stop": b'{"prompt":"x","stop":[' + b"7," * (EIGHT_MB // 2) + b"7]}",
    "logit_bias": b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(EIGHT_MB // 12)) + b"}}",
}


@pytest.mark.parametrize("body", LARGE)
def test_a_large_body_takes_bounded_memory(server: Server, body: str) -> None:
    path = "/v1/chat/completions" if body in ("messages", "parts") else "/v1/completions"
    status = Path(f"/proc/{server.process.pid}/status")
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak counts from here
    response = server.http.post(path, content=LARGE[body], headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert len(response.text) < 500
    peak = int(re.search(r"VmHWM:\s+(\d+)", status.read_text()).group(1)) * 1024  # type: ignore[union-attr]
    assert peak < 330e6, f"{peak / 1e6:.0f} MB at the peak"


@pytest.mark.parametrize("body", ['{"prompt":"a","prompt":"b"}', '{"prompt":"a","logit_bias":{"1":1,"1":2}}'])
def test_names_given_twice_are_refused(server: Server, body: str) -> None:
    response = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "twice" in response.json()["error"]["message"]


def test_lists_are_bounded(server: Server) -> None:
    assert "messages" in ChatRequest.model_fields
    body = {"messages": [{"role": "user", "content": "x"}] * 20000}
    error = server.http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "too_long")
    assert "20000" in error["message"]


def test_keys_do_not_share_a_prefix_cache(tmp_path: Path) -> None:
    plan = with_tokenizer(write_engine_plan(tmp_path / "engine.plan"))
    with real_server(plan, "--api-key", "first", "--api-key", "second") as server:
        cached = []
        for key in ("first", "first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": list(range(20)), "max_tokens": 1}
            usage = server.http.post("/v1/completions", json=body, headers=headers).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 16, 0]

"""Engine and `llmc run`: the same answers without HTTP, and errors as one line."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmc.artifacts.errors import EnvironmentFault, UsageError
from llmc.cli import main
from llmc.runtime import core_process
from llmc.runtime.engine import Engine, Handling, SamplingParams
from llmc.runtime.params import RequestError
from tests.unit.runtime.fake_engine import greedy, write_engine_plan
from tests.unit.runtime.servers import FAKE_CORE, LONG
from tests.unit.runtime.test_server_core import with_tokenizer

COMMAND = (sys.executable, FAKE_CORE)


@pytest.fixture(scope="module")
def engine(fake_plan: Path) -> Iterator[Engine]:
    with Engine(fake_plan, core_command=COMMAND) as loaded:
        yield loaded


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "CORE_COMMAND", COMMAND)


def test_answers_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    prompts = ["one two", "The capital", [9, 10]]
    answers = engine.generate(prompts, SamplingParams(max_tokens=2))
    assert [a.text for a in answers[:2]] == ["one two"[: len(answers[0].text)], "The capital"[: len(answers[1].text)]]
    assert answers[2].token_ids == [9, 10]
    assert all(a.finish_reason == "length" for a in answers)
    assert answers[2].counts is not None
    assert (answers[2].counts.prompt_tokens, answers[2].counts.completion_tokens) == (2, 2)


def test_parameters_for_each_prompt(engine: Engine) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    assert [len(a.token_ids) for a in engine.generate(["one", "two"], params)] == [1, 3]
    with pytest.raises(UsageError, match="2 prompts and 1 SamplingParams"):
        engine.generate(["one", "two"], params[:1])


def test_a_single_prompt_need_not_be_a_list(engine: Engine) -> None:
    assert engine.generate("one", SamplingParams(max_tokens=1))[0].finish_reason == "length"
    assert engine.generate([9, 10], SamplingParams(max_tokens=2))[0].token_ids == [9, 10]


def test_without_parameters_the_plans_defaults_hold(engine: Engine) -> None:
    assert engine.text.params({}) == SamplingParams(temperature=0.7)
    (answer,) = engine.chat([{"role": "user", "content": "hello"}])
    assert (answer.text, answer.finish_reason) == ("user\nhello", "stop")


def test_several_chats(engine: Engine) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("hello", "one two")]
    assert [a.text for a in engine.chat(chats)] == ["user\nhello", "user\none two"]
    with pytest.raises(RequestError, match="messages is empty"):
        engine.chat([])


def test_a_stream_can_be_left(engine: Engine) -> None:
    stream = engine.stream("one two three", SamplingParams(max_tokens=400))
    assert next(stream).text
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate("one", SamplingParams(max_tokens=1))


def test_bad_requests_are_refused_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("one", SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="512"):
        engine.generate([9] * 600)
    with pytest.raises(EnvironmentFault, match="refused"):
        engine.generate("<|refuse|>")
    assert engine.generate("one", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_byte": 5}, "unknown field `kv_byte`; there are kv_bytes, num_blocks"),
        ({"threads": "two"}, "Expected `int"),
        ({"max_num_seqs": 0}, "max-num-seqs is 0"),
        ({"priority_weights": {"batch": 1.0}}, "it must give 'interactive'"),
    ],
)
def test_options_that_are_no_good(fake_plan: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Engine(fake_plan, core_command=COMMAND, **options)


def test_options_and_handling_are_the_servers(tmp_path: Path) -> None:
    plan = with_tokenizer(write_engine_plan(tmp_path / "fake.plan"))
    options = {"num_blocks": 40, "queue_timeout": 60.0, "kv_host_bytes": 4000, "itl_budget_ms": 5.0}
    greedily = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = [7] * 40
    with Engine(plan, **options, priority_weights={"interactive": 1, "night": 2}) as engine:
        for handling, cached in (
            (Handling(), 0),
            (Handling(priority="night"), 36),
            (Handling(cache_salt="x"), 0),
            (Handling(skip_reading_prefix_cache=True), 0),
        ):
            (answer,) = engine.generate(prompt, greedily, handling=handling)
            assert answer.token_ids == greedy(prompt, 2)
            assert answer.counts is not None
            assert answer.counts.cached_tokens == cached
        (streamed,) = {delta.counts.cached_tokens for delta in engine.stream(prompt, greedily) if delta.counts}
        assert streamed == 36
        with pytest.raises(RequestError, match="priority is 'batch'; it must be one of interactive, night"):
            engine.generate(prompt, greedily, handling=Handling(priority="batch"))


def test_the_cores_death_is_an_error_not_a_hang(fake_plan: Path) -> None:
    with Engine(fake_plan, core_command=COMMAND) as engine:
        with pytest.raises(EnvironmentFault, match="rank 1 died"):
            engine.generate(["one two", "<|die|>"], SamplingParams(max_tokens=400))
        with pytest.raises(EnvironmentFault, match="rank 1 died"):
            engine.generate("one")
    with pytest.raises(UsageError, match="closed"):
        engine.generate("one")


def test_a_core_that_cannot_load_says_why(fake_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOAD_ERROR", "--kv-bytes 5 holds no block")
    with pytest.raises(UsageError, match="--kv-bytes 5"):
        Engine(fake_plan, core_command=COMMAND)


def test_a_core_that_dies_while_loading(fake_plan: Path) -> None:
    with pytest.raises(EnvironmentFault, match="exited with code 7"):
        Engine(fake_plan, core_command=(sys.executable, "-c", "raise SystemExit(7)"))


@pytest.mark.usefixtures("fake_core")
def test_run_prints_the_answer_and_the_speed(fake_plan: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(fake_plan), "--prompt", "one two", "--max-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("one two")
    assert "loaded in" in result.stderr
    assert "8 tokens" in result.stderr
    assert "tokens/s" in result.stderr


@pytest.mark.usefixtures("fake_core")
def test_run_chats(fake_plan: Path) -> None:
    arguments = ["run", str(fake_plan), "--chat", "hello", "--system", "be brief", "--stop", "brief"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == "system\nbe \n"


@pytest.mark.usefixtures("fake_core")
def test_run_prints_json(fake_plan: Path) -> None:
    arguments = ["run", str(fake_plan), "--prompt", "one two", "--max-tokens", "3", "--logprobs", "1", "--json"]
    result = CliRunner().invoke(main, arguments)
    found = json.loads(result.stdout)
    assert (len(found["token_ids"]), len(found["logprobs"]), found["finish_reason"]) == (3, 3, "length")
    assert found["counts"]["completion_tokens"] == 3
    assert found["load_seconds"] > 0
    assert result.stderr == ""


@pytest.mark.usefixtures("fake_core")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "--prompt and --chat"),
        (["--prompt", "a", "--chat", "b"], 2, "--prompt and --chat"),
        (["--prompt", "a", "--system", "b"], 2, "--system"),
        (["--prompt", "a", "--temperature", "-1"], 2, "temperature is -1.0"),
        (["--prompt", "<|refuse|>"], 6, "refused"),
    ],
)
def test_errors_are_one_line(fake_plan: Path, arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(main, ["run", str(fake_plan), *arguments])
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_plan_that_is_missing(tmp_path: Path) -> None:
    for command in (["run", "--prompt", "x"], ["serve"]):
        result = CliRunner().invoke(main, [command[0], str(tmp_path / "none.plan"), *command[1:]])
        assert result.exit_code == 3
        assert "none.plan: no such file" in result.stderr


def test_ctrl_c_during_run(fake_plan: Path) -> None:
    code = (
        "import sys; from llmc.runtime import core_process; from llmc.cli import main; "
        f"core_process.CORE_COMMAND = {COMMAND!r}; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "run", str(fake_plan), "--prompt", "one two", "--max-tokens", "500"]
    env = {"FAKE_STEP_SECONDS": "0.05"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert log == b""

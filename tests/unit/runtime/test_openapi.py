"""The OpenAPI document is true: what schemathesis makes of it gets the answers that it promises, and never a 500."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.runtime.servers import Server, fake_server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def harmless(fake_plan: Path) -> Iterator[Server]:
    with fake_server(fake_plan, FAKE_HARMLESS="1") as running:
        yield running


OPERATIONS = {
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/health": "GET",
    "/ready": "GET",
    "/version": "GET",
    "/metrics": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
}
CASES = [
    *((path, GenerationMode.POSITIVE) for path in OPERATIONS),
    *((path, GenerationMode.NEGATIVE) for path, method in OPERATIONS.items() if method == "POST"),
]


@pytest.mark.parametrize(("path", "mode"), CASES, ids=lambda value: str(getattr(value, "value", value)))
def test_every_answer_is_as_documented(harmless: Server, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{harmless.url}/openapi.json")
    operation = schema[path][OPERATIONS[path]]
    statuses = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=30).status_code)

    check()
    if mode is GenerationMode.NEGATIVE:
        assert 400 in statuses


def test_no_operation_is_left_out(harmless: Server) -> None:
    paths = harmless.http.get("/openapi.json").json()["paths"]
    assert {path: [method.upper() for method in found] for path, found in paths.items()} == {
        path: [method] for path, method in OPERATIONS.items()
    }


def test_the_document_names_the_real_errors(harmless: Server) -> None:
    document = harmless.http.get("/openapi.json").json()
    completions = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(completions) == {"200", "400", "404", "413", "429", "500", "503"}
    assert "422" not in str(document["paths"])
    assert {"Completion", "ChatCompletion", "ErrorResponse"} <= document["components"]["schemas"].keys()
    assert "security" not in document


def test_the_document_of_a_server_with_keys(fake_plan: Path) -> None:
    with fake_server(fake_plan, "--api-key", "k") as server:
        headers = {"Authorization": "Bearer k"}
        document = server.http.get("/openapi.json", headers=headers).json()
        assert document["security"] == [{"key": []}]
        paths = document["paths"]
        assert "401" in paths["/v1/models"]["get"]["responses"]
        assert "401" not in paths["/health"]["get"]["responses"]

"""Generated requests against a real server: no 5xx, every answer as /openapi.json tells it.

A short run of ``bench/fuzz.py`` (the long one is in bench/RESULTS.md), and what that takes for a
fault.
"""

from collections.abc import Iterator

import fuzz
import pytest
import requests
import schemathesis
from running_server import Server
from tiny import tiny_checkpoint
from urllib3 import HTTPResponse

FLAGS = [*fuzz.SHORT, *fuzz.QUIET, "--served-model-name", "smol"]
REQUESTS = 150
ERROR = b'{"error":{"message":"","type":"","param":null,"code":null}}'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    with Server(tiny_checkpoint(folder / "model", "llama"), folder / "log", FLAGS) as running:
        yield f"http://127.0.0.1:{running.port}"


def test_generated_requests_find_no_fault(url: str) -> None:
    findings = fuzz.run(url, REQUESTS, number=1)
    assert not findings.faults, "\n".join(findings.faults)
    assert findings.requests >= REQUESTS
    assert {200, 400} <= set(findings.statuses)
    generated = [route for route in findings.by_route if "completions 200" in route]
    assert len(generated) == 2, findings.by_route  # both endpoints made text


def answer(status: int, body: bytes, content_type: str = "application/json") -> requests.Response:
    response = requests.Response()
    response.status_code = status
    response._content = body
    response.headers["content-type"] = content_type
    response.raw = HTTPResponse(headers={"content-type": content_type}, status=status)
    response.request = requests.Request("POST", "http://127.0.0.1/tokenize").prepare()
    return response


@pytest.mark.parametrize(
    ("status", "body", "content_type", "fault"),
    [
        (200, b'{"count":0,"max_model_len":9,"tokens":[],"token_strs":null}', "", None),
        (200, b'{"count":"0"}', "", "JsonSchemaError"),
        (
            418,
            b'{"error":{"message":"","type":"","param":null,"code":null}}',
            "",
            "UndefinedStatusCode",
        ),
        (400, b'{"detail":"no"}', "", "JsonSchemaError"),
        (400, b"no", "text/plain", "UndefinedContentType"),
        (500, b"{}", "", "status 500"),
        (200, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "text/event-stream", None),
        (200, b'data: {"error":{}}\n\n', "text/event-stream", None),
        (200, b'data: {"choices":[]}\n\n', "text/event-stream", "the stream ends"),
    ],
)
def test_what_is_a_fault(
    url: str, status: int, body: bytes, content_type: str, fault: str | None
) -> None:
    document = requests.get(f"{url}/openapi.json", timeout=10).json()
    case = schemathesis.openapi.from_dict(document)["/tokenize"]["POST"].Case(body={"prompt": "x"})
    found = fuzz.faults(case, answer(status, body, content_type or "application/json"))
    if fault is None:
        assert not found
    else:
        assert fault.lower() in " ".join(found).lower(), found

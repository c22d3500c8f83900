"""Requests that schemathesis draws from /openapi.json: none ends in a 5xx, the server serves on.

    python bench/fuzz.py MODEL_OR_URL [--requests 2000] [--seed 1] [--json] [-- SERVE FLAGS]

A model starts ``zlm serve`` with a short context; a URL takes what runs there. Most requests are
to the endpoints of the model's kind, text or vectors. Half of the requests
fit the schema, half break it somewhere. Of each answer these are held against the document: the
status is one it names and below 500 (or 504, if the request itself sets a time), the media type
and the body are as it says, an error has the OpenAI form, a stream ends with ``[DONE]`` or an
error. Afterwards /health answers 200, a good request is served, and nothing runs or waits.

Prints what was found, and as the last line one JSON document. Exits 1 if anything was.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks
from tree import Server, split_flags

DEADLINE = 504  # the request's own ``timeout``, which may be drawn as short as any number
SHORT = ["--max-model-len", "128", "--clamp-max-tokens", "--dtype", "float32"]
QUIET = ["--disable-log-requests"]
TEXT, VECTORS = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
)
WEIGHTS = {  # what the server is good at → tag → share of the requests
    TEXT[0]: {"Text": 8, "Tokens": 4, "Vectors and scores": 1},
    VECTORS[0]: {"Text": 1, "Tokens": 1, "Vectors and scores": 4},
}
SECONDS = 60.0  # a request may take
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@dataclass
class Findings:
    """What came of a run."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    by_route: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def strategies(
    document: dict[str, Any], weights: dict[str, int]
) -> list[st.SearchStrategy[schemathesis.Case]]:
    """Return a source of requests for each operation and kind of request, repeated by weight."""
    found = []
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        if operation.method != "post":
            found.append(operation.as_strategy(GenerationMode.POSITIVE))
        else:
            weight = weights[operation.tags[0]]
            found += [operation.as_strategy(GenerationMode.POSITIVE)] * weight
            found += [operation.as_strategy(GenerationMode.NEGATIVE)] * weight
    return found


def run(url: str, count: int, number: int, session: requests.Session | None = None) -> Findings:
    """Send *count* requests drawn with the seed *number* to the server at *url*."""
    session = session or requests.Session()
    document = session.get(f"{url}/openapi.json", timeout=SECONDS).json()
    path, good = served(url, session)
    sources = strategies(document, WEIGHTS[path])
    findings = Findings()
    began = time.monotonic()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.sampled_from(sources).flatmap(lambda strategy: strategy))
    def each(case: schemathesis.Case) -> None:
        findings.requests += 1
        shown = f"{case.method} {case.path} {clipped(case.body)}"
        try:
            # Not case.call, which leaves a stream after some events.
            request = case.as_transport_kwargs(base_url=url)
            response = session.request(**request, timeout=SECONDS)
        except requests.RequestException as error:
            findings.faults.append(f"{shown}: {error!r}")
            return
        findings.statuses[response.status_code] += 1
        findings.by_route[f"{case.method} {case.path} {response.status_code}"] += 1
        findings.faults += [f"{shown}: {fault}" for fault in faults(case, response)]

    each()
    findings.faults += after(url, session, path, good)
    findings.seconds = time.monotonic() - began
    return findings


def faults(case: schemathesis.Case, response: requests.Response) -> list[str]:
    """Return what is wrong with an answer."""
    found = []
    if response.status_code >= 500 and response.status_code != DEADLINE:
        found.append(f"status {response.status_code}: {clipped(response.text)}")
    content_type = response.headers.get("content-type", "")
    if content_type.startswith("text/event-stream"):
        events = response.text.strip().split("\n\n")
        if events[-1] != "data: [DONE]" and '"error"' not in events[-1]:
            found.append(f"the stream ends with {clipped(events[-1])}")
        return found
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as group:
        found += [clipped(failure) for failure in group.exceptions]
    return found


def served(url: str, session: requests.Session) -> tuple[str, dict[str, Any]]:
    """Return the endpoint that the model is made for, and a good request to it."""
    for path, good in (TEXT, VECTORS):
        if session.post(url + path, json=good, timeout=SECONDS).status_code == 200:
            return path, good
    raise SystemExit("the server makes neither text nor vectors")


def after(url: str, session: requests.Session, served: str, good: dict[str, Any]) -> list[str]:
    """Return what shows that the server does not serve on."""
    found = []
    for method, path, body in (("GET", "/health", None), ("POST", served, good)):
        response = session.request(method, url + path, json=body, timeout=SECONDS)
        if response.status_code != 200:
            found.append(f"afterwards, {path}: {response.status_code} {clipped(response.text)}")
    deadline = time.monotonic() + SECONDS
    while (busy := gauges(session.get(f"{url}/metrics", timeout=SECONDS).text)) != 0:
        if time.monotonic() > deadline:
            found.append(f"afterwards, {busy:.0f} sequences still run or wait")
            break
        time.sleep(0.1)
    return found


def gauges(text: str) -> float:
    """Return how many sequences run or wait by *text*, that of /metrics."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = [line for line in text.splitlines() if line.startswith(names)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def clipped(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 600 else text[:600] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="a model for zlm serve, or http://HOST:PORT")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the JSON document alone")
    words, flags = split_flags(sys.argv[1:])
    options = parser.parse_args(words)
    server = None
    if "://" not in options.target:
        server = Server(options.target, [*SHORT, *QUIET, *flags])
    url = options.target.rstrip("/") if server is None else server.url
    try:
        findings = run(url, options.requests, options.seed)
    finally:
        if server is not None:
            server.stop()
    if not options.json:
        for fault in findings.faults:
            print(fault)
        for route, number in sorted(findings.by_route.items()):
            print(f"{number:>6}  {route}")
    summary = {
        "requests": findings.requests,
        "statuses": {str(status): n for status, n in sorted(findings.statuses.items())},
        "faults": len(findings.faults),
        "seconds": round(findings.seconds, 1),
    }
    print(json.dumps(summary))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()

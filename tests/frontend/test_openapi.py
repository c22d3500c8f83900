"""GET /openapi.json and /docs: valid, complete, and true of what the server does."""

import re
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate

from zlm.frontend.admin import abort_decoder
from zlm.frontend.endpoints import ABSENT
from zlm.frontend.openai import (
    answer_types,
    chat,
    classify,
    completions,
    embeddings,
    scoring,
    tokenize,
)
from zlm.frontend.openai.field_docs import DESCRIPTIONS, limits_of
from zlm.frontend.openai.operations import OPERATIONS
from zlm.frontend.openai.operations_admin import ADMIN
from zlm.messages import Deltas, Pooled, TokenLogprob, ToolCallDelta
from zlm.sampling_params import SamplingLimits

DECODERS = {
    "/v1/completions": completions.decoder,
    "/v1/chat/completions": chat.decoder,
    "/tokenize": tokenize.tokenize_decoder,
    "/detokenize": tokenize.detokenize_decoder,
}
POOLING = {
    "/v1/embeddings": embeddings.decoder,
    "/pooling": embeddings.pooling_decoder,
    "/classify": classify.decoder,
    **dict.fromkeys(("/score", "/v1/score"), scoring.score_decoder),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), scoring.rerank_decoder),
}
WITH_BODY = [operation for operation in OPERATIONS if operation.request is not None]
ENTRY = TokenLogprob(7, "a", b"a", -0.5, [(7, "a", b"a", -0.5), (9, "b", b"b", -1.5)], 1)
RICH: dict[str, Any] = {
    "logprobs": [ENTRY],
    "token_ids": [7],
    "prompt_token_ids": [1, 2],
    "prompt_logprobs": [TokenLogprob(1, "p", b"p", None), ENTRY],
}


def conforms(value: Any, kind: Any) -> None:
    """Check that *value* is a *kind*, with no key that the type does not know."""
    assert msgspec.to_builtins(msgspec.convert(value, kind)) == value


@pytest.fixture
def document(house) -> Any:
    response = house.ask("GET", "/openapi.json")
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    return response.json()


def fields_of(document: Any, path: str) -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]["properties"]


def test_the_document_is_valid_openapi(document):
    assert document["openapi"].startswith("3.1")
    validate(document)


def test_every_route_is_told_and_no_other(house, document):
    routes = {
        (route.path + "{model}" if route.below else route.path): set(route.methods)
        for route in house.server.endpoints.routes(open_metrics=False)
        if route.path not in ABSENT
    }
    told = {path: {method.upper() for method in at} for path, at in document["paths"].items()}
    assert told == routes


def test_administration_is_told_where_there_are_administrators(make_house):
    house = make_house(admin_api_keys=("boss",))
    document = house.ask("GET", "/openapi.json").json()
    validate(document)
    told = {
        path: {method.upper() for method in at}
        for path, at in document["paths"].items()
        if any(operation["tags"] == ["Administration"] for operation in at.values())
    }
    assert told == {route.path: set(route.methods) for route in house.server.admin.routes()}
    for path in told:
        for operation in document["paths"][path].values():
            assert operation["security"] and {"401", "403"} <= set(operation["responses"])


def test_examples_of_administration_are_good():
    (operation,) = [operation for operation in ADMIN if operation.request is not None]
    for example in operation.examples.values():
        abort_decoder.decode(msgspec.json.encode(example), "reject")


def test_every_reference_is_there(document):
    text = msgspec.json.encode(document).decode()
    for reference in set(re.findall(r'"\$ref":"#/([^"]*)"', text)):
        at = document
        for name in reference.split("/"):
            at = at[name]


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.path)
def test_examples_of_requests_are_good(house, operation):
    assert operation.examples
    for example in operation.examples.values():
        if operation.path in POOLING:
            POOLING[operation.path].decode(msgspec.json.encode(example), "reject")
        else:
            assert house.post(operation.path, example).status == 200


def test_errors_are_of_the_type_told(house):
    conforms(house.ask("GET", "/nowhere").json(), answer_types.ErrorBody)


@pytest.mark.parametrize("path", [*DECODERS, *POOLING])
def test_fields_are_those_of_the_type(document, path):
    known = (DECODERS | POOLING)[path]._fields
    hidden = {name for name in known if name.startswith("guided_")}
    assert set(fields_of(document, path)) == set(known) - hidden


def test_what_is_said_of_fields_is_of_fields_that_exist(document):
    known = {name for path in (*DECODERS, *POOLING) for name in fields_of(document, path)}
    assert set(limits_of(SamplingLimits())) <= known
    assert set(DESCRIPTIONS) <= known


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_limits_are_those_that_are_kept(house, document, path):
    """The value at a limit passes, the next one is refused by name."""
    ask = house.complete if path == "/v1/completions" else house.chat
    checked = 0
    for name, field in fields_of(document, path).items():
        for option in field.get("anyOf", [field]):
            for keyword, step in (("minimum", -1), ("maximum", 1)):
                if keyword not in option or name in ("max_tokens", "max_completion_tokens"):
                    continue
                beside = {"logprobs": True} if name == "top_logprobs" else {}
                beside |= {"n": option[keyword]} if name == "best_of" else {}
                if name == "min_tokens":
                    beside |= {"max_tokens": 2**31 - 1}
                assert ask(**{name: option[keyword]}, **beside).status == 200, name
                beyond = ask(**{name: option[keyword] + step}, **beside)
                house.refused(beyond, 400, name)
                checked += 1
    assert checked > 20


def test_unknown_fields(make_house):
    for unknown, allowed in (("reject", False), ("ignore", True)):
        house = make_house(unknown_fields=unknown)
        schemas = house.ask("GET", "/openapi.json").json()["components"]["schemas"]
        assert schemas["CompletionRequest"]["additionalProperties"] is allowed
        answer = house.complete(unknown_field=1)
        assert answer.status == (200 if allowed else 400)


def test_security(make_house):
    house = make_house(api_keys=("secret",))
    headers = {"Authorization": "Bearer secret"}
    document = house.ask("GET", "/openapi.json", headers=headers).json()
    assert "secret" not in str(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            status = house.ask(method.upper(), path, {} if method == "post" else None).status
            assert (status == 401) == bool(operation["security"]), path
            assert ("401" in operation["responses"]) == bool(operation["security"])
    open_house = make_house()
    paths = open_house.ask("GET", "/openapi.json").json()["paths"]
    assert not any(o["security"] for methods in paths.values() for o in methods.values())


def test_root_path(make_house):
    document = make_house(root_path="/api").ask("GET", "/api/openapi.json").json()
    assert document["servers"] == [{"url": "/api"}]


def test_the_page_needs_nothing_from_elsewhere(house):
    response = house.ask("GET", "/docs")
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/html")
    page = response.body.decode()
    assert "openapi.json" in page
    assert not re.search(r"https?://|\bsrc=|@import|url\(|<link", page)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"rich": True}], ids=str)
def test_answers_are_of_the_types_told(house, fields):
    rich = RICH if fields.pop("rich", False) else {}

    def enrich(command):
        for message in plain(command):
            items = [msgspec.structs.replace(item, **rich) for item in message.items]
            yield Deltas(items)

    plain, house.tokenizer = house.tokenizer, lambda command: list(enrich(command))
    usage = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"logprobs": 2} if rich else {}
    conforms(house.complete(**fields, **asked).json(), answer_types.Completion)
    chunks = house.complete(stream=True, stream_options=usage, **fields, **asked).chunks()
    for chunk in chunks + house.complete(stream=True, **fields).chunks():
        conforms(chunk, answer_types.Completion)
    asked = {"logprobs": True, "top_logprobs": 2} if rich else {}
    conforms(house.chat(**fields, **asked).json(), answer_types.ChatCompletion)
    chunks = house.chat(stream=True, stream_options=usage, **fields, **asked).chunks()
    for chunk in chunks + house.chat(stream=True, **fields).chunks():
        conforms(chunk, answer_types.ChatCompletionChunk)


def test_vectors_and_scores_are_of_the_types_told():
    vector = b"\x00\x00\x80?" * 2
    one, two = Pooled(1, [vector], [[1]]), Pooled(1, [vector, vector], [[1], [2]])
    for encoding in ("float", "base64"):
        request = embeddings.EmbeddingRequest(input="x", encoding_format=encoding)
        for raw, kind in ((False, answer_types.EmbeddingList), (True, answer_types.PooledList)):
            conforms(embeddings.EmbeddingForm(request, "m", raw=raw)(one), kind)
    pairs = scoring.Pairs(["a"], ["b"])
    form = scoring.ScoreForm(pairs, "m", is_cross_encoder=False)
    conforms(form(two), answer_types.ScoreList)
    for wanted in (True, False):
        request = scoring.RerankRequest(query="a", documents=["b"], return_documents=wanted)
        form = scoring.RerankForm(request, pairs, "m", is_cross_encoder=False)
        conforms(form(two), answer_types.Ranking)


def test_calls_and_thoughts_are_of_the_types_told(house):
    calls = [ToolCallDelta(0, "{", id="call-1", name="f"), ToolCallDelta(0, "}")]
    fields = {"reasoning": "so", "tool_calls": calls}

    def enrich(command):
        for message in plain(command):
            items = [msgspec.structs.replace(item, **fields) for item in message.items]
            yield Deltas(items)

    plain, house.tokenizer = house.tokenizer, lambda command: list(enrich(command))
    for chunk in house.chat(stream=True).chunks():
        conforms(chunk, answer_types.ChatCompletionChunk)
    calls.pop()
    whole = house.chat().json()
    conforms(whole, answer_types.ChatCompletion)
    assert whole["choices"][0]["message"]["tool_calls"]


def test_other_answers_are_of_the_types_told(house):
    conforms(house.ask("GET", "/v1/models").json(), answer_types.ModelList)
    conforms(house.ask("GET", "/v1/models/tiny").json(), answer_types.ModelCard)
    conforms(house.ask("GET", "/version").json(), answer_types.VersionAnswer)
    conforms(house.post("/tokenize", {"prompt": "x"}).json(), answer_types.TokenizeAnswer)
    conforms(house.post("/detokenize", {"tokens": [1]}).json(), answer_types.DetokenizeAnswer)

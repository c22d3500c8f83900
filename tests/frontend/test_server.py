"""Routes, keys, origins, health, draining, request ids, metrics, log, choice of tokenizer.

CASES 65, 92 and 93.
"""

import logging

import pytest

from zlm.config import ServerLimits
from zlm.errors import ZlmError
from zlm.messages import Delta, Deltas, Drain, Launch, ServerState

GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/ui/events"),
    ("GET", "/nowhere"),
    ("POST", "/v1/responses"),
]
OPEN = ["/health", "/health/live", "/health/ready", "/ping", "/version"]


# ------------------------------------------------------------------------------------ routes


@pytest.mark.parametrize("path", OPEN)
def test_probes(house, path):
    response = house.ask("GET", path)
    assert response.status == 200
    assert response.body == b"" or path == "/version"
    head = house.ask("HEAD", path)
    assert head.headers["content-length"] == response.headers["content-length"]


def test_version(house):
    from zlm import __version__

    assert house.ask("GET", "/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1", "/v1/models/", "/health/", "/%00", "/a%0ab", "/%ff"]
)
def test_unknown_path(house, path):
    house.refused(house.ask("GET", path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "OPTIONS, POST"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/chat/completions", "OPTIONS, POST"),
    ],
)
def test_wrong_method(house, method, path, allow):
    response = house.ask(method, path, b"{}" if method != "GET" else None)
    house.refused(response, 405)
    assert response.headers["allow"] == allow


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_endpoints_that_are_not_there_yet(house, path):
    message = house.refused(house.post(path, {"input": "x"}), 404)
    assert path in message and "/v1/chat/completions" in message


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_kinds_of_models_that_are_not_served_yet(house, path):
    message = house.refused(house.post(path, {"input": "x"}), 404)
    assert path in message and "not served yet" in message


def test_targets(house):
    assert house.ask("GET", "/health?x=1").status == 200
    assert house.ask("GET", "http://host:80/health").status == 200
    assert house.ask("GET", "/v1/%6dodels").status == 200


def test_root_path(make_house):
    house = make_house(root_path="/llm")
    for path in ("/llm/health", "/health", "/llm/v1/models/tiny", "/v1/models/tiny"):
        assert house.ask("GET", path).status == 200
    assert house.ask("GET", "/llmx/health").status == 404


def test_models(make_house):
    house = make_house(names=("A", "org/B"))
    listed = house.ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["A", "org/B"]
    card = listed["data"][1]
    assert card["object"] == "model" and card["owned_by"] == "zlm"
    assert card["root"] == "/models/tiny" and card["parent"] is None
    assert card["max_model_len"] == 256 and card["permission"]
    for path in ("/v1/models/org/B", "/v1/models/org%2FB"):
        assert house.ask("GET", path).json() == card
    response = house.ask("GET", "/v1/models/C")
    assert response.status == 404 and response.error["code"] == "model_not_found"


def test_tokenize(house):
    body = house.post("/tokenize", {"model": "tiny", "prompt": "ab"}).json()
    assert body == {"count": 2, "max_model_len": 256, "tokens": [7, 8], "token_strs": None}
    command = house.commands[-1]
    assert command.prompt == "ab" and command.add_special_tokens and command.chat is None
    body = house.post("/tokenize", {"prompt": "", "return_token_strs": True}).json()
    assert body["token_strs"] == ["a", "b"]
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    fields = {"add_generation_prompt": False, "chat_template_kwargs": {"k": 1}}
    assert house.post("/tokenize", {"messages": messages, **fields}).status == 200
    command = house.commands[-1]
    assert command.chat.messages == messages and not command.add_special_tokens
    assert not command.chat.add_generation_prompt and command.chat.template_kwargs == {"k": 1}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert house.post("/tokenize", {"messages": messages, "tools": tools}).status == 200
    assert house.commands[-1].chat.tools == tools
    house.refused(house.post("/tokenize", {"messages": messages, "tools": [{}]}), 400)


def test_bad_tokenize(house):
    house.refused(house.post("/tokenize", {}), 400, "prompt")
    house.refused(house.post("/tokenize", {"prompt": "x", "messages": []}), 400, "prompt")
    house.refused(house.post("/tokenize", {"messages": [{}]}), 400, "messages[0].role")
    house.refused(house.post("/tokenize", {"prompt": "x", "model": "other"}), 404, "model")
    house.refused(house.post("/tokenize", {"prompt": ["x"]}), 400, "prompt")


def test_detokenize(house):
    assert house.post("/detokenize", {"tokens": [1, 2]}).json() == {"prompt": "2 tokens"}
    for tokens in (None, "x", [1.5], ["1"], [True], [[1]]):
        house.refused(house.post("/detokenize", {"tokens": tokens}), 400, "tokens")


# -------------------------------------------------------------------------------------- keys


def _bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_what_the_key_covers(make_house, method, path):
    house = make_house(api_keys=("secret", "other"))
    body = {"prompt": "x"} if method == "POST" else None
    for headers in (
        {},
        _bearer("wrong"),
        _bearer(""),
        {"Authorization": "Bearer"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        _bearer("secret "[:-2]),
        _bearer("secret,other"),
    ):
        response = house.ask(method, path, body, {"Origin": "http://a", **headers})
        assert response.status == 401
        assert response.error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["access-control-allow-origin"] == "*"
    assert house.commands == []
    for scheme in ("Bearer secret", "bearer other", "BEARER  secret"):
        assert house.ask(method, path, body, {"Authorization": scheme}).status != 401


def test_open_routes_need_no_key(make_house):
    house = make_house(api_keys=("secret",))
    for path in OPEN:
        assert house.ask("GET", path).status == 200
    assert house.ask("OPTIONS", "/v1/completions").status == 204
    assert make_house(api_keys=("secret",), open_metrics=True).ask("GET", "/metrics").status == 200


def test_two_authorization_headers_open_nothing(make_house):
    house = make_house(api_keys=("secret",))
    client = house.client()
    client.send(
        b"GET /v1/models HTTP/1.1\r\nHost: z\r\n"
        b"Authorization: Bearer secret\r\nAuthorization: x\r\n\r\n"
    )
    assert client.responses()[0].status == 401


def test_key_is_never_logged(make_house, caplog):
    house = make_house(api_keys=("secret-key",))
    with caplog.at_level(logging.DEBUG):
        house.ask("GET", "/v1/models?key=secret-key", None, _bearer("secret-key"))
        house.ask("GET", "/v1/models", None, _bearer("secret-key2"))
    assert caplog.records and "secret-key" not in caplog.text


# -------------------------------------------------------------------------------------- CORS


def test_preflight(house):
    headers = {
        "Origin": "http://a",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    response = house.ask("OPTIONS", "/v1/chat/completions", None, headers)
    assert response.status == 204
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization, content-type"


def test_allowed_origins(make_house):
    house = make_house(allowed_origins=("http://a", "http://b"))
    for origin, allowed in [("http://a", True), ("http://b", True), ("http://c", False)]:
        for response in (
            house.ask("GET", "/version", None, {"Origin": origin}),
            house.ask("GET", "/nowhere", None, {"Origin": origin}),
            house.ask(
                "POST", "/v1/completions", {"prompt": "x", "stream": True}, {"Origin": origin}
            ),
        ):
            assert (response.headers.get("access-control-allow-origin") == origin) == allowed
            assert response.headers["vary"] == "origin"


# ------------------------------------------------------------------------------------- state


def test_before_and_while_loading(bare_house, make_house):
    for house in (bare_house, make_house(ready=False)):
        for path in ("/health", "/health/ready", "/ping"):
            response = house.ask("GET", path)
            assert response.status == 503
            assert response.error["message"] == "the model is loading"
            assert b"\n" not in response.body
            assert int(response.headers["retry-after"]) > 0
        assert house.ask("GET", "/health/live").status == 200
        assert house.ask("GET", "/version").status == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            assert house.post(path, {"prompt": "x"}).status == 503
        assert house.commands == []


def test_reason_of_the_supervisor(house):
    house.take(ServerState("loading", "restarting the engine"))
    assert house.ask("GET", "/health").error["message"] == "restarting the engine"
    house.take(ServerState("ready"))
    house.assert_serves()


def test_unready_but_keyed_server_asks_for_the_key_first(make_house):
    house = make_house(ready=False, api_keys=("secret",))
    assert house.post("/v1/completions", {"prompt": "x"}).status == 401


def test_drain(house):
    idle, busy = house.client(), house.client()
    house.tokenizer = lambda command: []
    busy.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    house.take(Drain())
    house.loop.turn()
    assert idle.transport.closed and not busy.transport.closed
    for response in (house.complete(), house.ask("GET", "/health")):
        assert response.status == 503
        assert response.headers["connection"] == "close"
        assert int(response.headers["retry-after"]) > 0
    emptied = []
    house.open.on_empty = lambda: emptied.append(True)
    command = house.generated()
    house.take(Deltas([Delta(command.request_id, 0, "x", 1, 0, 1, finish_reason="stop")]))
    house.loop.turn()
    assert busy.responses()[0].chunks()
    assert busy.transport.closed
    assert emptied == [True]


def test_drain_with_abort(house):
    begun, waiting = house.client(), house.client()
    house.tokenizer = lambda command: []
    begun.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    command = house.generated()
    house.take(Deltas([Delta(command.request_id, 0, "x", 1, 0, 1)]))
    house.loop.turn()
    waiting.request("POST", "/v1/completions", {"prompt": "x"})
    house.take(ServerState("draining", "worker 0 died"))
    house.take(Drain(abort=True))
    house.loop.turn()
    assert "error" in begun.responses()[0].events()[-1]
    assert waiting.responses()[0].status == 503
    assert "worker 0 died" in waiting.responses()[0].error["message"]
    assert begun.transport.closed and waiting.transport.closed
    assert len(house.cancelled()) == 2 and len(house.open) == 0


def test_too_many_open_requests(make_house):
    house = make_house(limits={"max_concurrent_requests": 2})
    house.tokenizer = lambda command: []
    clients = [house.client() for _ in range(2)]
    for client in clients:
        client.request("POST", "/v1/completions", {"prompt": "x"})
    response = house.complete()
    assert response.status == 503 and response.headers["retry-after"] == "1"
    assert house.ask("GET", "/health").status == 200
    clients[0].leave()
    clients[1].leave()
    house.assert_serves()


# ------------------------------------------------------------------------------- request ids


def test_request_id_comes_back(house):
    response = house.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    assert "my-id.1" not in response.json()["id"]
    stream = house.post(
        "/v1/completions", {"prompt": "x", "stream": True}, {"X-Request-Id": "my-id.1"}
    )
    assert stream.headers["x-request-id"] == "my-id.1"
    assert house.post("/v1/completions", {}, {"X-Request-Id": "e"}).headers["x-request-id"] == "e"
    assert house.ask("GET", "/health", None, {"X-Request-Id": "h"}).headers["x-request-id"] == "h"


def test_request_id_is_made_where_none_is_given(house):
    first, second = house.complete(), house.complete()
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert "x-request-id" not in house.ask("GET", "/health").headers


def test_request_id_of_the_body(house):
    assert house.complete(request_id="body-id").headers["x-request-id"] == "body-id"
    both = house.post(
        "/v1/completions", {"prompt": "x", "request_id": "b"}, {"X-Request-Id": "header"}
    )
    assert both.headers["x-request-id"] == "header"
    assert len(house.complete(request_id="x" * 1_000_000).headers["x-request-id"]) == 128


@pytest.mark.parametrize("given", ["x" * 60_000, 'a"b c<>;{}', "\xe9\xff", "a\tb"])
def test_unsafe_request_ids(house, given):
    client = house.client()
    client.send(
        b"GET /v1/models HTTP/1.1\r\nHost: z\r\nX-Request-Id: %b\r\n\r\n" % given.encode("latin-1")
    )
    (response,) = client.responses()
    returned = response.headers["x-request-id"]
    assert 0 < len(returned) <= 128
    assert returned.isascii() and not set(returned) & set('" <>;{}\t')
    house.assert_serves()


def test_two_requests_with_one_id(house):
    house.tokenizer = lambda command: []
    clients = [house.client() for _ in range(2)]
    commands = []
    for client in clients:
        client.request("POST", "/v1/completions", {"prompt": "x"}, {"X-Request-Id": "same"})
        commands.append(house.generated())
    assert commands[0].request_id != commands[1].request_id
    for number in (1, 0):
        request_id = commands[number].request_id
        text = f"answer {number}"
        house.take(Deltas([Delta(request_id, 0, text, 1, 0, 1, finish_reason="stop")]))
        house.loop.turn()
    bodies = [client.responses()[0].json() for client in clients]
    assert [b["choices"][0]["text"] for b in bodies] == ["answer 0", "answer 1"]
    assert bodies[0]["id"] != bodies[1]["id"]


# ------------------------------------------------------------------------ tokenizers, log, rest


def test_least_loaded_tokenizer_is_chosen(make_house):
    house = make_house(num_tokenizers=3, tokenizer_pool_size=3)
    house.tokenizer = lambda command: []
    clients = [house.client() for _ in range(6)]
    for client in clients:
        client.request("POST", "/v1/completions", {"prompt": "x"})
    assert house.sent_to == [0, 1, 2, 0, 1, 2]
    clients[1].leave()
    assert house.sent_to[-1] == 1  # the cancel goes where the request went
    clients[4].leave()
    last = house.client()
    last.request("POST", "/v1/completions", {"prompt": "x"})
    assert house.sent_to[-1] == 1


def test_front_ends_prefer_different_tokenizers():
    from zlm.frontend.open_requests import OpenRequests
    from zlm.messages import Cancel

    first_choices = []
    for index in range(4):
        sent = []
        opened = OpenRequests(index, lambda function: None)
        opened.connect([lambda command, n=n, sent=sent: sent.append(n) for n in range(2)])
        for _ in range(3):
            request_id = opened.new_id()
            opened.submit(request_id, Cancel(request_id), None)
        assert sorted(sent) in ([0, 0, 1], [0, 1, 1])
        first_choices.append(sent[0])
    assert first_choices == [0, 1, 0, 1]


def test_request_ids_carry_the_front_end(make_house):
    from zlm.frontend.open_requests import OpenRequests
    from zlm.messages import OWNER_SHIFT

    opened = OpenRequests(3, lambda function: None)
    ids = [opened.new_id() for _ in range(3)]
    assert len(set(ids)) == 3
    assert {i >> OWNER_SHIFT for i in ids} == {3}


def test_unknown_message_is_a_fault(house):
    with pytest.raises(TypeError):
        house.server.take(ZlmError("x"))


def test_launch_reaches_connections_that_are_open(bare_house, make_resolved):
    client = bare_house.client()
    client.request("GET", "/health")
    bare_house.take(
        Launch(make_resolved(limits=ServerLimits(max_body_bytes=10), api_keys=("secret",)))
    )
    bare_house.take(ServerState("ready"))
    client.request("GET", "/health")
    client.request("GET", "/v1/models")
    client.request("POST", "/v1/completions", {"prompt": "x"}, _bearer("secret"))
    assert [r.status for r in client.responses()] == [503, 200, 401, 413]

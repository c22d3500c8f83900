"""The routes of administration: who may use them, and what they do over all front ends."""

import pytest

from zlm.api_keys import api_key
from zlm.frontend.admin import CALL_SECONDS
from zlm.messages import Administer, Administered, Deltas

ADMIN = {"Authorization": "Bearer boss"}
USER = {"Authorization": "Bearer user"}
ROUTES = [
    ("GET", "/server_info"),
    ("GET", "/load"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
]
BODY = {"prompt": "x", "max_tokens": 4}


@pytest.fixture
def administered(make_house):
    """A house with an administrator, whose calls are kept in ``house.asked``."""
    house = make_house(api_keys=("user",), admin_api_keys=("boss",))
    house.asked = []
    house.server.admin.ask = house.asked.append
    return house


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_an_administrator_gets_in(make_house, administered, method, path):
    house = administered
    for headers, status in (({}, 401), ({"Authorization": "Bearer x"}, 401), (USER, 403)):
        assert house.ask(method, path, {"all": True}, headers).status == status
    without = make_house(api_keys=("user",))
    for headers in ({}, USER):
        refused = without.ask(method, path, {"all": True}, headers)
        assert refused.status == 403 and "--admin-api-key" in refused.error["message"]
    assert make_house().ask(method, path, {"all": True}).status == 403


def test_an_administrators_key_opens_every_door(administered, make_house):
    assert administered.post("/v1/completions", BODY, ADMIN).status == 200
    only = make_house(admin_api_keys=("boss",))
    assert only.post("/v1/completions", BODY).status == 200  # no key is asked of users
    assert only.ask("GET", "/load", headers=ADMIN).status == 200


def test_server_info_has_no_secrets(administered):
    answer = administered.ask("GET", "/server_info", headers=ADMIN)
    info = answer.json()
    assert info["num_keys"] == {"api_keys": 1, "admin_api_keys": 1}
    assert info["config"]["server"]["limits"]["sampling"]["max_n"] == 128
    assert info["max_model_len"] == 256 and info["device"] == "cpu"
    for key in ("user", "boss"):
        assert api_key(key).sha256.encode() not in answer.body
    assert b"boss" not in answer.body


def test_keys_of_a_file_are_counted(make_house, tmp_path):
    file = tmp_path / "keys"
    file.write_text('one\ntwo\n{"key": "three", "admin": true}\n')
    house = make_house(api_key_file=str(file), admin_api_keys=("boss",))
    info = house.ask("GET", "/server_info", headers=ADMIN).json()
    assert info["num_keys"] == {"api_keys": 2, "admin_api_keys": 2}
    assert "api_keys" not in info["config"]["server"]


def test_load_counts_what_is_open(administered):
    house = administered
    assert house.ask("GET", "/load", headers=ADMIN).json() == {
        "server_load": 0, "num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0
    }  # fmt: skip


def test_reset_prefix_cache_asks_the_engine(administered):
    house = administered
    client = house.client()
    client.request("POST", "/reset_prefix_cache", headers=ADMIN)
    (asked,) = house.asked
    assert (asked.action, asked.names) == ("reset_prefix_cache", [])
    assert not client.responses()
    house.take(Administered(asked.call, 7))
    (answer,) = client.responses()
    assert answer.status == 200 and answer.json() == {"count": 7}
    house.take(Administered(asked.call, 7))  # nobody waits for it any more
    assert len(client.responses()) == 1


def test_a_call_that_nobody_answers_ends(administered):
    house = administered
    client = house.client()
    client.request("POST", "/reset_prefix_cache", headers=ADMIN)
    house.loop.advance(CALL_SECONDS)
    (answer,) = client.responses()
    assert answer.status == 504 and "not every process" in answer.error["message"]
    house.take(Administered(house.asked[0].call, 7))
    gone = house.client()
    gone.request("POST", "/reset_prefix_cache", headers=ADMIN)
    gone.leave()
    house.take(Administered(house.asked[1].call, 7))


def waiting(house, **fields):
    """Make a request that nobody answers; return its connection."""
    house.tokenizer = lambda command: []
    client = house.client()
    client.request("POST", "/v1/completions", {**BODY, **fields}, USER)
    return client


def test_requests_are_aborted_by_their_names(administered, make_delta):
    """By the client's own id, by that of the answer, and nobody else's."""
    house = administered
    named = waiting(house, request_id="mine")
    stream = waiting(house, stream=True)
    house.take(Deltas([make_delta(house.generated(), 0, "He", 1)]))
    house.loop.turn()
    (begun,) = stream.responses()
    other = waiting(house)
    names = ["mine", begun.events()[0]["id"], "unknown"]
    done = house.server.admin.perform(Administer(1, "abort_requests", names))
    assert done == Administered(1, 2)
    (answer,) = named.responses()
    assert answer.status == 503 and answer.error["code"] == "request_aborted"
    assert answer.headers["x-should-retry"] == "false"
    assert stream.responses()[0].events()[-1]["error"]["code"] == "request_aborted"
    assert not other.responses() and len(house.open) == 1 and len(house.cancelled()) == 2
    everybody = house.server.admin.perform(Administer(2, "abort_requests", []))
    assert everybody == Administered(2, 1) and len(house.open) == 0
    assert other.responses()[0].status == 503
    assert house.server.admin.perform(Administer(3, "abort_requests", [])) == Administered(3, 0)


def test_every_front_end_is_asked(make_house):
    house = make_house(admin_api_keys=("boss",), api_server_count=3)
    house.server.admin.ask = (asked := []).append
    client = house.client()
    client.request("POST", "/abort_requests", {"request_ids": ["a"]}, ADMIN)
    assert asked[0].names == ["a"]
    for count in (1, 0, 2):
        assert not client.responses()
        house.take(Administered(asked[0].call, count))
    assert client.responses()[0].json() == {"count": 3}


def test_what_is_no_text_is_aborted_as_well(administered):
    """And the administrator's own calls are not."""
    house = administered
    house.tokenizer = lambda command: []
    client, asking = house.client(), house.client()
    client.request("POST", "/tokenize", {"prompt": "x"}, USER | {"X-Request-Id": "t"})
    asking.request("POST", "/abort_requests", {"all": True}, ADMIN)
    house.take(house.server.admin.perform(house.asked[0]))
    assert client.responses()[0].error["code"] == "request_aborted"
    assert asking.responses()[0].json() == {"count": 1}
    assert len(house.open) == 0 and len(house.cancelled()) == 1


@pytest.mark.parametrize(
    "body",
    [
        {}, {"all": False}, {"all": True, "request_ids": ["a"]}, {"request_ids": []},
        {"request_ids": [""]}, {"request_ids": ["x" * 257]}, {"request_ids": ["a"] * 1025},
        {"request_ids": "a"}, {"ids": ["a"]}, [],
    ],
)  # fmt: skip
def test_what_to_abort_must_be_said(administered, body):
    answer = administered.ask("POST", "/abort_requests", body, ADMIN)
    assert answer.status == 400 and not administered.asked


def test_an_overloaded_server_can_be_administered(make_house):
    house = make_house(admin_api_keys=("boss",), limits={"max_concurrent_requests": 1})
    house.server.admin.ask = (asked := []).append
    waiting(house)
    assert house.post("/v1/completions", BODY).status == 503
    client = house.client()
    client.request("POST", "/abort_requests", {"all": True}, ADMIN)
    house.take(house.server.admin.perform(asked[0]))
    assert client.responses()[0].json() == {"count": 1}

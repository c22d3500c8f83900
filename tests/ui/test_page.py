"""GET / and /ui/: what is sent, to whom, and that the files keep to their own rules."""

import re
from pathlib import Path

import pytest

from zlm.frontend import process
from zlm.frontend.metrics import FrontendMetrics
from zlm.frontend.open_requests import OpenRequests
from zlm.frontend.page import DOCS_PAGE, FOLDER, TYPES
from zlm.frontend.server import Server
from zlm.messages import Launch
from zlm.supervisor import keeper

FILES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def policy(response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return dict(part.split(" ", 1) for part in parts)


def assert_strict(response) -> None:
    rules = policy(response)
    assert rules["default-src"] == "'none'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", ["", *(f"ui/{name}" for name in FILES)])
def test_every_file_is_sent_to_anybody(make_house, name):
    house = make_house(api_keys=("secret",))
    response = house.ask("GET", f"/{name}")
    assert response.status == 200
    path = FOLDER / (name.removeprefix("ui/") or "index.html")
    assert response.body == path.read_bytes()
    assert response.headers["content-type"] == TYPES[path.suffix].decode()
    assert_strict(response)
    assert policy(response)["script-src"] == policy(response)["connect-src"] == "'self'"
    head = house.ask("HEAD", f"/{name}")
    assert head.status == 200 and head.body == b""
    assert head.headers["content-length"] == response.headers["content-length"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/", "/ui", "/ui/none.js", "/ui/../page.py", "/ui/%2e%2e/page.py", "/ui//etc/passwd",
        "/ui/ui/x/main.js", "/ui/main.js/", "/index.html",
    ],
)  # fmt: skip
def test_nothing_else_is_there(house, path):
    house.refused(house.ask("GET", path), 404)


def test_other_methods_are_refused(house):
    for path in ("/", "/ui/main.js", "/ui/events"):
        response = house.ask("POST", path, {})
        assert response.status == 405 and response.headers["allow"] == "GET, HEAD, OPTIONS"


def test_it_is_there_while_the_model_loads(bare_house, make_resolved):
    assert bare_house.ask("GET", "/").status == 200
    loading = bare_house.ask("GET", "/ui/events")
    assert loading.status == 503 and "loading" in loading.error["message"]
    bare_house.take(Launch(make_resolved(ui=False)))
    assert bare_house.ask("GET", "/").status == 404
    away = Server(OpenRequests(0, lambda function: None), FrontendMetrics(0), ui=False)
    assert away._routes.find("/") is None, "as the environment says before the launch"
    assert process.NO_UI == keeper.NO_UI


def test_without_it(make_house):
    house = make_house(ui=False)
    for path in ("/", "/ui/main.js", "/ui/events"):
        house.refused(house.ask("GET", path), 404)
    house.complete()
    assert house.server._recent.newest() == []


def test_behind_a_proxy_that_keeps_its_prefix(make_house):
    house = make_house(root_path="/llm/ui")
    assert house.ask("GET", "/llm/ui/").body == (FOLDER / "index.html").read_bytes()
    assert house.ask("GET", "/llm/ui/ui/main.js").body == (FOLDER / "main.js").read_bytes()


def test_the_page_of_routes_is_open_and_as_strict(make_house):
    house = make_house(api_keys=("secret",))
    response = house.ask("GET", "/docs")
    assert response.status == 200 and response.body == DOCS_PAGE.read_bytes()
    assert_strict(response)
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy(response)["script-src"])
    assert house.ask("GET", "/openapi.json").status == 401


# ----------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_and_needs_nothing_from_elsewhere(name):
    text = (FOLDER / name).read_text()
    assert text.count("\n") < 300
    assert max(map(len, text.splitlines())) <= 300
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"@import|url\(|(src|href)=\"(https?:|/)", without_names)
    if name.endswith(".js"):
        assert text.startswith("// "), "says what it is"
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
        assert not re.search(unsafe, text)


def test_what_is_imported_is_there():
    for name in SCRIPTS:
        text = (FOLDER / name).read_text()
        for source in re.findall(r"from \"(.*?)\"", text):
            assert source.startswith("./") and source.removeprefix("./") in FILES, name
        for names, source in re.findall(r"import \{(.*?)\} from \"\./(.*?)\"", text, re.DOTALL):
            exported = (FOLDER / source).read_text()
            for each in filter(None, (part.strip() for part in names.split(","))):
                assert re.search(rf"export (?:\w+\*? )+{each}\b", exported), f"{name}: {each}"
    page = (FOLDER / "index.html").read_text()
    for source in re.findall(r"(?:src|href)=\"(ui/.*?)\"", page):
        assert source.removeprefix("ui/") in FILES
    assert "style=" not in page and "onclick" not in page, "the policy forbids it"


def test_the_wheel_takes_it():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"frontend/ui/*"' in project and '"frontend/docs.html"' in project

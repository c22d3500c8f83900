"""The page in a real Chromium, over the real front end; what is generated is written here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_server import HOLD, THOUGHT, PageServer
from running_server import eventually_true

from zlm.messages import Cancel, Drain, ServerState
from zlm.process import notes

READY = "#state[data-kind=ready]"
ANSWER = ".message.assistant"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
PATIENCE_MS = 20_000


@contextmanager
def page_of(chromium: Any, url: str, **context: Any) -> Iterator[Any]:
    """Open *url* as a visitor of its own; at the end nothing may have gone wrong in it."""
    visitor = chromium.new_context(**context)
    visitor.set_default_timeout(PATIENCE_MS)
    page = visitor.new_page()
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(f"{error} {error.stack}"))
    page.on("console", lambda m: m.type in ("error", "warning") and page.faults.append(m.text))
    home = "/".join(url.split("/")[:3]) + "/"
    page.on("request", lambda r: r.url.startswith(home) or page.faults.append(r.url))
    page.goto(url)
    yield page
    assert not page.faults
    visitor.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(tmp_path) as server:
        yield server


@pytest.fixture
def page(chromium: Any, served: PageServer) -> Iterator[Any]:
    with page_of(chromium, served.url) as page:
        page.wait_for_selector(READY)
        yield page


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_answer(page: Any) -> Any:
    page.wait_for_selector(f"{ANSWER}:last-child:not(.busy)")
    return page.locator(ANSWER).last


def wait_text(page: Any, selector: str, text: str) -> None:
    page.wait_for_function(
        "([s, t]) => document.querySelector(s)?.textContent.includes(t)", arg=[selector, text]
    )


# -------------------------------------------------------------------------------------- chat


def test_an_answer_grows_as_it_comes(page, served):
    served.script = ["Once ", HOLD, "upon ", HOLD, "a time"]
    say(page, "Tell me a story")
    wait_text(page, f"{ANSWER}.busy", "Once")
    assert "upon" not in page.locator(ANSWER).inner_text()
    served.go()
    wait_text(page, f"{ANSWER}.busy", "Once upon")
    served.go()
    answer = wait_answer(page)
    assert "Once upon a time" in answer.inner_text()
    assert re.search(r"3 tokens · [\d.]+ tokens/s · first after", answer.inner_text())
    assert served.commands[-1].chat.messages == [{"role": "user", "content": "Tell me a story"}]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_is_stopped(page, served, how):
    served.script = ["Never ", HOLD, "ending"]
    say(page, "Go on and on")
    wait_text(page, f"{ANSWER}.busy", "Never")
    if how == "button":
        page.get_by_label("Stop the answer").click()
    else:
        page.keyboard.press("Escape")
    answer = wait_answer(page)
    assert "Never" in answer.inner_text() and "stopped" in answer.inner_text()
    assert "ending" not in answer.inner_text()
    served.script = ["Yes"]
    say(page, "Still there?")
    wait_text(page, f"{ANSWER}:last-child", "Yes")
    # A connection that was closed may be seen after a request on another.
    assert eventually_true(lambda: any(isinstance(c, Cancel) for c in served.commands), 20)
    assert [type(c) for c in served.commands].count(Cancel) == 1
    _, second = (c for c in served.commands if not isinstance(c, Cancel))
    sent = second.chat.messages
    assert [each["role"] for each in sent] == ["user", "assistant", "user"]


def test_settings_are_sent_and_kept(page, served):
    page.get_by_label("Show settings").click()
    for label, value in [
        ("System prompt", "Be brief."), ("Temperature", "0.5"), ("Top p", "0.9"),
        ("Max tokens", "20"), ("Seed", "7"), ("Stop at", "END\n\\n\\n"),
    ]:  # fmt: skip
        page.get_by_label(label).fill(value)
    page.locator("summary", has_text="More").click()
    page.get_by_label("Top k").fill("40")
    page.get_by_label("More fields").fill('{"logit_bias": {"5": -1}}')
    page.get_by_label("Close the settings").click()
    say(page, "Hi")
    wait_answer(page)
    command = served.commands[-1]
    assert command.chat.messages[0] == {"role": "system", "content": "Be brief."}
    params = command.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    assert (params.max_tokens, params.seed, params.stop) == (20, 7, ["END", "\n\n"])
    assert params.logit_bias == {5: -1.0}
    page.reload()
    page.wait_for_selector(READY)
    page.get_by_label("Show settings").click()
    assert page.get_by_label("Temperature").input_value() == "0.5"


def test_what_the_server_refuses_is_told_and_can_be_mended(page, served):
    page.get_by_label("Show settings").click()
    page.get_by_label("Temperature").fill("9")
    say(page, "Hi")
    wait_text(page, ".notice", "temperature must be between")
    assert page.get_by_label("Message", exact=True).input_value() == "Hi"
    assert page.locator(".message").count() == 0
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Send").click()
    assert "Hello" in wait_answer(page).inner_text()
    assert page.locator(".notice").is_hidden()
    assert page.faults.pop().startswith("Failed to load resource")  # the browser's own words


def test_thoughts_are_folded(page, served):
    served.script = [f"{THOUGHT}Let me **see**", HOLD, "It is 4."]
    say(page, "2 + 2?")
    wait_text(page, "summary", "Thinking")
    served.go()
    answer = wait_answer(page)
    assert "Let me" not in answer.inner_text() and "It is 4." in answer.inner_text()
    answer.locator("summary").click()
    assert answer.locator(".thoughts strong").inner_text() == "see"
    served.script = ["6"]
    say(page, "And 3 + 3?")
    wait_answer(page)
    assert served.commands[-1].chat.messages[1] == {"role": "assistant", "content": "It is 4."}


def test_chats_are_kept_opened_and_removed(page, served):
    say(page, "First question")
    wait_answer(page)
    page.get_by_role("button", name="New chat").first.click()
    say(page, "Second question")
    wait_answer(page)
    page.reload()
    page.wait_for_selector(READY)
    assert "Second question" in page.locator(".thread").inner_text()
    page.get_by_role("button", name="First question", exact=True).click()
    assert "First question" in page.locator(".thread").inner_text()
    page.get_by_label("Delete “Second question”").click()
    assert page.locator(".history li").count() == 1
    page.get_by_label("Delete “First question”").click()
    assert page.locator(".history li").count() == 0
    assert "Ask tiny" in page.locator(".thread").inner_text()


def test_a_question_is_edited_and_an_answer_made_again(page, served):
    say(page, "What?")
    wait_answer(page)
    served.script = ["Anew"]
    page.get_by_label("Answer again").click()
    wait_text(page, ANSWER, "Anew")
    assert page.locator(".message").count() == 2
    page.locator(".message.user").hover()
    page.get_by_label("Edit and send again").click()
    assert page.get_by_label("Message", exact=True).input_value() == "What?"
    assert page.locator(".message").count() == 0


HOSTILE = """<img src=x onerror="window.hit=1"> <script>window.hit=1</script>
[a](javascript:window.hit=1) [b](data:text/html,x) ![c](http://elsewhere.example/c.png)
<a href="http://elsewhere.example">d</a> **<b onclick=x>e</b>** [f](https://good.example/f)

```html
</code></pre><script>window.hit=1</script>
```
"""


def test_markup_of_an_answer_is_text(page, served):
    served.script = [HOSTILE]
    say(page, "Attack")
    answer = wait_answer(page)
    shown = answer.locator(".markdown").first
    assert '<img src=x onerror="window.hit=1">' in shown.inner_text()
    assert "</code></pre><script>" in shown.inner_text()
    assert shown.locator("img, script, b, [onclick], [onerror]").count() == 0
    links = shown.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    apart = ["noopener noreferrer nofollow", "_blank"]
    assert links == [
        ["http://elsewhere.example/c.png", *apart],
        ["http://elsewhere.example/", *apart],
        ["https://good.example/f", *apart],
    ]
    assert page.evaluate("window.hit") is None
    parse = "() => { try { document.body.innerHTML = 'x' } catch (error) { return error.name } }"
    assert page.evaluate(parse) == "TypeError", "the policy does not hold"
    page.faults.clear()  # which the browser has told of


def test_code_is_copied(page, served, chromium):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    served.script = ["```python\nprint('a')  # b\n```"]
    say(page, "Code")
    answer = wait_answer(page)
    assert answer.locator(".code-head span").inner_text() == "python"
    page.get_by_label("Copy the code").click()
    page.wait_for_function("() => navigator.clipboard.readText().then(t => t.includes('print'))")
    assert page.evaluate("navigator.clipboard.readText()") == "print('a')  # b"


# ---------------------------------------------------------------------------------- dashboard


def test_the_dashboard_moves(page, served):
    page.get_by_role("link", name="Dashboard").click()
    wait_text(page, "#tile-running", "0")
    wait_text(page, ".latencies", "nothing since you opened this page")
    wait_text(page, ".tile.running", "0 open requests")
    served.engine.show(
        num_running=3, num_waiting=2, kv_usage=0.25, num_blocks=64, block_size_tokens=16
    )
    served.engine.looked_up(100, 40)
    served.engine.next_token(0.03)
    served.engine.generation_tokens += 5000
    wait_text(page, "#tile-running", "3")
    wait_text(page, "#tile-waiting", "2")
    wait_text(page, "#tile-kv", "25 %")
    wait_text(page, "#tile-hits", "40 %")
    wait_text(page, ".latencies", "1 counted, 30 ms on average")
    page.get_by_role("link", name="Chat").click()
    say(page, "Hi")
    wait_answer(page)
    page.get_by_role("link", name="Dashboard").click()
    wait_text(page, ".recent", "/v1/chat/completions")
    served.tell(ServerState("restarting", "the engine was lost"))
    page.wait_for_selector("#state[data-kind=restarting]")
    assert "the engine was lost" in page.locator("#state").inner_text()


def test_the_plan_of_memory_and_the_start_are_shown(page, served, tmp_path):
    parts = [["weights", 3 << 30], ["KV cache", 1 << 30], ["left free", 4 << 30]]
    notes.write(tmp_path, notes.MEMORY, {
        "title": "a card", "parts": parts, "groups": [[0, 640, 10240, 1 << 30]],
    })  # fmt: skip
    phases = [
        ["supervisor", "reading", 0.0, 0.5, 1 << 20],
        ["worker 0", "loading", 0.5, 2.0, 1 << 30],
    ]
    notes.write(tmp_path, notes.START, {"seconds": 2.0, "phases": phases})
    page.get_by_role("link", name="Dashboard").click()
    wait_text(page, ".parts", "KV cache 1.00 GiB")
    widths = page.locator(".stack .part").evaluate_all("all => all.map(e => e.offsetWidth)")
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.1)
    assert "640 blocks, 10.2 k tokens" in page.locator(".groups").inner_text()
    assert "ready after 2.00 s" in page.locator(".start").inner_text()
    assert page.locator(".track span").count() == 2


def test_it_is_fed_only_while_it_is_looked_at(page, served):
    viewers = served.server.dashboard._viewers
    assert not viewers
    page.get_by_role("link", name="Dashboard").click()
    wait_text(page, "#tile-running", "0")
    assert len(viewers) == 1
    page.get_by_role("link", name="Chat").click()
    page.wait_for_selector("#chat:not([hidden])")
    served.engine.show(num_running=1)
    page.wait_for_function("() => fetch('version').then(r => r.ok)")
    served.tell(ServerState("ready"))
    assert not viewers


# ------------------------------------------------------------- keys, phones, prefixes, loading


def test_with_keys(chromium, tmp_path):
    with (
        PageServer(tmp_path, api_keys=("secret",)) as served,
        page_of(chromium, served.url) as page,
    ):
        wait_text(page, "#key-reason", "answers only with a key")
        field = page.get_by_label("Key", exact=True)
        field.fill("schlüssel✓")
        page.keyboard.press("Enter")
        wait_text(page, "#key-reason", "A key cannot have these characters: ü ✓")
        field.fill("wrong")
        page.keyboard.press("Enter")
        wait_text(page, "#key-reason", "not one of this server's")
        field.fill("secret")
        page.get_by_text("Use this key").click()
        page.wait_for_selector(READY)
        say(page, "Hi")
        assert "Hello" in wait_answer(page).inner_text()
        page.get_by_role("link", name="Dashboard").click()
        wait_text(page, "#tile-running", "0")
        page.reload()
        page.wait_for_selector(READY)
        assert page.evaluate("Object.keys(localStorage).some(k => k.endsWith(':key'))") is False
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Keep it on this device").check()
        page.get_by_text("Use this key").click()
        assert page.evaluate("Object.keys(localStorage).some(k => k.endsWith(':key'))") is True
        told = [text for text in page.faults if "401" in text]  # the browser's own words
        assert len(told) == len(page.faults) == 2
        page.faults.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(chromium, served, scheme):
    served.script = [
        "A `" + "long" * 60 + "`\n\n```\n" + "wide " * 60 + "\n```\n\n| a | b |\n|--|--|\n| "
        + "cell " * 30 + "| d |\n"
    ]  # fmt: skip
    with page_of(chromium, served.url, color_scheme=scheme, **PHONE) as page:
        page.wait_for_selector(READY)
        assert page.locator(".chats").is_hidden()
        say(page, "Hi")
        wait_answer(page)
        assert_within(page)
        for button, panel in (("Show chats", ".chats"), ("Show settings", ".settings")):
            page.get_by_label(button).tap()
            assert page.locator(panel).is_visible()
            assert_within(page)
            page.keyboard.press("Escape")
            assert page.locator(panel).is_hidden()
        page.get_by_label("Show chats").tap()
        page.touchscreen.tap(350, 400)  # beside it
        assert page.locator(".chats").is_hidden()
        page.get_by_role("link", name="Dashboard").tap()
        wait_text(page, ".recent", "/v1/chat/completions")
        assert_within(page)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = int(re.search(r"\d+", paper).group())
        assert brightness < 60 if scheme == "dark" else brightness > 200


def assert_within(page: Any) -> None:
    """Nothing but what scrolls by itself is wider than the window."""
    wide = page.evaluate("""() => [...document.querySelectorAll("main *")]
        .filter((e) => !e.closest(".table, pre, [hidden]") && e.getClientRects().length)
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 80))""")
    assert wide == []


def test_by_keyboard_alone(page, served):
    active = "document.activeElement"
    name = f"{active}.getAttribute('aria-label') || {active}.textContent.trim()"
    assert page.evaluate(name) == "Message", "one can begin to write at once"
    reached = []
    while "Skip to the content" not in reached and len(reached) < 30:
        page.keyboard.press("Shift+Tab")
        reached.append(page.evaluate(name))
    wanted = {"Chat", "Dashboard", "API key", "Show chats", "Show settings", "New chat"}
    assert wanted <= set(reached) and reached[-1] == "Skip to the content"
    for _ in reached:
        page.keyboard.press("Tab")
    page.keyboard.type("Line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    wait_answer(page)
    assert served.commands[-1].chat.messages[-1]["content"] == "Line one\nline two"


def test_a_window_that_shrinks_shows_the_chat(page):
    assert page.locator(".chats").is_visible()
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_selector(".chats", state="hidden")
    page.set_viewport_size({"width": 1280, "height": 740})
    page.wait_for_selector(".chats", state="visible")


def test_behind_a_prefix(chromium, tmp_path):
    with (
        PageServer(tmp_path, root_path="/llm") as served,
        page_of(chromium, served.url) as page,
    ):
        page.wait_for_selector(READY)
        say(page, "Hi")
        assert "Hello" in wait_answer(page).inner_text()
        page.get_by_role("link", name="Dashboard").click()
        wait_text(page, "#tile-running", "0")


def test_a_lost_connection_is_told_and_found_again(page, served):
    page.context.set_offline(True)
    say(page, "Hi")
    wait_text(page, ".notice", "no connection to the server")
    page.wait_for_selector("#state[data-kind=lost]")
    assert page.get_by_label("Message", exact=True).input_value() == "Hi"
    page.context.set_offline(False)
    page.wait_for_selector(READY)
    page.get_by_label("Send").click()
    assert "Hello" in wait_answer(page).inner_text()
    page.faults.clear()  # each failure, in the browser's own words


def test_an_answer_that_breaks_off_says_so(page, served):
    served.script = ["Half of ", HOLD, "it"]
    say(page, "Hi")
    wait_text(page, f"{ANSWER}.busy", "Half of")
    served.tell(Drain(abort=True))
    answer = wait_answer(page)
    assert "Half of" in answer.inner_text()
    assert "shutting down" in answer.locator(".error").inner_text()


def test_without_storage(chromium, served):
    with page_of(chromium, "about:blank") as page:
        page.add_init_script("""for (const name of ["localStorage", "sessionStorage"])
            Object.defineProperty(window, name, { get() { throw new Error("off") } });""")
        page.goto(served.url)
        page.wait_for_selector(READY)
        say(page, "Hi")
        assert "Hello" in wait_answer(page).inner_text()
        assert page.locator(".history li").count() == 1
        page.faults.clear()  # addresses that are not of about:blank


def test_the_page_of_routes_works_under_its_policy(chromium, served):
    with page_of(chromium, served.url + "docs") as page:
        page.get_by_text("/v1/chat/completions").first.click()
        page.get_by_role("button", name="Send").first.click()
        wait_text(page, "details[open] > pre", "200")


def test_it_waits_for_the_model(chromium, served):
    served.tell(ServerState("loading", "the model is being loaded (worker: loading weights)"))
    with page_of(chromium, served.url) as page:
        page.wait_for_selector("#state[data-kind=loading]")
        assert "loading weights" in page.locator("#state").inner_text()
        served.tell(ServerState("ready"))
        page.wait_for_selector(READY)
        page.faults.clear()  # each 503, in the browser's own words

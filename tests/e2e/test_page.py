"""The page at / in a real Chromium, on a real server: issue 7's own test of it."""

from pathlib import Path
from typing import Any

from running_server import MODEL, Server

ANSWER = ".message.assistant"


def test_a_chat_streams_and_is_stopped_and_the_dashboard_moves(
    server: Server, chromium: Any, tmp_path: Path
) -> None:
    faults: list[str] = []
    context = chromium.new_context()
    context.set_default_timeout(60_000)
    page, watcher = context.new_page(), context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: m.type in ("error", "warning") and faults.append(m.text))
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_selector("#state[data-kind=ready]")
    assert page.title() == f"{MODEL} · zlm"
    watcher.goto(f"http://127.0.0.1:{server.port}/#dashboard")
    watcher.wait_for_function("() => document.querySelector('#tile-running').textContent === '0'")

    page.get_by_label("Show settings").click()
    page.get_by_label("Temperature").fill("0")
    page.locator(".settings summary").click()
    page.get_by_label("More fields").fill('{"ignore_eos": true}')
    page.get_by_label("Message", exact=True).fill("Count from one to a thousand.")
    page.keyboard.press("Enter")
    lengths = [
        page.wait_for_function(
            f"(least) => {{ const e = document.querySelector('{ANSWER}.busy .markdown');"
            " return e && e.textContent.length > least && e.textContent.length }",
            arg=least,
        ).json_value()
        for least in (0, 20, 60)
    ]
    assert lengths == sorted(set(lengths)), "the text grew while it came"
    watcher.wait_for_function("() => document.querySelector('#tile-running').textContent === '1'")
    watcher.wait_for_function(
        "() => parseFloat(document.querySelector('#tile-output').textContent) > 0"
    )
    assert watcher.locator(".track span").count() > 5, "phases of the start"
    assert "KV cache" in watcher.locator(".parts").inner_text()

    page.get_by_label("Stop the answer").click()
    page.wait_for_selector(f"{ANSWER}:not(.busy)")
    assert "stopped" in page.locator(ANSWER).inner_text()
    watcher.wait_for_function("() => document.querySelector('#tile-running').textContent === '0'")
    watcher.wait_for_function(
        "() => document.querySelector('.recent tbody')?.textContent.includes('client gone')"
    )
    page.screenshot(path=tmp_path / "chat.png")
    watcher.screenshot(path=tmp_path / "dashboard.png")
    assert not faults
    context.close()

"""The page's own markdown, in a real Chromium: what is made of it, and how quickly."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_server import PageServer

# Shows a text, and returns the HTML of what was made of it.
SHOW = """async (text) => {
    const { MarkdownView } = await import("./ui/markdown_view.js");
    const view = new MarkdownView();
    view.show(text);
    for (const made of view.element.querySelectorAll("button")) made.remove();
    return view.element.innerHTML;
}"""
GROW = """async (text) => {
    const { MarkdownView } = await import("./ui/markdown_view.js");
    const [view, whole] = [new MarkdownView(), new MarkdownView()];
    for (let end = 0; end <= text.length; end += 3) view.show(text.slice(0, end));
    view.show(text);
    whole.show(text);
    return view.element.innerHTML === whole.element.innerHTML;
}"""
TIME = """async (text) => {
    const { MarkdownView } = await import("./ui/markdown_view.js");
    const began = performance.now();
    new MarkdownView().show(text);
    return performance.now() - began;
}"""


@pytest.fixture(scope="module")
def page(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("markdown")
    with PageServer(folder) as server:
        page = chromium.new_page()
        page.goto(server.url)
        yield page
        page.close()


CASES = {
    "a": "<p>a</p>",
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "# a #": '<h3 class="level-1">a</h3>',
    "#a": "<p>#a</p>",
    "**a** _b_ ***c*** ~~d~~": "<p><strong>a</strong> <em>b</em> <strong><em>c</em></strong> "
    "<del>d</del></p>",
    "2 * 3 * 4, a_b_c, **open": "<p>2 * 3 * 4, a_b_c, **open</p>",
    r"\*a\* \`b\`": "<p>*a* `b`</p>",
    "`` a`b `` `c": "<p><code>a`b</code> `c</p>",
    "<b>&amp;": "<p>&lt;b&gt;&amp;amp;</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "1. a\n\n   more\n\n2. b": "<ol><li>a<p>more</p></li><li>b</li></ol>",
    "in\n1999. A year": "<p>in<br>1999. A year</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "```\n# a\n**b**": "<pre><code># a\n**b**</code></pre>",
    "````\n```\n````": "<pre><code>```</code></pre>",
    "1. a\n   ```\n   b\n   ```": "<ol><li>a<pre><code>b</code></pre></li></ol>",
    "| a | b |\n|---|--:|\n| c | `d` |": "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>c</td><td><code>d</code></td></tr></tbody></table>",
    "a | b\nc": "<p>a | b<br>c</p>",
    "[a *b*](https://x.org/(y)?z=1 \"t\")": '<p><a href="https://x.org/(y)?z=1">a <em>b</em>'
    "</a></p>",
    "https://x.org/a, then": '<p><a href="https://x.org/a">https://x.org/a</a>, then</p>',
    "[a](javascript:x) [b] (c)": "<p>a [b] (c)</p>",
    "a<br>b": "<p>a<br>b</p>",
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_what_is_made_of(page, text):
    made = page.evaluate(SHOW, text)
    for extra in (' target="_blank" rel="noopener noreferrer nofollow"', ' tabindex="0"',
                  ' class="left"', ' class="right"', '<div class="table">', '<div class="code">',
                  '<div class="code-head"><span>text</span></div>', "</div>"):  # fmt: skip
        made = made.replace(extra, "")
    assert made == CASES[text]


PARTS = [
    "*", "**", "_", "`", "```\n", "[", "](", ")", "<", ">", "\n", "\n\n", "- ", "1. ", "> ", "|",
    "|-|-|\n", "# ", "a", "b c", "  ", "    ", "~~", "\\", "!", "http://x.y", "\n---\n",
]  # fmt: skip


def test_any_text_is_shown_alike_at_once_and_bit_by_bit(page):
    chance = random.Random(7)
    for _ in range(150):
        text = "".join(chance.choices(PARTS, k=chance.randint(1, 60)))
        assert page.evaluate(GROW, text), text


@pytest.mark.parametrize(
    "part", [*PARTS, "*a ", "[a", "`a", "**a", "> - ", "# ", "<a", "![", "  #"]
)
def test_no_text_takes_long(page, part):
    for text in (part * 4000, "# " + part * 2000, "| " + part * 2000 + "\n" + part * 2000):
        assert page.evaluate(TIME, text) < 3000

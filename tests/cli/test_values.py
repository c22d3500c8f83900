"""The text of values: counts and sizes above all."""

from pathlib import Path

import pytest

from zlm.cli import values


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8192", 8192),
        ("0", 0),
        ("8k", 8000),
        ("8.5k", 8500),
        ("8K", 8192),
        ("8Ki", 8192),
        ("1M", 2**20),
        ("2g", 2 * 10**9),
        ("1T", 2**40),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8 GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("1073741824", 2**30),
        ("100B", 100),
    ],
)
def test_quantities(text: str, count: int) -> None:
    assert values.quantity(text) == count
    assert values.size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.0001k", "8X", "8kk", "8ib", "1e9", "٨"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="must be a"):
        values.quantity(text)


def test_strings() -> None:
    assert values.strings("*") == ["*"]
    assert values.strings('["a", "b"]') == ["a", "b"]
    for bad in ("", "[", '["a", 1]'):
        with pytest.raises(ValueError, match="must"):
            values.strings(bad)


def test_chat_template_takes_a_file_or_a_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("x")
    assert values.chat_template(str(file)) == str(file)
    assert values.chat_template("{{ x }}") == "{{ x }}"

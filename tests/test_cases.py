"""The table of CASES.md against the tests: each case has some, and they name its number."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
NUMBERS = (
    1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 15, 16, 17, 19, 20, 22, 23, 25, 26, 27, 29, 32, 33, 34, 35, 37,
    39, 40, 42, 43, 44, 45, 47, 48, 49, 51, 52, 54, 55, 56, 57, 59, 60, 62, 63, 65, 66, 68, 69, 71,
    74, 75, 76, 78, 80, 81, 82, 84, 86, 88, 90, 92, 93, 94, 95, 96, 97, 99, 100, 102, 104, 106, 107,
    109, 110, 112,
)  # fmt: skip
LATER: dict[int, str] = {}  # case → what it waits for
_LISTED = re.compile(r"\bcases?\b((?:[\s,]|and|\d+)+)", re.IGNORECASE)
_IN_NAME = re.compile(r"^test(?:_case)?((?:_\d+|_and(?=_\d))+)_|_case_(\d+)\b")


def table() -> dict[int, str]:
    """Return the last column of each row of CASES.md, by number."""
    lines = (FOLDER / "CASES.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {int(number): tests for number, _, tests in rows if number.isdigit()}


@cache
def named_by(path: Path) -> dict[str, set[int]]:
    """Return the tests of a file, each with the numbers that it or its file names."""
    module = ast.parse(path.read_text())
    of_file = numbers_in(ast.get_docstring(module) or "")
    functions = [n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        each.name: of_file | numbers_in(ast.get_docstring(each) or "") | numbers_of_name(each.name)
        for each in functions
        if each.name.startswith("test_")
    }


def numbers_in(text: str) -> set[int]:
    lists = [match.group(1) for match in _LISTED.finditer(text)]
    return {int(number) for found in lists for number in re.findall(r"\d+", found)}


def numbers_of_name(name: str) -> set[int]:
    match = _IN_NAME.search(name)
    return {int(number) for number in re.findall(r"\d+", match.group(0))} if match else set()


def test_every_case_is_in_the_table() -> None:
    assert tuple(table()) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_a_case_has_tests_that_name_it(number: int) -> None:
    tests = table()[number]
    if number in LATER:
        assert tests == f"later: {LATER[number]}"
        return
    assert tests
    for test in tests.split():
        file, _, name = test.partition("::")
        found = named_by(FOLDER / file)
        assert name in found, f"there is no {test}"
        assert number in found[name], f"{test} does not name case {number}"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Bodies: CASES 86, 88 and 42.", {86, 88, 42}),
        ("Case 29: rows.", {29}),
        ("no number: cases of 5", set()),
    ],
)
def test_numbers_of_docstrings(text: str, numbers: set[int]) -> None:
    assert numbers_in(text) == numbers


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("test_case_33_and_34_bad_requests", {33, 34}),
        ("test_16_and_17_all_eos_ids", {16, 17}),
        ("test_case_9_10_and_11_stop_strings", {9, 10, 11}),
        ("test_served_names_case_65", {65}),
        ("test_sixty_four_streams", set()),
        ("test_http_1_0", set()),
    ],
)
def test_numbers_of_names(name: str, numbers: set[int]) -> None:
    assert numbers_of_name(name) == numbers

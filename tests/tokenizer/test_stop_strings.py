"""Stop strings in text that comes in pieces (CASES 9, 10, 11, 15)."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from zlm.tokenizer.stop_strings import StopMatch, StopMatcher

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def feed(pieces: list[str], stops: list[str]) -> tuple[list[str], StopMatch | None]:
    matcher = StopMatcher(stops)
    sent: list[str] = []
    for piece in pieces:
        text, match = matcher.push(piece)
        sent.append(text)
        if match is not None:
            return sent, match
    text, match = matcher.flush()
    return [*sent, text], match


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 30), max_size=12))
def test_text_ends_at_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    sent, match = feed(cut(text, places), stops)
    starts = [text.find(stop) for stop in stops if stop in text]
    assert "".join(sent) == text[: min(starts, default=len(text))]
    assert (match is not None) == bool(starts)
    if match is not None:
        assert match.start == min(starts)
        assert text[match.start : match.end] == match.stop


@given(text=TEXT, stops=STOPS, more=STOPS)
def test_more_stop_strings_never_give_more_text(
    text: str, stops: list[str], more: list[str]
) -> None:
    few, _ = feed(list(text), stops)
    many, _ = feed(list(text), stops + more)
    assert "".join(few).startswith("".join(many))


@given(text=TEXT, stops=STOPS)
def test_what_is_held_is_shorter_than_the_longest_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for i, character in enumerate(text):
        piece, match = matcher.push(character)
        sent += piece
        if match is not None:
            break
        assert i + 1 - len(sent) < max(map(len, stops)) + max(map(len, stops))


def test_nothing_of_a_stop_string_is_sent() -> None:
    sent, match = feed(["ABC", "DEF", "GH", "IJK"], ["DEFGHIJ"])
    assert sent == ["ABC", "", "", ""]
    assert match == StopMatch("DEFGHIJ", 3, 10)


@pytest.mark.parametrize("pieces", [["one.\n\ntwo"], ["one.", "\n", "\n", "two"], ["one.\n", "\n"]])
def test_two_line_breaks(pieces: list[str]) -> None:
    sent, match = feed(pieces, ["\n\n"])
    assert "".join(sent) == "one."
    assert match is not None


def test_the_earliest_match_wins() -> None:
    text = "At 1 and then k=1 was"
    assert feed([text], ["k=1 was", "1"]) == feed([text], ["1"])
    sent, match = feed(list("so k=1 was"), ["k=1 was", "1"])
    assert ("".join(sent), match) == ("so ", StopMatch("k=1 was", 3, 10))


def test_a_complete_match_waits_for_one_that_began_earlier() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    assert matcher.push("xabcd") == ("x", None)
    assert matcher.push("e") == ("", None)
    assert matcher.push("z") == ("ab", StopMatch("cd", 3, 5))
    matcher = StopMatcher(["abcdef", "cd"])
    matcher.push("xabcd")
    assert matcher.flush() == ("ab", StopMatch("cd", 3, 5))


def test_unarmed_text_does_not_stop_but_may_begin_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b E", armed=False) == ("a END b ", None)
    assert matcher.push("ND", armed=True) == ("", StopMatch("END", 8, 11))


def test_a_stop_complete_while_unarmed_does_not_count_later() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("ab", armed=False) == ("", None)
    assert matcher.push("x", armed=True) == ("abx", None)

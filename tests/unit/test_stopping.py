"""When answers end and what text they show: EOS, stop strings over token seams, length, unfinished characters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.detokenizer import Detokenizer
from shared.sampling.stopping import Completion, Delta, StopMatcher

EOS = 0


def completion(
    tokens: Sequence[str | bytes],
    stops: Sequence[str] = (),
    max_tokens: int = 10_000,
    eos_ids: Sequence[int] = (EOS,),
) -> Completion:
    """A completion over a vocabulary in which token i + 1 is `tokens[i]`; token 0 is EOS."""
    table = [b"", *(token.encode() if isinstance(token, str) else token for token in tokens)]
    return Completion(Detokenizer(table), eos_ids, stops, max_tokens)


def run(answer: Completion, token_ids: Sequence[int]) -> list[Delta]:
    deltas = []
    for token_id in token_ids:
        deltas.append(answer.push(token_id))
        if deltas[-1].finished:
            break
    return deltas


def run_all(tokens: Sequence[str | bytes], stops: Sequence[str] = (), max_tokens: int = 10_000) -> tuple[str, str]:
    """(the visible text, the reason) of these tokens and then EOS."""
    answer = completion(tokens, stops, max_tokens)
    deltas = run(answer, [*range(1, len(tokens) + 1), EOS])
    assert "".join(delta.text for delta in deltas) == answer.text
    assert answer.finished is not None and answer.finished == deltas[-1].finished
    assert answer.token_count == len(deltas)
    return answer.text, answer.finished


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The rule once more, the slow way: the first end of any stop string, the longest one ending there."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


def test_eos_ends_the_answer_and_shows_nothing() -> None:
    answer = completion(["a", "b"])
    assert run(answer, [1, 2, EOS]) == [Delta("a"), Delta("b"), Delta("", "stop")]
    assert (answer.text, answer.token_count) == ("ab", 3)
    with pytest.raises(ValueError, match="ended"):
        answer.push(1)


@pytest.mark.parametrize("eos", [2, 3])
def test_any_of_several_eos_ids_ends_it_even_ordinary_tokens(eos: int) -> None:
    answer = completion(["a", "b", "c"], eos_ids=[2, 3])
    assert run(answer, [1, eos]) == [Delta("a"), Delta("", "stop")]


@pytest.mark.parametrize("position", range(1, 7))
def test_eos_inside_a_block_of_drafts(position: int) -> None:
    """Whoever feeds accepted tokens one by one stops exactly there."""
    answer = completion(["x"])
    block = [1] * 6
    block[position - 1] = EOS
    assert len(run(answer, block)) == position
    assert (answer.text, answer.finished, answer.token_count) == ("x" * (position - 1), "stop", position)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_length_is_exact(max_tokens: int) -> None:
    answer = completion(["x"], max_tokens=max_tokens)
    deltas = run(answer, [1] * 50)
    assert len(deltas) == answer.token_count == max_tokens
    assert (answer.text, answer.finished) == ("x" * max_tokens, "length")
    assert [delta.finished for delta in deltas[:-1]] == [None] * (max_tokens - 1)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_stop_against_length(max_tokens: int) -> None:
    """The stop is complete with the fourth token: before it the length ends the answer, from there on the stop does."""
    tokens = ["a", "b", "<", "> tail", "c", "d", "e"]
    text, reason = run_all(tokens, ["<>"], max_tokens)
    if max_tokens >= 4:
        assert (text, reason) == ("ab", "stop")
    else:
        assert (text, reason) == ("".join(tokens[:max_tokens]), "length")


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    answer = completion(["a"], max_tokens=2)
    assert run(answer, [1, EOS])[-1] == Delta("", "stop")


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "reason"),
    [
        (["The quick br", "own f", "ox jumps"], ["own fox"], "The quick br", "stop"),  # over three tokens
        (["The quick br", "own f", "rog"], ["own fox"], "The quick brown frog", "stop"),  # almost; then EOS
        (["one own fox two"], ["own fox"], "one ", "stop"),  # begins and ends inside one token
        (["ab", "cd", "ef"], ["abcdef", "cd"], "ab", "stop"),  # the one that is complete first
        (["xabc"], ["c", "abc"], "x", "stop"),  # both end there: cut before the longer
        (["aab"], ["ab"], "a", "stop"),
        (["aaa", "ab"], ["aab"], "aa", "stop"),  # the match begins inside what was held back
        (["abab", "abc"], ["ababc"], "ab", "stop"),
        (["stop"], ["stop"], "", "stop"),  # the whole answer
        (["the end", "\n", "\n"], ["\n\n"], "the end", "stop"),
        (["the end\n"], ["\n\n"], "the end\n", "stop"),  # a partial stop is released at EOS
        (["naïve ", "日", "本"], ["日本"], "naïve ", "stop"),
        ([b"\xe6\x97", b"\xa5\xe6\x9c", b"\xac!"], ["本"], "日", "stop"),  # inside characters split over tokens
    ],
)
def test_stop_strings(tokens: list[str | bytes], stops: list[str], text: str, reason: str) -> None:
    assert run_all(tokens, stops) == (text, reason)


def test_the_head_of_a_stop_string_never_leaks() -> None:
    answer = completion(["The quick br", "own f", "ox", "og"], ["own fox"])
    assert [answer.push(i) for i in (1, 2, 3)] == [Delta("The quick br"), Delta(""), Delta("", "stop")]
    answer = completion(["The quick br", "own f", "og"], ["own fox"])
    assert [answer.push(i) for i in (1, 2, 3)] == [Delta("The quick br"), Delta(""), Delta("own fog")]


def test_a_partial_stop_is_released_by_length_and_by_flush() -> None:
    assert run_all(["a ow", "n f"], ["own fox"], max_tokens=2) == ("a own f", "length")
    answer = completion(["a ow", "n f"], ["own fox"])
    run(answer, [1, 2])
    assert answer.flush() == "own f"
    assert (answer.text, answer.finished, answer.flush()) == ("a own f", None, "")
    with pytest.raises(ValueError, match="ended"):
        answer.push(1)


def test_unfinished_characters_wait_and_become_replacement_only_at_the_end() -> None:
    family = "👩‍👩‍👧 🇩🇪 नमस्ते".encode()
    answer = completion([bytes([byte]) for byte in family])
    deltas = run(answer, [*range(1, len(family) + 1), EOS])
    assert answer.text == family.decode()
    assert "\ufffd" not in answer.text
    assert deltas[:4] == [Delta(""), Delta(""), Delta(""), Delta("👩")]
    cut = completion([bytes([byte]) for byte in family], max_tokens=6)
    assert run(cut, range(1, 99))[-1] == Delta("\ufffd", "length")
    assert cut.text == "👩\ufffd"
    ended = completion([b"\xf0\x9f", b"x"])
    assert run(ended, [1, EOS]) == [Delta(""), Delta("\ufffd", "stop")]
    ended_by_a_word = completion([b"\xf0\x9f", "x"], eos_ids=[2])
    assert run(ended_by_a_word, [1, 2]) == [Delta(""), Delta("\ufffd", "stop")]
    assert run_all([b"a\xf0"], ["\ufffd"], max_tokens=1) == ("a", "stop")
    flushed = completion([b"\xf0\x9f"])
    flushed.push(1)
    assert flushed.flush() == "\ufffd"


def test_control_tokens_show_nothing_and_do_not_break_characters_or_stops() -> None:
    assert run_all(["ab", b"", "cd", b"\xe6\x97", b"", b"\xa5"], ["bcd日"]) == ("a", "stop")
    answer = completion(["a"])
    assert answer.push(999) == Delta("")  # an id of the padded part of the vocabulary


@pytest.mark.parametrize("kw", [{"stops": [""]}, {"stops": ["a", ""]}, {"max_tokens": 0}, {"max_tokens": -1}])
def test_what_can_never_work_is_refused(kw: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"empty|max_tokens"):
        completion(["a"], **kw)  # type: ignore[arg-type]


TEXTS = st.text(alphabet="ab日👩\n", max_size=60)
STOPS = st.lists(st.text(alphabet="ab日👩\n", min_size=1, max_size=5), max_size=4)


@given(TEXTS, STOPS, st.lists(st.integers(0, 240), max_size=30))
@settings(max_examples=500, deadline=None)
def test_the_text_does_not_depend_on_where_tokens_begin(text: str, stops: list[str], seams: list[int]) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(seam for seam in seams if seam < len(data))})
    tokens = [data[a:b] for a, b in itertools.pairwise(edges)]
    wanted, stopped = expected(text, stops)
    answer = completion(tokens, stops)
    deltas = run(answer, [*range(1, len(tokens) + 1), EOS])
    assert answer.text == "".join(delta.text for delta in deltas) == wanted
    assert answer.finished == "stop"
    assert stopped == (answer.token_count <= len(tokens))
    shown = ""
    for delta in deltas:  # at no time more is shown than belongs to the answer
        shown += delta.text
        assert wanted.startswith(shown)


@given(TEXTS, STOPS, st.integers(1, 40), st.data())
@settings(max_examples=200, deadline=None)
def test_replaying_gives_the_same_deltas(text: str, stops: list[str], max_tokens: int, data: st.DataObject) -> None:
    tokens = [bytes([byte]) for byte in text.encode()]
    ids = [*range(1, len(tokens) + 1), EOS]
    first = run(completion(tokens, stops, max_tokens), ids)
    crash = data.draw(st.integers(0, len(first)))
    resumed = completion(tokens, stops, max_tokens)
    replayed = run(resumed, ids[:crash])
    assert replayed == first[:crash]
    if not resumed.finished:
        assert run(resumed, ids[crash:]) == first[crash:]


@given(st.text(alphabet="ab", max_size=80), st.text(alphabet="ab", min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_the_matcher_finds_what_find_finds(text: str, stop: str) -> None:
    matcher = StopMatcher(stop)
    for end, char in enumerate(text, start=1):
        if matcher.advance(char):
            assert text.find(stop) == end - len(stop)
            return
        longest = max(n for n in range(len(stop)) if text[:end].endswith(stop[:n]))
        assert matcher.matched == longest
    assert stop not in text


def test_sixteen_long_stops_cost_little() -> None:
    """Text made to match far into every stop string: time grows with the text, not with text times stop."""
    stops = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    answer = completion(["aaaa"], stops)
    begin = time.perf_counter()
    run(answer, [1] * 5000)
    assert time.perf_counter() - begin < 5
    assert answer.text == "a" * (20_000 - 255)


@given(st.text(alphabet="ab", max_size=20), STOPS, st.integers(0, 22))
@settings(max_examples=300, deadline=None)
def test_stop_strings_count_after_so_many_tokens(text: str, stops: list[str], min_tokens: int) -> None:
    """Even where one overlaps another that came too early, or begins before."""
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    wanted = ends[0] if ends else 0
    answer = Completion(Detokenizer([b"", b"a", b"b"]), [EOS], stops, 10_000, min_tokens)
    deltas = run(answer, [1 + "ab".index(char) for char in text] + [EOS])
    cut = max((len(stop) for stop in stops if text[:wanted].endswith(stop)), default=0)
    assert answer.text == "".join(delta.text for delta in deltas) == (text[: wanted - cut] if wanted else text)
    assert answer.token_count == (wanted or len(text) + 1)

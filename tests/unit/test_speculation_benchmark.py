"""The speculation benchmark asks what it says it asks, counts rightly, and refuses what it did not mean to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.bars import judged
from benchmarks.speculation import PARTS, table
from benchmarks.speculation_coupling import Place, compare, curve, plot
from benchmarks.speculation_coupling import row as coupling_row
from benchmarks.speculation_fleet import Answer, How, Pair, useless
from benchmarks.speculation_runs import batch_rate, drafting, rate, row, window_speed
from benchmarks.speculation_sets import Chat, chat_set, edit_set, quote_set
from benchmarks.speculation_texts import Parting, parted, repeated
from shared.config import DEFAULT_MODEL
from shared.engine.draft_head import DraftHead
from shared.engine.weights import resolve
from shared.tokenizer import Tokenizer
from training.drafter.prompts import material

SETS = {"quote": quote_set(), "edit": edit_set(), "chat": chat_set()}
CHAT = Chat("Why?")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(DEFAULT_MODEL))


def answer(*arrivals: tuple[float, int], drafted: int = 0, accepted: int = 0) -> Answer:
    return Answer(tuple(range(arrivals[-1][1])), arrivals, drafted, accepted, ("drafter-1:suffix",) * bool(drafted))


# What is asked


@pytest.mark.parametrize(("name", "least", "most"), [("quote", 270, 800), ("edit", 120, 800), ("chat", 30, 60)])
def test_a_set_has_eight_prompts_of_its_size(tokenizer: Tokenizer, name: str, least: int, most: int) -> None:
    sizes = [len(tokenizer.chat(chat.messages)) for chat in SETS[name]]
    assert len({chat.user for chat in SETS[name]}) == 8
    assert least < min(sizes) and max(sizes) < most


def test_code_to_edit_is_python() -> None:
    for chat in edit_set():
        compile(chat.user.split("```python\n")[1].split("```")[0], "code", "exec")


def test_texts_to_quote_are_there() -> None:
    for chat in quote_set():
        assert "{text}" not in chat.user
        assert len(chat.user) > 800


def test_the_recipe_of_a_drafter_does_not_train_on_these() -> None:
    topics = material().topics
    asked = [chat.user for chats in SETS.values() for chat in chats]
    for text in (*topics["passage"], *topics["code"]):
        assert not any(text[:60] in prompt for prompt in asked)
    assert not {text for kind in material().kinds for text in kind["texts"]} & set(asked)


# What is counted

DRAFTED = answer((10.0, 1), (10.5, 5), (12.0, 9), drafted=12, accepted=6)
PLAIN = answer((20.0, 1), (21.0, 3), (24.0, 9))


def test_speed_is_of_the_tokens_after_the_first_arrival() -> None:
    assert (DRAFTED.tokens, DRAFTED.seconds, DRAFTED.rate) == (8, 2.0, 4.0)
    assert Pair(CHAT, How(9), DRAFTED, PLAIN).speed == 2.0


def test_a_sets_speed_is_of_all_its_tokens_and_all_its_time() -> None:
    slow = answer((0.0, 1), (10.0, 11))
    assert rate([DRAFTED, slow]) == 18 / 12
    values = row([Pair(CHAT, How(9), DRAFTED, PLAIN), Pair(CHAT, How(11), slow, slow)])
    assert values["speed"] == (18 / 12) / (18 / 14)
    assert (values["speed_least"], values["speed_median"], values["speed_most"]) == (1.0, 1.5, 2.0)


def test_accepted_length_counts_the_targets_own_tokens() -> None:
    values = drafting([DRAFTED])
    assert (values["acceptance_rate"], values["mean_accepted_length"], values["drafted_per_token"]) == (0.5, 4.0, 1.5)
    none = drafting([PLAIN])
    assert (none["acceptance_rate"], none["mean_accepted_length"], none["drafted_per_token"]) == (0.0, 1.0, 0.0)


def test_answers_at_once_count_from_when_all_have_begun() -> None:
    early, late = answer((0.0, 1), (1.0, 3), (2.0, 5), (4.0, 9)), answer((2.0, 1), (4.0, 2), (6.0, 5))
    assert batch_rate([early, late]) == ((9 - 5) + (5 - 1)) / 4


def test_a_frozen_window_is_compared_with_the_same_tokens() -> None:
    drafted = answer((0.0, 1), (1.0, 4), (3.0, 6), (5.5, 9), (6.5, 12))
    plain = answer(*((float(i), i + 1) for i in range(20)))
    assert window_speed(drafted, plain, 1.0) == (8 - 3) / (5.5 - 1.0)
    assert window_speed(drafted, plain, 1.2) == (8 - 3) / (5.5 - 1.0)  # the wait in vain is part of it


@pytest.mark.parametrize("frozen_at", [2.0, 5.6])
def test_a_window_that_the_answer_does_not_fill_is_none(frozen_at: float) -> None:
    with pytest.raises(SystemExit, match="while the drafter was frozen"):
        window_speed(answer((0.0, 1), (1.0, 4), (5.5, 9)), PLAIN, frozen_at)


# Texts


def test_texts_part_at_the_first_token_that_differs_or_is_missing() -> None:
    assert parted([1, 2, 3], [1, 2, 3]) is None
    assert parted([1, 2, 3], [1, 5, 3]) == 1
    assert parted([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize(("margin", "tie"), [(0.0, True), (9e-4, True), (2e-3, False), (None, False)])
def test_only_nearly_equal_tokens_are_a_tie(margin: float | None, tie: bool) -> None:
    assert Parting(Pair(CHAT, How(9), DRAFTED, PLAIN), 1, margin).tie is tie


def test_repetition_is_the_share_of_runs_seen_before() -> None:
    assert repeated(range(100)) == 0
    assert repeated([1] * 17) == 0.9
    assert repeated([1] * 7) == 0
    assert repeated([*range(8), *range(8)]) == pytest.approx(1 / 9)


# The useless drafter


def test_the_useless_drafter_fits_the_target_and_knows_nothing(tmp_path: Path) -> None:
    target = resolve(DEFAULT_MODEL)
    useless(target, tmp_path)
    head = DraftHead.load(tmp_path, target, threads=1)
    features = torch.randn(40, head.info.hidden_size, generator=torch.Generator().manual_seed(1))
    likely = head.forward(features, [(5 + i, 7 * i) for i in range(40)])[1].softmax(-1).max(-1)
    assert likely.indices.unique().numel() > 20
    assert 0.1 < float(likely.values.median()) < 0.9


# Shared noise


def test_choices_agree_between_the_bound_and_the_optimum() -> None:
    torch.manual_seed(0)
    target = 2 * torch.randn(40, 30)
    drafter = target + torch.randn(40, 30)
    places = compare(target, drafter, 7, 0.8, range(60))
    p, q = (torch.softmax(logits[3].double() / 0.8, 0) for logits in (target, drafter))
    assert places[3].distance == pytest.approx(float((p - q).abs().sum() / 2))
    values = coupling_row(places)
    assert values["bound"] < values["agreed"] < values["optimum"]
    assert sum(point["positions"] for point in curve(places)) == 40


def test_models_that_are_the_same_always_agree() -> None:
    logits = torch.randn(5, 30)
    assert all(p.agreed == 1 and p.distance < 1e-12 for p in compare(logits, logits, 0, 1.2, range(9)))


def test_a_drafter_may_know_fewer_tokens() -> None:
    target = torch.zeros(1, 10)
    (place,) = compare(target, target[:, :5], 0, 1.0, range(400))
    assert place.distance == pytest.approx(0.5)
    assert place.bound - 0.08 < place.agreed < place.optimum


def test_a_place_has_the_bounds_of_its_distance() -> None:
    assert (Place(0.5, 0.4).bound, Place(0.5, 0.4).optimum) == (0.5 / 1.5, 0.5)


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    points = curve([Place(0.1, 0.9), Place(0.7, 0.2)])
    plot({"curves": {"drafter": points}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# Bars


@pytest.mark.parametrize("part", PARTS)
def test_every_bar_can_be_missed(part: str) -> None:
    bars = PARTS[part].bars
    met = {name: bar for name, (_, bar) in bars.items()}
    assert all(verdict["passed"] for verdict in judged(met, bars).values())
    for name, (sign, bar) in bars.items():
        missed = judged(met | {name: bar + (0.01 if sign == "<=" else -0.01)}, bars)
        assert [n for n, verdict in missed.items() if not verdict["passed"]] == [name]


def test_the_table_says_which_bars_are_missed() -> None:
    result = {
        "cores": 2,
        "load_average_before": 1.0,
        "drafter": {"source": "auto", "model": "the one that comes with Trine"},
        "rows": {"quote": {"speed": 1.2}},
        "bars": judged(
            {"quote_speed": 1.2, "chat_speed": 1.2}, {"quote_speed": (">=", 1.4), "chat_speed": (">=", 1.1)}
        ),
    }
    missed, met = table(json.loads(json.dumps(result))).splitlines()[-2:]
    assert "quote_speed" in missed and missed.endswith("MISSED")
    assert "chat_speed" in met and "MISSED" not in met

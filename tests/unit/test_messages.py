"""The wire: what is accepted, what is refused, and that a refusal names the field."""

from __future__ import annotations

import contextlib
import json
import pickle  # the attack, never the remedy
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import Format, decode, decode_event, encode
from shared.errors import BadMessage, InvalidField, RequestError, TooLarge, UnsupportedVersion, from_code
from shared.messages import (
    MAX_HIDDEN,
    MESSAGE_TYPES,
    Again,
    Attempt,
    Beat,
    Claim,
    DeadLetter,
    Draft,
    DraftAsk,
    DraftItem,
    Drafts,
    Drop,
    Dropped,
    Failed,
    Finished,
    Generate,
    Handover,
    HandoverReply,
    HeldBlocks,
    Identity,
    Message,
    Missed,
    MissedEvent,
    PrefillJob,
    Room,
    Sampling,
    ServedBy,
    Timings,
    Tokens,
    Usage,
)
from shared.subjects import Subjects, block_of, last, model_of, text, token

IDENTITY = Identity(fingerprint="f", codec="none", block_size=16, block_bytes=1024)
EXAMPLES: list[Message] = [
    Generate(id="a1", prompt="Hello", temperature=0, stop=["x", "y"], seed=-5, max_tokens=3, logit_bias={7: -100}),
    Tokens(id="a1", attempt=2, index=4, token_ids=[1, 2], text="é"),
    Finished(
        id="a1",
        reason="stop",
        seed=7,
        usage=Usage(prompt_tokens=3),
        timings=Timings(ttft_ms=1.5),
        served_by=ServedBy(decode="d1", prefill=["p1"]),
    ),
    Failed(id="a1", code="too_large", message="no", field="prompt"),
    PrefillJob(request="t/a1", tenant="t", fingerprint="f", token_ids=[1, 2], budget_ms=10),
    DraftAsk(
        worker="d1",
        wait_ms=1.5,
        items=[
            DraftItem(
                session="a1",
                base=0,
                token_ids=[1],
                k=4,
                sampling=Sampling(seed=3, logit_bias={0: 1.5, 49151: -100}, min_tokens=4, presence_penalty=-1),
                prompt_len=1,
                hidden=b"\x00<",
            )
        ],
    ),
    Drafts(worker="x", drafts=[Draft(session="a1", position=1, token_ids=[1], source="suffix")]),
    Beat(role="decode", worker="d1", identity=IDENTITY, counters={"x": 1}),
    Handover(worker="d1", handle="$JS.ACK.S.c.1.2.3.4.0", subject="trine.m.req.low", request=b"{}"),
    HandoverReply(taken=True),
    HeldBlocks(worker="d1", rate=0, names=b"n" * 8),
    Again(after=3),
    Missed(events=[MissedEvent(seq=4, request="7", data=b"{}")], more=False),
    Drop(scope="acme"),
    Dropped(worker="d1", pool_blocks=3, host_blocks=2),
    Claim(worker="d1", names=b"n" * 32, ended=[7]),
    Attempt(attempt=2, worker="d1", life="ab", busy=True),
    Room(queued=3, capacity=3, retry_ms=250),
    DeadLetter(
        id="a1",
        tenant="acme",
        subject="trine.m.req.low.acme",
        request=b"{}",
        code="poison",
        reason="given up",
        attempts=2,
        workers=["d1", "d2"],
        at=1.5,
    ),
]


def request(**fields: Any) -> dict[str, Any]:
    return {"id": "a1", "prompt": "Hello", **fields}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_msgpack_round_trip(message: Message) -> None:
    assert decode(encode(message), type(message)) == message


def test_every_message_has_an_example() -> None:
    assert {type(m) for m in EXAMPLES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("message", EXAMPLES[:4], ids=lambda m: type(m).__name__)
def test_clients_may_speak_json(message: Message) -> None:
    data = encode(message, Format.JSON)
    assert json.loads(data)["id"] == "a1"
    assert decode(data, type(message)) == message


@pytest.mark.parametrize("message", EXAMPLES[4:], ids=lambda m: type(m).__name__)
def test_workers_do_not(message: Message) -> None:
    with pytest.raises(BadMessage):
        decode(encode(message, Format.JSON), type(message))


@pytest.mark.parametrize("event", EXAMPLES[1:4], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("format", list(Format))
def test_events_are_told_apart(event: Message, format: Format) -> None:
    assert decode_event(encode(event, format)) == event


def test_the_smallest_json_request_is_enough() -> None:
    generate = decode(b'{"id":"a1","prompt":"x"}', Generate)
    assert generate.sampling == Sampling()
    assert generate.stops == ()


BAD_FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": 5}, "stop"),
    ({"id": ""}, "id"),
    ({"id": "x" * 129}, "id"),
    ({"unknown_field": 1}, "unknown_field"),
    ({"messages": []}, None),
    ({"token_ids": [1]}, None),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None, "token_ids": [True]}, "token_ids.0"),
    ({"prompt": None, "token_ids": [1.5]}, "token_ids.0"),
    ({"prompt": None, "token_ids": [[1]]}, "token_ids.0"),
    ({"prompt": None, "messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "messages.0.content"),
    ({"type": "tokens"}, "type"),
    *(
        ({name: value}, name)
        for name, wrong in {
            "frequency_penalty": (-2.1, 2.1),
            "presence_penalty": (-3, 5),
            "repetition_penalty": (0, -1, 10.5),
            "min_p": (-0.1,),
        }.items()
        for value in (*wrong, float("nan"), float("inf"), 1e308, "1", True, [1.0])
    ),
    *(
        ({"logit_bias": bias}, "logit_bias")
        for bias in (
            *({"5": value} for value in (-100.5, 1e9, float("nan"), float("-inf"), "1", None, True)),
            *({key: 1} for key in ("-1", "abc", "1e9", "1.0", "", "05", " 5", str(2**31), "9" * 5000)),
            {str(n): 1 for n in range(1025)},
            {str(n): 1 for n in range(100_000)},
            [1],
            "5",
        )
    ),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 257}, "min_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": "true"}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "blamed"), BAD_FIELDS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("format", list(Format))
def test_a_bad_field_is_named(fields: dict[str, Any], blamed: str | None, format: Format) -> None:
    body = request(**fields)
    if format is Format.MSGPACK:
        try:
            data = msgpack.packb(body)
        except OverflowError:
            pytest.fail("the example does not fit msgpack")
    else:
        data = json.dumps(body).encode()
    with pytest.raises(InvalidField) as caught:
        decode(data, Generate)
    assert len(caught.value.message) < 500
    if blamed:
        assert caught.value.field is not None
        assert caught.value.field.startswith(blamed)


NULLABLE = sorted(Generate.model_fields.keys() - {"v", "type", "id", "prompt"})


@pytest.mark.parametrize("null", NULLABLE)
def test_null_means_the_default(null: str) -> None:
    assert decode(json.dumps(request(**{null: None})).encode(), Generate) == decode(
        json.dumps(request()).encode(), Generate
    )


@pytest.mark.parametrize("format", list(Format))
def test_all_that_may_be_said_about_sampling(format: Format) -> None:
    fields = {
        "temperature": 0,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "repetition_penalty": 10,
        "logit_bias": {str(n): n % 201 - 100 for n in range(1024)},
        "min_tokens": 5,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 20,
    }
    body = request(**fields)
    generate = decode(json.dumps(body).encode() if format is Format.JSON else msgpack.packb(body), Generate)
    assert generate.sampling == Sampling(
        temperature=0.0,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        repetition_penalty=10.0,
        logit_bias={n: n % 201 - 100.0 for n in range(1024)},
        min_tokens=5,
    )
    assert decode(encode(generate, format), Generate) == generate
    assert json.loads(encode(generate, Format.JSON))["logit_bias"]["1023"] == 1023 % 201 - 100


UNREADABLE = {
    "empty": b"",
    "non-UTF-8": b'{"id":"a1","prompt":"\xff\xfe"}',
    "a pickle": pickle.dumps({"id": "a1", "prompt": "x"}),
    "deep JSON": b'{"id":"a1","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep msgpack": b"\x91" * 100_000,
    "not a map": msgpack.packb([1, 2]),
    "an extension type": msgpack.packb({"id": msgpack.ExtType(4, b"x")}),
    "a huge array header": b"\xdd\xff\xff\xff\xff",
    "a huge map header": b"\xdf\xff\xff\xff\xff",
    "integer keys": msgpack.packb({1: 2}),
    "half a message": encode(EXAMPLES[0])[:10],
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_bytes_are_refused(name: str) -> None:
    with pytest.raises(BadMessage):
        decode(UNREADABLE[name], Generate)


def test_an_oversized_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLarge):
        decode(b"{" + b" " * Generate.max_bytes, Generate)


@pytest.mark.parametrize("format", list(Format))
def test_an_unknown_version_is_refused_by_name(format: Format) -> None:
    message = EXAMPLES[0].model_copy(update={"v": 2})
    with pytest.raises(UnsupportedVersion):
        decode(encode(message, format), Generate)
    newer = {**message.model_dump(exclude_none=True), "new_field": 1}
    data = json.dumps(newer).encode() if format is Format.JSON else msgpack.packb(newer)
    with pytest.raises(RequestError):
        decode(data, Generate)


def test_what_a_later_worker_adds_to_an_end_or_a_beat_is_passed_over() -> None:
    end = Finished(id="a", reason="stop", seed=1, usage=Usage(prompt_tokens=3), timings=Timings(), served_by=ServedBy())
    newer: dict[str, Any] = end.model_dump(exclude_none=True)
    for part in ("usage", "timings", "served_by"):
        newer[part]["new_field"] = 1
    assert decode(msgpack.packb(newer), Finished) == end
    beat = Beat(role="decode", worker="d1", identity=IDENTITY)
    later: dict[str, Any] = beat.model_dump(exclude_none=True) | {"new_field": 1}
    later["load"]["new_field"] = 1
    assert decode(msgpack.packb(later), Beat) == beat


def test_a_hidden_state_has_a_largest_size() -> None:
    beat = Beat(role="drafter", worker="x", hidden_size=MAX_HIDDEN)
    item = DraftItem(session="a", base=0, token_ids=[1], k=1, sampling=Sampling(), hidden=bytes(2 * MAX_HIDDEN))
    ask = DraftAsk(worker="d", wait_ms=1.0, items=[item])
    assert decode(encode(beat), Beat) == beat and decode(encode(ask), DraftAsk) == ask
    larger = item.model_copy(update={"hidden": bytes(2 * MAX_HIDDEN + 1)})
    for field, message in {
        "hidden_size": beat.model_copy(update={"hidden_size": MAX_HIDDEN + 1}),
        "items.0.hidden": ask.model_copy(update={"items": [larger]}),
    }.items():
        with pytest.raises(InvalidField) as caught:
            decode(encode(message), type(message))
        assert caught.value.field == field


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for kind in MESSAGE_TYPES:
        with contextlib.suppress(RequestError):
            decode(data, kind)


def test_error_codes_come_back_as_the_same_error() -> None:
    error = from_code("too_large", "no", "prompt")
    assert isinstance(error, TooLarge)
    assert error.field == "prompt"
    assert from_code("from_the_future", "x").code == "from_the_future"


class TestSubjects:
    @given(st.text(min_size=1, max_size=40).filter(lambda s: "\ud800" not in s))
    def test_any_text_is_one_token_and_comes_back(self, value: str) -> None:
        spelled = token(value)
        assert not set(spelled) & set(".*> \t\r\n")
        assert text(spelled) == value

    def test_ids_cannot_widen_or_collide(self) -> None:
        assert token("a.b") != token("a=2Eb")
        assert token("*") == "=2A"
        with pytest.raises(ValueError, match="empty"):
            token("")

    def test_what_is_spelled_can_be_read(self) -> None:
        subjects = Subjects("Org/Model v1.5")
        assert model_of(subjects.request("high")) == "Org/Model v1.5"
        assert last(subjects.events("a.b*")) == "a.b*"
        assert block_of(subjects.block(b"\1" * 32, 3)) == ("default", b"\1" * 32, 3)
        with pytest.raises(ValueError, match="not a block"):
            block_of("trine.m.tok.x.y.z")
        with pytest.raises(ValueError, match="priority"):
            subjects.request("urgent")


def test_a_draft_has_a_chance_for_each_token_or_none() -> None:
    draft = {"session": "s", "position": 1, "token_ids": [1, 2], "source": "x"}
    assert Draft.model_validate({**draft, "chances": [0.5, 1.0]}).chances == [0.5, 1.0]
    for chances in ([0.5], [0.5, 1.5], [0.5, -0.1], [0.5, float("nan")], [0.1] * 3):
        with pytest.raises(ValueError, match="chances"):
            Draft.model_validate({**draft, "chances": chances})

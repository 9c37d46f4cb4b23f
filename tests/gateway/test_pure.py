"""The gateway's parts that need neither a fleet nor a clock."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from services.gateway import body, sse
from services.gateway.config import GatewaySettings
from services.gateway.fleet import Fleet
from services.gateway.gateway import Gateway
from services.gateway.keys import OPEN, KeyTable
from services.gateway.limits import Admission, TokenBucket
from services.gateway.problems import Problem, problem_of
from services.gateway.requests import Kind, chat_call, derived_seed, text_call
from services.gateway.shapes import Shape, usage_of
from services.gateway.token_texts import TokenTexts
from shared import errors
from shared.bus.base import Incoming
from shared.codec import encode
from shared.errors import BadMessage, ConfigError, InvalidField, TrineError
from shared.messages import Beat, Usage
from shared.sampling.fields import Logprob
from shared.subjects import Subjects
from trine.merge import Delta
from trine.roster import MAX_MODELS
from trine.submit import prepare


def chat(**fields: Any) -> Any:
    return chat_call({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, **LIMITS)


LIMITS = {"max_messages": 3, "max_choices": 4}
VALUES = st.recursive(
    st.text() | st.integers(-9, 9) | st.none(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=10
)


class TestRequests:
    def test_everything_that_the_engine_knows_arrives(self) -> None:
        given: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "min_tokens": 2,
            "seed": 7,
            "stop": ["a", "b"],
            "logit_bias": {"5": -100},
            "frequency_penalty": 1,
            "presence_penalty": -1,
            "repetition_penalty": 1.1,
            "cache_salt": "s",
            "priority": 5,
            "max_completion_tokens": 9,
            "logprobs": True,
            "top_logprobs": 3,
        }
        call = chat(**given, stream=True, stream_options={"include_usage": True})
        assert (call.kind, call.model, call.stream, call.include_usage) == (Kind.CHAT, "m", True, True)
        (choice,) = call.choices
        sent = {**given, "top_k": 0, "logit_bias": {5: -100}, "priority": "low", "max_tokens": 9}
        del sent["max_completion_tokens"]
        assert choice.fields == {**sent, "messages": [{"role": "user", "content": "x"}]}
        fields = {name: value for name, value in choice.fields.items() if name != "priority"}
        prepare("m", "default", "low", None, fields, 1 << 20)  # and is accepted there

    def test_unset_is_left_to_the_worker(self) -> None:
        assert set(chat(temperature=None).choices[0].fields) == {"messages", "priority"}

    def test_seeds(self) -> None:
        seeds = [choice.fields["seed"] for choice in chat(n=3, seed=-5).choices]
        assert seeds[0] == -5 and len(set(seeds)) == 3
        assert [derived_seed(-5, i) for i in range(3)] == seeds
        assert all("seed" not in choice.fields for choice in chat(n=3).choices)

    def test_choices_of_several_prompts(self) -> None:
        call = text_call({"model": "m", "prompt": [[1], [2, 3]], "n": 2, "seed": 1}, max_choices=4)
        assert [(c.prompt, c.fields["token_ids"]) for c in call.choices] == [(0, [1])] * 2 + [(1, [2, 3])] * 2
        seeds = [c.fields["seed"] for c in call.choices]
        assert seeds[:2] == seeds[2:] and seeds[0] == 1  # each prompt as if asked for alone

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 5}, "n"),
            ({"messages": [{"role": "user", "content": "x"}] * 4}, "messages"),
            ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
            ({"ignore_eos": True, "stop": "x"}, "ignore_eos"),
            ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
            ({"stream": 1}, "stream"),
            ({"store": 0}, "store"),  # equal to False, and not it
            ({"x" * 100: 1}, "x" * 64),
        ],
    )
    def test_refusals(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidField) as told:
            chat(**fields)
        assert told.value.field == param

    def test_an_earlier_answer_may_be_sent_back_whole(self) -> None:
        earlier: dict[str, Any] = {
            "role": "assistant",
            "content": "y",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
        }
        assert chat(messages=[earlier]).choices[0].fields["messages"] == [{"role": "assistant", "content": "y"}]


class TestBody:
    @given(
        st.recursive(st.text() | st.integers(-9, 9) | st.none(), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
    )
    def test_json_is_read_as_it_is(self, value: Any) -> None:
        data = json.dumps({"v": value}, ensure_ascii=False).encode()
        assert body.parse(data, 200) == {"v": value}

    def test_depth(self) -> None:
        assert body.parse(b'{"a":[[1]], "b": "[[[["}', 3) == {"a": [[1]], "b": "[[[["}
        for data in (b'{"a":[[1]]}', b'{"a":["\\"", [1]]}'):
            with pytest.raises(BadMessage, match="more than 2 deep"):
                body.parse(data, 2)

    @given(st.binary(max_size=60))
    def test_any_bytes_end_in_an_object_or_a_bad_message(self, data: bytes) -> None:
        with contextlib.suppress(BadMessage):
            assert isinstance(body.parse(b"{" + data, 32), dict)


class TestEventIds:
    @given(st.lists(st.tuples(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1)), min_size=1, max_size=128))
    def test_they_are_read_as_written(self, places: list[tuple[int, int]]) -> None:
        base, positions = f"chatcmpl-{'a1' * 16}", [sse.Position(*place) for place in places]
        assert sse.parse_event_id(sse.event_id(base, positions)) == (base, positions)

    def test_an_event_is_one_line_of_ascii_and_has_no_nan(self) -> None:
        assert sse.event({"a": "ü\n\u2028"}, "x:1.2") == b'id: x:1.2\ndata: {"a":"\\u00fc\\n\\u2028"}\n\n'
        with pytest.raises(ValueError, match="JSON"):
            sse.event({"a": float("nan")})


class TestKeys:
    def test_plain_and_hashed(self) -> None:
        digest = hashlib.sha256(b"another-key-0123456").hexdigest()
        table = KeyTable.parse(f"# ours\nacme:some-key:0123456789\nglobex:sha256:{digest}\n")
        assert table.caller("Bearer some-key:0123456789").tenant == "acme"
        assert table.caller("bearer another-key-0123456").tenant == "globex"
        assert "0123456" not in repr(vars(table))
        for wrong in (None, "", "Bearer", "Bearer some-key:012345678", f"Bearer {digest}", "Basic some-key:0123456789"):
            with pytest.raises(Problem) as told:
                table.caller(wrong)
            assert told.value.status == 401

    def test_without_keys_all_are_one(self) -> None:
        assert KeyTable.parse("\n# none\n").caller("Bearer x") is OPEN

    @pytest.mark.parametrize(
        "text",
        [
            "no-tenant-0123456789",
            "a b:0123456789012345",
            "a:short-secret",
            "a:k2345678901234567,b:k2345678901234567",
        ],
    )
    def test_bad_entries_are_refused_and_not_repeated(self, text: str) -> None:
        with pytest.raises(ConfigError) as told:
            KeyTable.parse(text)
        assert text.rsplit(":", maxsplit=1)[-1] not in told.value.message

    def test_a_file_without_a_key_lets_nobody_in_by_mistake(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# later\n")
        for path in (file, tmp_path / "none"):
            with pytest.raises(ConfigError, match="TRINE_API_KEYS_FILE"):
                Gateway(GatewaySettings(api_keys_file=str(path)))
        file.write_text("acme:0123456789abcdef\n")
        gateway = Gateway(GatewaySettings(api_keys_file=str(file), api_keys=SecretStr("b:0123456789abcdefg")))
        assert len(gateway.keys) == 2 and "0123456789" not in repr(gateway.settings)


class TestLimits:
    @given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 9)), max_size=40))
    def test_never_more_than_the_rate_and_a_burst(self, asks: list[tuple[float, int]]) -> None:
        bucket, now, passed = TokenBucket(2.0, 5, 0.0), 0.0, 0
        for pause, count in asks:
            now += pause
            wait = bucket.take(count, now)
            passed += 0 if wait else count
            assert passed <= 5 + 2.0 * now + (9 - 5) + 1e-6  # one may overdraw by what is more than a burst
            assert 0 <= wait <= 10

    def test_who_waits_as_told_is_let_in(self) -> None:
        bucket = TokenBucket(0.5, 1, 10.0)
        assert bucket.take(1, 10.0) == 0
        wait = bucket.take(1, 11.0)
        assert wait == pytest.approx(1.0)
        assert bucket.take(1, 11.0 + wait) == 0
        assert bucket.take(1, 0.0) > 0  # a clock that goes back gives nothing away

    def test_keys_do_not_get_in_each_others_way(self) -> None:
        admission = Admission(2, 0, 1)
        leave = admission.enter("a", 2, 0.0)
        with pytest.raises(Problem):
            admission.enter("a", 1, 0.0)
        admission.enter("b", 2, 0.0)
        leave()
        admission.enter("a", 1, 0.0)
        assert admission.running == 3


def beat(model: str, worker: str = "d-1", role: Any = "decode", **more: Any) -> Incoming:
    subject = Subjects(model).beat(role, worker)
    return Incoming(subject, encode(Beat(role=role, worker=worker, **more)), "", {})


class TestFleet:
    def test_who_is_served(self) -> None:
        fleet = Fleet(3.0)
        with pytest.raises(Problem) as nobody:
            fleet.require("m", 0.0)
        fleet.hear(beat("other.1"), 0.0)
        with pytest.raises(Problem, match=r"no model 'm' is served here; running: other\.1") as other:
            fleet.require("m", 0.0)
        fleet.hear(beat("m"), 1.0)
        fleet.require("m", 3.9)
        with pytest.raises(Problem, match="no decode worker for model 'm' is heard") as gone:
            fleet.require("m", 5.0)
        assert [told.value.status for told in (nobody, other, gone)] == [503, 404, 503]

    def test_one_that_drains_takes_nothing_and_finishes(self) -> None:
        fleet = Fleet(3.0)
        fleet.hear(beat("m", draining=True), 0.0)
        assert fleet.served(1.0) == {} and fleet.answering("m", 1.0)

    def test_other_roles_do_not_serve_and_lies_are_passed_over(self) -> None:
        fleet = Fleet(3.0)
        fleet.hear(beat("m", "p-1", "prefill"), 0.0)
        fleet.hear(Incoming("trine.m.beat.decode.x", beat("m").data, "", {}), 0.0)  # on another one's subject
        fleet.hear(Incoming("trine.m.beat.decode.x", b"\xff", "", {}), 0.0)
        fleet.hear(Incoming("trine.=zz.beat.decode.d-1", beat("m").data, "", {}), 0.0)
        assert fleet.served(0.0) == {}
        for number in range(2 * MAX_MODELS):
            fleet.hear(beat(f"m{number}"), 0.0)
        assert len(fleet.served(0.0)) <= MAX_MODELS


class TestShapes:
    def test_usage_counts_a_prompt_once(self) -> None:
        usages = [
            Usage(prompt_tokens=10, cached_tokens=c, completion_tokens=4, drafted_tokens=6, accepted_tokens=2)
            for c in (0, 8, 8)
        ]
        usage = usage_of(usages, [0, 0, 1])
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (20, 12, 32)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
        assert usage["completion_tokens_details"] == {
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 12,
        }

    def test_texts_of_tokens(self) -> None:
        texts = TokenTexts({1: "ü".encode()[:1], 2: b" cat"})
        delta = Delta(" cat", (1, 2, 3), 0, (Logprob(logprob=-1.0, top_ids=[2], top_logprobs=[-0.5]),) * 3)
        chunk = Shape(Kind.CHAT, "i", 0, "m", texts).delta(0, delta, 0)
        content = chunk["choices"][0]["logprobs"]["content"]
        assert [(t["token"], t["bytes"]) for t in content] == [
            ("\ufffd", [0xC3]),
            (" cat", [32, 99, 97, 116]),
            ("token_id:3", None),
        ]
        assert content[0]["top_logprobs"] == [{"token": " cat", "logprob": -0.5, "bytes": [32, 99, 97, 116]}]
        listed = Shape(Kind.TEXT, "i", 0, "m", texts).delta(0, delta, 10)["choices"][0]["logprobs"]
        assert listed["text_offset"] == [10, 11, 15]


def test_every_error_has_a_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrineError)]
    statuses = {kind.code: problem_of(kind("x", field="token_ids.3")).status for kind in kinds}
    assert set(statuses.values()) == {400, 404, 413, 500, 503, 504}
    assert (
        statuses.items()
        >= {
            **dict.fromkeys(("invalid_request", "bad_message", "unsupported_version", "invalid_field"), 400),
            **dict.fromkeys(("empty_prompt", "context_length_exceeded", "duplicate_request"), 400),
            **dict.fromkeys(("unknown_model", "not_kept"), 404),
            **dict.fromkeys(("unavailable", "overloaded", "bus", "bus_disconnected", "stream_missing"), 503),
            **dict.fromkeys(("sequence_conflict", "stream_full", "permission_denied"), 503),
            "too_large": 413,
            "deadline_exceeded": 504,
            "poison": 500,
        }.items()
    )
    full = errors.Overloaded("x")
    full.retry_after_s = 2.1
    assert problem_of(full).headers["retry-after"] == "3"
    assert problem_of(InvalidField("x", field="token_ids.3")).body["error"]["param"] == "prompt.3"

"""What the options of `trine generate` and `trine chat` ask for, and what a conversation is. Pure."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidField
from shared.messages import Generate, Sampling, ServedBy, Usage
from trine import chat_cli, demo
from trine.chat import COMMANDS, Conversation
from trine.chat_cli import chat
from trine.completion import ClientTimings, Completion
from trine.generate_cli import generate
from trine.request_options import OPTIONS, request_fields


def asked(**given: Any) -> dict[str, Any]:
    return request_fields({**dict.fromkeys(OPTIONS), **given})


def test_every_sampling_field_of_the_protocol_has_an_option() -> None:
    assert set(Sampling.model_fields) <= set(OPTIONS)
    said = {"v", "type", "id", "model", "prompt", "messages", "deadline_ms", "guided"}
    assert set(Generate.model_fields) - set(OPTIONS) - said == {"token_ids", "tools", "logprobs", "top_logprobs"}
    for command in (generate, chat):
        assert set(OPTIONS) < set(inspect.signature(command).parameters)


def test_only_what_is_given_is_asked_for(tmp_path: Path) -> None:
    assert asked() == {}
    assert asked(temperature=0.0, stop=["a", "b"], logit_bias=["5=-100", "7=1.5"], timeout=0.25, cache_salt="s") == {
        "temperature": 0.0,
        "stop": ["a", "b"],
        "logit_bias": {5: -100.0, 7: 1.5},
        "deadline_ms": 250,
        "cache_salt": "s",
    }
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.gbnf"
    schema.write_text(json.dumps({"type": "object"}))
    grammar.write_text('root ::= "x"')
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"json_schema": schema}, {"json_schema": {"type": "object"}}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"grammar": grammar}, {"grammar": 'root ::= "x"'}),
    ]
    for given, form in forms:
        fields = asked(**given)
        assert fields == {"guided": form}
        Generate(id="a", prompt="x", **fields)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": ["5:1"]}, "--logit-bias: TOKEN=BIAS, such as 50256=-100"),
        ({"regex": "a", "choice": ["b"]}, "--regex and --choice: give one of them"),
        ({"json_schema": Path("/no/such")}, "--json-schema: cannot read /no/such: No such file or directory"),
        ({"json_schema": Path(__file__)}, "is not JSON"),
    ],
)
def test_what_is_wrong_is_said_with_the_option(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=message.replace("+", r"\+")):
        asked(**given)


def test_a_conversation() -> None:
    talk = Conversation("Be brief.")
    assert [m["content"] for m in talk.asked("one")] == ["Be brief.", "one"]
    talk.answered("one", "first", None)
    talk.answered("two", "", None)
    assert [m["content"] for m in talk.asked("three")] == ["Be brief.", "one", "first", "three"], "two had no answer"
    assert talk.command("/system") == "no system message"
    assert talk.command("/stats") == "no complete answer yet"
    timings = ClientTimings(ttft_ms=12, tpot_ms=20, total_ms=100, queue_ms=1, transfer_ms=0, prefill_ms=5)
    usage = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=3, drafted_tokens=4, accepted_tokens=1)
    talk.answered("x", "y", Completion("i", "m", "y", (1,), "stop", 1, usage, timings, ServedBy(decode="d-1"), 1))
    said = talk.command("/stats") or ""
    assert said.startswith(
        "first token after 12 ms, 50.0 tokens/s; 3 tokens, 8 of 9 prompt tokens cached; 1 of 4 drafts"
    )
    assert talk.command("/undo") == "1 questions are left"
    assert talk.command("/new") == "a new conversation"
    assert talk.asked("z") == [{"role": "user", "content": "z"}]
    assert all(command.split()[0] in (talk.command("/help") or "") for command in COMMANDS)
    assert talk.command("/nope") == "no command /nope; /help lists them"
    assert talk.command("/quit") is None


def test_what_others_wrote_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    chat_cli._say("d-1\x1b[2J")
    demo._write("a\x1b]0;b\x07", show=True)
    said = capsys.readouterr()
    assert (said.err, said.out) == ("d-1\ufffd[2J\n", "a\ufffd]0;b\ufffd")

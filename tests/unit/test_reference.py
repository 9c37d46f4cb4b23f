"""docs/protocol-reference.md and docs/asyncapi.yaml say what the code says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from shared.messages import MESSAGE_TYPES
from shared.subjects import Subjects
from trine.reference import files
from trine.reference_asyncapi import asyncapi
from trine.reference_channels import BLOCK_FRAME, MODEL, channels, hearers, matches, publishers, samples, streams
from trine.reference_schemas import schemas, told

FILES = files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_file_is_up_to_date(path) -> None:
    assert path.read_text("utf-8") == FILES[path], "run python -m trine.reference"


def _given(name: str) -> Any:
    values = {"priority": "normal", "name": b"\xab" * 32, "seq": 1, "stamp": 2, "part": 0, "role": "decode"}
    return values.get(name, "x")


def spelled() -> dict[str, list[str]]:
    """All subjects that `Subjects` can spell, by the attribute that does."""
    subjects = Subjects(MODEL)
    found = {}
    for name, member in inspect.getmembers(Subjects):
        if name.startswith("_") or name.endswith(("_stream", "_consumer")) or name in ("model", "prefix"):
            continue
        if isinstance(member, property):
            said = getattr(subjects, name)
        else:
            said = getattr(subjects, name)(*map(_given, list(inspect.signature(member).parameters)[1:]))
        found[name] = [said] if isinstance(said, str) else list(said)
    return found


def test_every_subject_is_in_the_reference() -> None:
    known = [subject for channel in channels() for subject in samples(channel)]
    subjects = spelled()
    assert len(subjects) > 20
    for name, said in subjects.items():
        for subject in said:
            # An exact subject is compared token by token, since ids differ; a pattern must cover a known one.
            kind = subject.split(".")[:3]
            covered = any(matches(subject, k) or (k.split(".")[:3] == kind and _alike(k, subject)) for k in known)
            assert covered, f"{name}: {subject}"


def _alike(one: str, other: str) -> bool:
    return len(one.split(".")) == len(other.split("."))


def test_every_message_and_every_stream_is_in_the_reference() -> None:
    said = {m for channel in channels() for m in (*channel.messages, channel.reply) if m is not None}
    assert said == {*MESSAGE_TYPES, BLOCK_FRAME}
    assert {channel.stream for channel in channels()} - {""} == set(streams())


def test_who_may_is_who_trine_access_lets() -> None:
    by_name = {channel.name: channel for channel in channels()}
    assert publishers(by_name["drop"]) == ["operator"]
    assert hearers(by_name["events"]) == ["gateway", "tenant"]
    assert publishers(by_name["beats"]) == ["prefill", "decode", "drafter"]
    assert all(publishers(channel) for channel in channels())


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [r for v in value.values() for r in references(v)]
    return [r for v in value for r in references(v)] if isinstance(value, list) else []


def test_asyncapi_is_whole() -> None:
    document = asyncapi()
    assert references(document)
    for reference in references(document):
        at: Any = document
        for key in reference.removeprefix("#/").split("/"):
            at = at[key]
    for channel in document["channels"].values():
        named = [part[1:-1] for part in (channel["address"] or "").replace("-", ".").split(".") if part[:1] == "{"]
        assert set(named) == set(channel.get("parameters", {}))


def test_bounds_in_words() -> None:
    fields = schemas()["Generate"]["properties"]
    assert told(fields["id"]) == "text, 1 to 128 characters"
    assert told(fields["temperature"]) == "number, from 0 to 100 or null"
    assert "same salt" in fields["cache_salt"]["description"]

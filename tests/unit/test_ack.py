"""The subjects on which JetStream's deliveries are acked."""

from __future__ import annotations

import pytest

from shared.bus.ack import Ack, parse_ack, parse_handle
from shared.errors import BusError, InvalidField

SHORT = "$JS.ACK.S.c.2.7.3.1700000000000000000.5"
LONG = "$JS.ACK.hub.ACCHASH.S.c.2.7.3.1700000000000000000.5"
EXPECTED = Ack("S", "c", 2, 7, 3, 1_700_000_000_000_000_000)


@pytest.mark.parametrize("subject", [SHORT, LONG, f"{LONG}.r4nd", "$JS.ACK._.ACCHASH.S.c.2.7.3.1700000000000000000.0"])
def test_every_form_is_read(subject: str) -> None:
    assert parse_ack(subject) == EXPECTED
    assert parse_handle("S", subject) == EXPECTED


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "trine.m.req.high",
        f"{SHORT}.x",  # ten tokens are neither form
        SHORT.replace("$JS", "$js"),
        SHORT.replace(".c.", "..") + ".5",
        SHORT.replace(".c.", ".>."),
        SHORT.replace(".c.", ".c\t."),
        SHORT.replace(".c.", ".c\x00."),
        SHORT.replace(".c.", ".c\r\nPUB x 0\r\n."),
        SHORT.replace(".c.", ".ü."),
        SHORT.replace(".7.", ".\u0667."),  # a digit, but not an ASCII one
        SHORT.replace(".7.", ".+7."),
        SHORT.replace(".7.", f".{'7' * 21}."),
        SHORT.replace(".2.", ".0."),
        SHORT.replace("c", "c" * 1100),
        LONG.replace("hub", "*"),
        f"{LONG}.*",
        f"{SHORT}\n",
    ],
)
def test_nothing_else_is(subject: str) -> None:
    with pytest.raises(BusError):
        parse_ack(subject)
    with pytest.raises(InvalidField) as caught:
        parse_handle("S", subject)
    assert caught.value.field == "handle"


@pytest.mark.parametrize("stream", ["T", "hub", "c", ""])
def test_a_handle_of_another_stream_is_refused(stream: str) -> None:
    for subject in (SHORT, LONG):
        with pytest.raises(InvalidField):
            parse_handle(stream, subject)

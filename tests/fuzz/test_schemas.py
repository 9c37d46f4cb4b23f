"""Bodies that fit a message's schema, and such as all but do: the message, which says the same again, or its error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.messages import MESSAGE_TYPES, Message
from tests.fuzz.schemas import bodies, check_body, nearly

CALM = settings(deadline=None, database=None, max_examples=15, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", MESSAGE_TYPES)
def test_bodies_give_the_message_or_its_error(kind: type[Message]) -> None:
    taken = []

    @CALM
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        taken.append(check_body(kind, data.draw(bodies(kind))))
        check_body(kind, data.draw(nearly(kind)))

    holds()
    assert any(taken), "no body that fits the schema was taken: nothing is shown"

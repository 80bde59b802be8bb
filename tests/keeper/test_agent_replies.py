"""What a kernel's agent answers is checked where it enters: the user's code can write there, too."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpuckpt.errors import Refused, SaveFailed
from jupyter_gpuckpt.keeper.agent_replies import Faults, ReadyForSave, ReadyForSleep, checked_reply, faults_in


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "it is None, and not an object"),
        ({"cells": "3"}, "cells is '3', and not int"),
        ({"temporary": ["/tmp/a", 3]}, "temporary[1] is 3, and not str"),
        ({"peers": {"total": None}}, "peers.total is None, and not int"),
    ],
)
def test_a_save_is_refused_where_the_answer_is_odd(answer: Any, why: str) -> None:
    with pytest.raises(SaveFailed) as caught:
        checked_reply(ReadyForSave, answer, SaveFailed, "The kernel was not saved.")
    assert (caught.value.what, why in caught.value.why) == ("The kernel was not saved.", True)


def test_a_sleep_needs_to_know_of_hooks() -> None:
    with pytest.raises(Refused, match="hooks is missing"):
        checked_reply(ReadyForSleep, {"peers": {}}, Refused, "Not asleep.")


def test_earlier_agents_say_less_and_later_ones_more() -> None:
    assert checked_reply(ReadyForSave, {"cells": 3, "invented": 1}, SaveFailed, "") == ReadyForSave(cells=3)
    assert faults_in({"faults": ["a"]}) == Faults(["a"])


@pytest.mark.parametrize("answer", [None, {}, {"faults": "all"}], ids=str)
def test_a_kernel_that_is_back_already_is_not_given_up_for_an_odd_answer(answer: Any) -> None:
    assert faults_in(answer) == Faults([])

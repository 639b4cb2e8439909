"""The table of handlers: complete, and each handler is written for the event it stands for."""

import inspect
from typing import get_args

import pytest

from polyrl.scheduling.core.events import Event
from polyrl.scheduling.handlers import HANDLERS


def test_every_event_has_a_handler_and_nothing_else_has():
    assert list(HANDLERS) == sorted(get_args(Event), key=lambda event: event.__name__.lower())


@pytest.mark.parametrize("event", get_args(Event), ids=lambda event: event.__name__)
def test_a_handler_takes_the_event_it_stands_for(event):
    given = list(inspect.signature(HANDLERS[event], eval_str=True).parameters.values())
    assert [one.name for one in given] == ["desk", "event", "now"]
    assert given[1].annotation is event

"""Which port a run's manager listens on, where others are taken."""

import asyncio
import socket

import pytest

from polyrl.config.recipe import ManagerSection
from polyrl.errors import UserError
from polyrl.run.processes import choose_port, start_at_port
from polyrl.wire.control import DEFAULT_PORT


def chosen(section: ManagerSection, before: int = 0) -> int:
    return asyncio.run(choose_port(section, before))


def test_a_second_run_on_a_machine_takes_any_port_that_is_free():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", DEFAULT_PORT))
            taken.listen()
        except OSError:
            pass  # somebody else has it: all the same
        assert chosen(ManagerSection()) == 0


def test_a_port_that_is_named_and_taken_is_an_error_that_says_what_to_write():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"cannot listen on 127.0.0.1:{port}: address already in use; .*: manager.port=0$"
        ):
            chosen(ManagerSection(port=port))


@pytest.mark.parametrize("wanted", [None, 0])
def test_a_run_that_goes_on_takes_the_port_that_it_had_if_it_can(wanted: int | None):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert chosen(ManagerSection(port=wanted), port) == 0
    assert chosen(ManagerSection(port=wanted), port) == port


def test_a_host_that_is_not_ours_is_an_error_whatever_the_port():
    for port in (None, 0):
        with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.9"):
            chosen(ManagerSection(host="203.0.113.9", port=port))


def started(ports: list[int], taken: set[int]) -> list[int]:
    """Ports that a manager was started at, if these are chosen one after the other."""
    chosen, tried = iter(ports), list[int]()

    async def choose() -> int:
        return next(chosen)

    async def start(port: int) -> None:
        tried.append(port)
        if port in taken:
            raise UserError(f"cannot listen on {port}")

    asyncio.run(start_at_port(choose, start))
    return tried


def test_a_port_that_is_taken_while_the_manager_starts_is_given_up_for_another():
    assert started([DEFAULT_PORT], set()) == [DEFAULT_PORT]
    assert started([DEFAULT_PORT, 0], {DEFAULT_PORT}) == [DEFAULT_PORT, 0]


def test_a_manager_that_cannot_start_at_a_port_that_is_free_is_an_error():
    with pytest.raises(UserError, match="cannot listen on 5000"):
        started([5000, 5000], {5000})
    with pytest.raises(UserError, match="cannot listen on 0"):
        started([5000, 0], {5000, 0})

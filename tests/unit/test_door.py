"""Connections at the port: the oldest that does nothing makes way, and nobody who is being answered does."""

from typing import Any

from polyrl.manager.peers.door import Door


class Wire:
    """What a connection has of a transport."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.is_cut = False

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return self._address, 1

    def abort(self) -> None:
        self.is_cut = True


class Connected:
    def __init__(self, address: str) -> None:
        self.transport = Wire(address)


def door(most: int = 100, per_address: int = 3) -> tuple[Any, list[str]]:
    refused: list[str] = []
    return Door(per_address, refused.append, most), refused


def come(door: Door, *addresses: str) -> list[Any]:
    connections: list[Any] = [Connected(one) for one in addresses]
    for one in connections:
        door.came(one)
    return connections


def cut(connections: list[Any]) -> list[int]:
    return [place for place, one in enumerate(connections) if one.transport.is_cut]


def test_an_address_has_so_many_idle_connections_and_the_oldest_makes_way():
    at, refused = door()
    connections = come(at, *["10.0.0.1"] * 5, *["10.0.0.2"] * 3)
    assert cut(connections) == [0, 1]
    assert refused == ["connections"] * 2
    assert at.num_connections == 6


def test_whoever_is_being_answered_does_not_make_way():
    at, _ = door()
    first = come(at, "10.0.0.1")
    at.work(first[0])
    connections = first + come(at, *["10.0.0.1"] * 5)
    assert cut(connections) == [1, 2]


def test_all_connections_together_are_bounded_whatever_their_addresses():
    at, refused = door(most=10)
    connections = come(at, *(f"10.0.0.{number}" for number in range(30)))
    assert cut(connections) == list(range(20))
    assert at.num_connections == 10
    assert refused == ["connections"] * 20


def test_where_everybody_is_being_answered_it_is_the_new_one_that_goes():
    at, _ = door(most=2)
    busy = come(at, "10.0.0.1", "10.0.0.2")
    for one in busy:
        at.work(one)
    new = come(at, "10.0.0.3")
    assert (cut(busy), cut(new)) == ([], [0])


def test_a_connection_that_is_answered_is_idle_again_behind_the_others():
    at, _ = door()
    connections = come(at, *["10.0.0.1"] * 3)
    at.work(connections[0])
    at.rest(connections[0])
    come(at, "10.0.0.1")
    assert cut(connections) == [1]


def test_nothing_is_kept_of_connections_that_are_gone():
    at, _ = door()
    for number in range(50):
        for one in come(at, f"10.0.1.{number}"):
            at.went(one)
    assert at.num_connections == 0
    assert not at._idle
    assert not at._idle_at

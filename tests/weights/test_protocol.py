"""The weight protocol without sockets: frames under every chunking, limits, and who is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.weights import protocol
from polyrl.weights.protocol import HEADER, Code, FrameKind, Incoming, NotAllowed, ProtocolError, WeightFrame

KEY, OTHER = b"k" * 32, b"o" * 32
OURS, THEIRS, NODE = b"c" * 32, b"s" * 32, b"n" * 16
NAME = "ab" * 32
DIALOGUE = [
    protocol.frame(FrameKind.CATALOG),
    protocol.request(FrameKind.MANIFEST, NAME),
    protocol.have(NAME, 7, 1.5),
    protocol.get(NAME, 3, 2),
    protocol.request(FrameKind.PASS, NAME),
]


def frames_of(incoming: Incoming) -> list[WeightFrame]:
    found = []
    while (frame := incoming.take()) is not None:
        found.append(frame)
    return found


@given(st.lists(st.sampled_from(DIALOGUE), max_size=8), st.lists(st.integers(1, 60), max_size=40))
def test_frames_are_the_same_however_they_are_cut(frames, cuts):
    data = b"".join(frames)
    whole = Incoming(protocol.REQUESTS)
    whole.feed(data)
    expected = frames_of(whole)
    assert len(expected) == len(frames)
    piecewise, found = Incoming(protocol.REQUESTS), []
    for size in [*cuts, len(data)]:
        piecewise.feed(data[:size])
        data = data[size:]
        found += frames_of(piecewise)
    assert found == expected


@given(st.binary(max_size=200), st.sampled_from([protocol.BEFORE_HELLO, protocol.REQUESTS, protocol.ANSWERS]))
def test_garbage_is_refused_or_waited_for_and_nothing_else(data, limits):
    incoming = Incoming(limits)
    incoming.feed(data)
    try:
        for kind, body in frames_of(incoming):
            least, most = limits[kind]
            assert least <= len(body) <= most
    except ProtocolError as error:
        assert "\n" not in str(error)


@given(st.binary(min_size=1, max_size=300))
def test_a_catalog_or_a_refusal_of_garbage_is_a_protocol_error(data):
    for read in (protocol.read_catalog, protocol.read_refused):
        try:
            read(data)
        except ProtocolError as error:
            assert str(error).isprintable()


def test_a_text_that_is_none_and_lists_without_end_are_a_protocol_error():
    true, text, number, lists = b"\xc3", b"\xa1\xff", b"\x00", b"\x91" * 60_000 + b"\x00"
    for read, body in (
        (protocol.read_located, b"\x92" + text + number),
        (protocol.read_located, b"\x93\xa1a" + number + lists),
        (protocol.read_catalog, b"\x94" + true + b"\x90\x90" + lists),
    ):
        with pytest.raises(ProtocolError, match="not a"):
            read(body)


def test_a_frame_that_is_too_long_is_refused_by_its_header_alone():
    incoming = Incoming(protocol.REQUESTS)
    incoming.feed(HEADER.pack(FrameKind.GET, 1 << 31))
    with pytest.raises(ProtocolError, match="GET of 2147483648 bytes"):
        incoming.take()


def test_requests_before_the_proof_are_not_listened_to():
    incoming = Incoming(protocol.BEFORE_HELLO)
    incoming.feed(protocol.frame(FrameKind.CATALOG))
    with pytest.raises(ProtocolError):
        incoming.take()


def welcome(key: bytes = KEY, client: bytes = OURS, server: bytes = THEIRS) -> bytes:
    return protocol.welcome(key, client, server, NODE)[HEADER.size :]


def test_both_sides_prove_that_they_hold_the_key():
    node, proof = protocol.read_welcome(KEY, OURS, welcome())
    assert node == NODE
    protocol.check_proof(KEY, OURS, THEIRS, NODE, proof[HEADER.size :])


@pytest.mark.parametrize(
    "said", [welcome(key=OTHER), welcome(client=b"x" * 32)], ids=["another key", "said on another connection"]
)
def test_a_server_that_cannot_prove_itself_is_not_believed(said):
    with pytest.raises(NotAllowed):
        protocol.read_welcome(KEY, OURS, said)


@given(st.integers(0, 8 * len(welcome()) - 1))
def test_a_flipped_bit_in_the_welcome_is_found(bit):
    said = bytearray(welcome())
    said[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        protocol.read_welcome(KEY, OURS, bytes(said))


def test_a_proof_is_worth_nothing_on_another_connection_or_in_the_other_direction():
    proof = protocol.read_welcome(KEY, OURS, welcome())[1][HEADER.size :]
    servers_own = welcome()[-32:]
    for theirs, ours, node, said in [
        (b"x" * 32, THEIRS, NODE, proof),
        (OURS, b"x" * 32, NODE, proof),
        (OURS, THEIRS, b"x" * 16, proof),
        (OURS, THEIRS, NODE, servers_own),
        (OURS, THEIRS, NODE, bytes(32)),
    ]:
        with pytest.raises(NotAllowed):
            protocol.check_proof(KEY, theirs, ours, node, said)


def test_another_protocol_or_another_version_of_it_is_named():
    with pytest.raises(ProtocolError, match="does not speak"):
        protocol.read_hello(b"HTTP" + bytes(34))
    with pytest.raises(ProtocolError, match="version 9"):
        protocol.read_hello(b"PRLW\x09\x00" + bytes(32))


def test_a_refusal_carries_its_code_and_one_printable_line():
    no = protocol.read_refused(protocol.refused(Code.GONE, "not\nhere" + "x" * 500)[HEADER.size :])
    assert no.code is Code.GONE
    assert str(no).startswith("not?here") and len(str(no)) <= 300

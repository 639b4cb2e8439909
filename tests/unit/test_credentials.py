"""Tokens and certificates: made once, readable by their owner alone; what is wrong with a file is said in one line."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from polyrl.errors import UserError
from polyrl.wire.credentials import (
    TOKEN_FILES,
    TOKEN_VARIABLE,
    AccessTokens,
    bearer,
    client_tls,
    ensure_tokens,
    find_token,
    read_token_file,
    server_tls,
    token_of,
    weights_key_of,
)

GOOD = "a-token-of-some-length"


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# A run's tokens


def test_only_their_owner_reads_the_tokens_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        ensure_tokens(tmp_path)
    finally:
        os.umask(before)
    for name in TOKEN_FILES.values():
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_runs_tokens_are_made_once(tmp_path):
    ensure_tokens(tmp_path)
    admin, worker = (read_token_file(tmp_path / TOKEN_FILES[scope]) for scope in ("admin", "worker"))
    again = ensure_tokens(tmp_path)
    assert (again.scope_of(admin), again.scope_of(worker)) == ("admin", "worker")
    assert admin != worker
    assert min(len(admin), len(worker)) >= 40


def test_a_manager_that_is_killed_while_it_writes_a_token_leaves_none_and_makes_it_the_next_time(tmp_path):
    script = (
        "import os, signal, sys, pathlib\n"
        "from polyrl.wire import credentials\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "credentials.ensure_tokens(pathlib.Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not any((tmp_path / name).exists() for name in TOKEN_FILES.values())
    tokens = ensure_tokens(tmp_path)
    assert tokens.scope_of(read_token_file(tmp_path / TOKEN_FILES["worker"])) == "worker"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(TOKEN_FILES.values())


def test_two_runs_have_different_tokens(tmp_path):
    (tmp_path / "other").mkdir()
    ensure_tokens(tmp_path)
    other = ensure_tokens(tmp_path / "other")
    assert other.scope_of(read_token_file(tmp_path / TOKEN_FILES["admin"])) is None


@pytest.mark.parametrize("token", ["", "admin", "the-admin-token", "THE-ADMIN-TOKEN-OF-A-RUN", "ü" * 20, "\udcff" * 20])
def test_a_token_that_is_not_ours_has_no_scope(token):
    tokens = AccessTokens({"worker": "the-worker-token-of-a-run", "admin": "the-admin-token-of-a-run"})
    assert tokens.scope_of(token) is None


def test_who_has_the_worker_token_has_the_key_of_the_runs_weights_and_the_key_is_not_the_token():
    assert weights_key_of("w" * 20) == bytes.fromhex(
        AccessTokens({"worker": "w" * 20, "admin": "a" * 20}).weights_key()
    )
    assert weights_key_of("w" * 20) != weights_key_of("a" * 20)
    assert b"ww" not in weights_key_of("w" * 20)


def test_a_token_file_that_a_killed_manager_left_empty_is_named(tmp_path):
    (tmp_path / TOKEN_FILES["worker"]).touch()
    with pytest.raises(UserError) as caught:
        ensure_tokens(tmp_path)
    assert one_line(caught).startswith(f"{tmp_path / 'worker.token'}: expected a token")


# Reading a token


def test_the_line_end_is_not_part_of_a_token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f" {GOOD}\r\n")
    assert read_token_file(path) == GOOD


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short", b"two words in a line", f"{GOOD}\n{GOOD}\n".encode(), b"\xff" * 40, b"\x00" * 40]
)
def test_a_file_without_a_token_in_it_is_one_line_that_names_it_and_not_its_content(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_token_file(path)
    assert one_line(caught).startswith(f"{path}: ")
    assert GOOD not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone: no token can be read there: No such file or directory"):
        read_token_file(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no token can be read there: Is a directory"):
        read_token_file(tmp_path)


def test_a_token_comes_from_the_file_that_was_given_before_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(GOOD)
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-of-the-environment")
    assert find_token(str(path)) == GOOD
    assert find_token(None) == "another-token-of-the-environment"


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_a_token_it_is_said_where_one_may_come_from(monkeypatch, value):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, value)
    with pytest.raises(UserError) as caught:
        find_token(None)
    for place in (TOKEN_VARIABLE, "--token-file", *TOKEN_FILES.values()):
        assert place in one_line(caught)


# On the wire


def test_a_token_is_read_from_the_header_that_carries_it():
    assert token_of(bearer(GOOD)["Authorization"]) == GOOD
    assert token_of(f"bearer  {GOOD}") == GOOD


@pytest.mark.parametrize("header", [None, "", "Bearer", GOOD, f"Basic {GOOD}", f"Bearer{GOOD}"])
def test_a_header_without_a_bearer_has_no_token(header):
    assert token_of(header) == ""


# TLS


def test_without_certificates_there_is_no_tls():
    assert server_tls(None, None) is None
    assert client_tls("http://host:5000", None) is None


def test_a_certificate_and_its_key_belong_together(tmp_path):
    with pytest.raises(UserError, match="--tls-cert and --tls-key belong together"):
        server_tls(str(tmp_path / "cert.pem"), None)


@pytest.mark.parametrize("content", [b"", b"not a certificate"])
def test_what_is_no_certificate_is_named(tmp_path, content):
    path = tmp_path / "cert.pem"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        server_tls(str(path), str(path))
    assert one_line(caught).startswith(f"{path}, {path}: not a certificate and its key: ")
    with pytest.raises(UserError) as caught:
        client_tls("https://host:5000", str(path))
    assert one_line(caught).startswith(f"{path}: not a file of certificates: ")


def test_a_file_that_is_not_there_is_named(tmp_path):
    there, missing = tmp_path / "cert.pem", tmp_path / "key.pem"
    there.write_bytes(b"")
    for ask in (lambda: server_tls(str(there), str(missing)), lambda: client_tls("https://host:5000", str(missing))):
        with pytest.raises(UserError) as caught:
            ask()
        assert one_line(caught) == f"{missing}: cannot be read: No such file or directory"


def test_certificates_are_for_https(tmp_path):
    with pytest.raises(UserError, match="http://host:5000: --ca is for https"):
        client_tls("http://host:5000", str(tmp_path / "ca.pem"))
    assert client_tls("https://host:5000", None) is not None

"""The manager's HTTP side: it keeps to its description, asks who speaks, and is not held up by those who dawdle."""

import asyncio
import contextlib
import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from tests.integration.live import (
    CONFIG,
    PATIENCE_S,
    QUICK,
    Live,
    Peer,
    is_connected,
    manager,
    manager_in_thread,
    run,
    trainer,
    until,
)

from polyrl.errors import UserError
from polyrl.manager import asking
from polyrl.manager.frames_in import joining
from polyrl.manager.http import Front, JoinLimit
from polyrl.manager.openapi import document
from polyrl.manager.routes import ROUTES
from polyrl.manager.service import Service
from polyrl.manager.serving.requests import AskErrorReply
from polyrl.manager.settings import JournalSettings, LimitSettings, ManagerSettings, StreamSettings
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.wire import frames
from polyrl.wire.control import ErrorReply, RunReply, RunRequest, Status
from polyrl.wire.credentials import TOKEN_FILES, TOKEN_VARIABLE, bearer, client_tls, server_tls
from polyrl.wire.dial import Dialer

POLYRL = [sys.executable, "-m", "polyrl"]
SCHEMA = schemathesis.openapi.from_dict(
    document(ROUTES),
    # A configuration may be well-formed and still contradict itself, or the run that is open.
    config=schemathesis.Config.from_dict(
        {
            "checks": {
                "positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404", "409", "410", "429", "503"]},
                "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "503"]},  # nobody is there to answer
            }
        }
    ),
)
ALL: Any = list(HealthCheck)
OPERATIONS = [(route.path, route.method.lower()) for route in ROUTES]
FREE = ("/v1/health", "/dash", "/dash/", "/dash/page/{name}")
FOR_LOOKERS = ("/dash/api/{name}",)
FOR_WORKERS = ("/v1/openapi.json", "/v1/join", "/v1/worker", "/v1/workers/{name}")
FOR_ASKERS = ("/v1/models", "/v1/completions", "/v1/chat/completions")
JOIN = {"name": "w1", "protocol": frames.PROTOCOL, "engine": "script", "slots": 4}
RUN = {"protocol": frames.PROTOCOL, "config": msgspec.to_builtins(CONFIG)}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with manager_in_thread(tmp_path_factory.mktemp("api")) as live:
        yield live


# The description


@SCHEMA.parametrize()
@settings(max_examples=25, suppress_health_check=ALL)
def test_every_route_answers_as_described(case: schemathesis.Case, live: Live):
    case.call_and_validate(base_url=live.url, headers=live.headers("admin"))


def test_the_manager_serves_its_description(live: Live):
    served = requests.get(f"{live.url}/v1/openapi.json", headers=live.headers("worker"), timeout=PATIENCE_S)
    assert served.json() == document(ROUTES)


def test_every_route_of_the_table_is_served_and_described_and_nothing_else(tmp_path: Path):
    service = Service(tmp_path, ManagerSettings())
    routes = Front(service).app().router.routes()
    found = {(route.resource.canonical, route.method.lower()) for route in routes if route.resource is not None}
    service.close()
    assert {one for one in found if one[1] != "head"} == set(OPERATIONS)
    described = document(ROUTES)["paths"]
    assert {(path, method) for path, item in described.items() for method in item} == set(OPERATIONS)


def test_every_operation_has_a_name_and_a_line_of_its_own():
    operations = [one for item in document(ROUTES)["paths"].values() for one in item.values()]
    assert len({one["operationId"] for one in operations}) == len({one["summary"] for one in operations}) == len(ROUTES)


# Who may


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_a_token_opens_what_its_scope_allows(live: Live, path: str, method: str):
    def ask(headers: dict[str, str]) -> requests.Response:
        name = "app.js" if "page" in path else "w1"
        return requests.request(method, live.url + path.format(name=name), headers=headers, timeout=PATIENCE_S)

    nobody = [{}, {"Authorization": "Basic dXNlcg=="}, bearer(""), bearer("x" * 43), bearer(live.token("admin")[:-1])]
    for headers in nobody:
        answer = ask(headers)
        assert answer.status_code == (200 if path in FREE else 401)
        assert path in FREE or told(path, answer).startswith("a valid token")
    assert (ask(live.headers("worker")).status_code != 403) == (path in (*FREE, *FOR_WORKERS))
    assert (ask(live.headers("generate")).status_code != 403) == (path in (*FREE, *FOR_ASKERS))
    assert (ask(live.headers("view")).status_code != 403) == (path in (*FREE, *FOR_LOOKERS))
    assert ask(live.headers("admin")).status_code not in (401, 403)


def told(path: str, answer: requests.Response) -> str:
    """What is wrong, in the shape that the route's clients read."""
    if path in FOR_ASKERS:
        return msgspec.json.decode(answer.content, type=AskErrorReply).error.message
    return msgspec.json.decode(answer.content, type=ErrorReply).error


def test_tokens_are_in_files_that_only_their_owner_reads(live: Live):
    for scope in TOKEN_FILES:
        path = live.service.run_dir / f"{scope}.token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len({live.token(scope) for scope in TOKEN_FILES}) == len(TOKEN_FILES)


# What is refused


@pytest.mark.parametrize("name", ["", "-dash", "a" * 65, "a b", "a/b", "a\n", "\u00fc", "a\x00"])
def test_a_name_that_is_none_cannot_join(live: Live, name: str):
    assert post(live, "/v1/join", {**JOIN, "name": name}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/join", {**JOIN, "slots": 0}, "slots"),
        ("/v1/join", {**JOIN, "colour": "red"}, "colour"),
        ("/v1/join", {**JOIN, "price_usd_per_hour": -1}, "price_usd_per_hour"),
        ("/v1/run", {"protocol": frames.PROTOCOL}, "config"),
        ("/v1/run", {"protocol": frames.PROTOCOL, "config": {**RUN["config"], "seed": 1 << 70}}, "seed"),
        ("/v1/workers/w1/drain", {"reason": ""}, "reason"),
    ],
)
def test_a_body_that_is_not_what_was_expected_is_answered_with_where(live: Live, path: str, body: Any, words: str):
    answer = post(live, path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 100_000, b'"\\ud800"'])
def test_a_body_that_is_no_json_is_refused(live: Live, body: bytes):
    answer = requests.post(f"{live.url}/v1/join", data=body, headers=live.headers("worker"), timeout=PATIENCE_S)
    assert answer.status_code == 400


def test_another_protocol_is_refused_with_what_to_do(live: Live):
    answer = post(live, "/v1/join", {**JOIN, "protocol": 99})
    assert answer.status_code == 409
    assert "install the same PolyRL" in answer.json()["error"]


def test_what_is_nowhere_is_said_in_json_too(live: Live):
    nowhere = requests.get(f"{live.url}/v2", headers=live.headers("admin"), timeout=PATIENCE_S)
    wrong = requests.delete(f"{live.url}/v1/join", headers=live.headers("admin"), timeout=PATIENCE_S)
    assert (nowhere.status_code, nowhere.json()) == (404, {"error": "Not Found"})
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/models/tiny", "/v1/chat", "/v1/completions/", "/v1/files/a"])
def test_a_path_of_openais_that_is_not_here_is_refused_in_its_shape(live: Live, path: str):
    answer = requests.get(f"{live.url}{path}", headers=live.headers("generate"), timeout=PATIENCE_S)
    error = msgspec.json.decode(answer.content, type=AskErrorReply).error
    assert (answer.status_code, error.type) == (404, "not_found_error")
    served = "/v1/models, /v1/completions, /v1/chat/completions"
    assert error.message == f"{path} is not served here; expected one of {served}"


@pytest.mark.parametrize("path", ["/v1/workers", "/v1/workers/w1/name", "/v1/run/1", "/v1/later", "/v1/", "/v1", "/"])
def test_a_path_beside_those_of_workers_and_trainers_is_refused_in_their_shape(live: Live, path: str):
    answer = requests.get(f"{live.url}{path}", headers=live.headers("admin"), timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


def test_a_body_that_is_too_large_is_refused(live: Live):
    answer = post(live, "/v1/join", {**JOIN, "model": "x" * (5 << 20)})
    assert (answer.status_code, answer.json()["error"]) == (413, "the body is larger than 4 MB (limits.max_body_mb)")
    assert live.refused["body"] >= 1


def post(live: Live, path: str, body: Any) -> requests.Response:
    return requests.post(live.url + path, data=json.dumps(body), headers=live.headers("admin"), timeout=PATIENCE_S)


def test_joins_beyond_the_rate_are_put_off(tmp_path: Path):
    limits = LimitSettings(joins_per_s=0.2)
    with manager_in_thread(tmp_path, ManagerSettings(limits=limits)) as live:
        codes = [post(live, "/v1/join", {**JOIN, "name": f"w{number}"}).status_code for number in range(4)]
        assert codes == [200, 200, 429, 429]
        assert live.refused == {"join_rate": 2}
        assert requests.get(f"{live.url}/v1/status", headers=live.headers("admin"), timeout=PATIENCE_S).ok


def test_the_rate_of_joins_is_kept_for_each_address_and_lets_one_through_however_low_it_is():
    limit = JoinLimit(0.01)
    assert limit.allows("a", 0.0)
    assert not limit.allows("a", 50.0)
    assert limit.allows("b", 50.0)
    assert limit.allows("a", 150.0)


def test_waits_that_are_longer_than_any_timer_are_no_trouble(tmp_path: Path):
    rules = FleetRules(heartbeat_timeout_s=1e9, pull_timeout_s=1e9)
    config = msgspec.structs.replace(CONFIG, fleet_rules=rules)
    with manager_in_thread(tmp_path) as live:
        assert post(live, "/v1/join", JOIN).ok
        assert post(live, "/v1/run", {"protocol": frames.PROTOCOL, "config": msgspec.to_builtins(config)}).ok
        assert post(live, "/v1/pause", {}).ok


def test_a_run_that_would_give_workers_up_before_they_report_is_refused_in_a_line(tmp_path: Path):
    async def scenario() -> None:
        slow = ManagerSettings(stream=StreamSettings(heartbeat_interval_s=2.0))
        async with manager(tmp_path, slow) as live:
            with pytest.raises(UserError, match="heartbeat_timeout_s: got 3, expected at least 4: workers"):
                async with trainer(live, msgspec.structs.replace(CONFIG, fleet_rules=FleetRules())):
                    pass
            assert asking.config_of(slow).fleet_rules.heartbeat_timeout_s == 4.0

    run(scenario())


def test_a_worker_can_join_again_after_its_first_session_has_left_the_journal(tmp_path: Path):
    """Its lives are counted on; or its new one would be taken for old news, and it would never get a sample."""
    small = msgspec.structs.replace(QUICK, journal=JournalSettings(segment_mb=0.0001))

    async def scenario() -> None:
        async with manager(tmp_path, small) as live, Peer(live, "w1") as peer:
            await open_run(live)
            await peer.enter()
            await peer.say(frames.Goodbye("for now"))
            await until(lambda: not live.service.lobby.workers, "it has left")
            async with Peer(live, "w2") as other:
                for _ in range(3):
                    await other.enter()
                    await other.socket.close()
                    await until(lambda: not is_connected(live, "w2"), "its connection is over")
        async with manager(tmp_path, small) as live, Peer(live, "w1") as peer:
            await peer.enter()
            session = joining.find_worker(live.service.lobby, peer.session)
            assert session is not None and live.service.lobby.need_run().seat_of(session) is not None

    run(scenario())


async def open_run(live: Live) -> None:
    async with Dialer(live.url, live.token("admin")) as dialer:
        await dialer.post("/v1/run", RunRequest(protocol=frames.PROTOCOL, config=CONFIG), RunReply)


# Those who dawdle


def test_requests_that_come_a_byte_at_a_time_are_cut_off_and_hold_nobody_up(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, aiohttp.ClientSession() as http:
            head = b"GET /v1/health HTTP/1.1\r\nHost: manager\r\nX-Slow: "
            slow = [asyncio.create_task(dribble(live, head)) for _ in range(50)]
            num_answered = 0
            while not any(task.done() for task in slow):
                async with http.get(f"{live.url}/v1/health") as answer:
                    assert answer.ok
                num_answered += 1
                await asyncio.sleep(0.05)
            assert num_answered > 3
            assert all(answer == b"" for answer, _ in await asyncio.gather(*slow))
            assert all(seconds > 0.9 for _, seconds in map(asyncio.Task.result, slow))
            assert live.refused == {"silent": 50}

    run(scenario())


def test_a_body_that_comes_a_byte_at_a_time_is_answered_and_cut_off(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            token = live.token("worker")
            head = f"POST /v1/join HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {token}\r\nContent-Length: 900\r\n\r\n"
            answer, seconds = await dribble(live, head.encode())
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"did not come in time" in answer
            assert seconds > 0.9
            assert live.refused == {"slow": 1}

    run(scenario())


async def dribble(live: Live, head: bytes) -> tuple[bytes, float]:
    """Send a byte ten times a second until the other side hangs up. Returns what it said, and after how long.

    Raises TimeoutError if it goes on listening.
    """
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", live.address.port)
    writer.write(head)
    heard = bytearray()
    hearing = asyncio.create_task(hear_all(reader, heard))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not hearing.done():
                writer.write(b"x")
                await asyncio.wait((hearing,), timeout=0.1)
        return bytes(heard), time.monotonic() - began
    finally:
        hearing.cancel()
        writer.close()


async def hear_all(reader: asyncio.StreamReader, heard: bytearray) -> None:
    """As it comes: who hangs up while a byte is under way resets the connection, and a reader drops what it holds."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            heard += data


def test_a_connection_that_never_gets_through_its_handshake_is_cut_off(tmp_path: Path, certificate: Path):
    async def scenario() -> None:
        tls = server_tls(str(certificate), str(certificate.with_suffix(".key")))
        async with manager(tmp_path, QUICK, tls) as live:
            answer, _ = await dribble(live, b"\x16\x03\x01\x02\x00")
            assert answer == b""

    run(scenario())


@pytest.mark.parametrize("play", [run, asyncio.run])
def test_connections_that_never_get_through_their_handshake_are_counted_and_the_oldest_makes_way(
    tmp_path: Path, certificate: Path, play: Callable[[Any], Any]
):
    """Strangers that say nothing, or too little. Who knows the certificate is served beside them."""
    limits = LimitSettings(request_timeout_s=30.0, connections_per_address=6)

    async def scenario() -> None:
        tls = server_tls(str(certificate), str(certificate.with_suffix(".key")))
        async with manager(tmp_path, msgspec.structs.replace(QUICK, limits=limits), tls) as live:
            strangers = [await asyncio.open_connection("127.0.0.1", live.address.port) for _ in range(30)]
            for _, writer in strangers[::2]:
                with contextlib.suppress(ConnectionError):
                    writer.write(b"\x16\x03\x01\x02\x00")
            await until(lambda: live.refused.get("connections", 0) >= 24, "all but six are cut")
            async with Dialer(live.url, live.token("admin"), client_tls(live.url, str(certificate))) as dialer:
                for _ in range(3):
                    assert (await dialer.get("/v1/status", Status)).run == "none"
            for _, writer in strangers:
                writer.close()

    play(scenario())


# As a process


def polyrl(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POLYRL, *args], capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def manager_process(run_dir: Path, *args: str) -> Iterator[str]:
    """A `polyrl manager`; gives its URL, and sees that it stops when it is asked to."""
    argv = [*POLYRL, "manager", "--run-dir", str(run_dir), "--port", "0", "--verbose", *args]
    with (run_dir.parent / "log").open("w") as log:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        yield first.split()[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "stopped; the run can go on" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    run_dir = tmp_path_factory.mktemp("process") / "run"
    with manager_process(run_dir) as url:
        yield run_dir, url


def test_a_manager_in_a_process_serves_and_keeps_its_tokens_to_itself(process: tuple[Path, str]):
    run_dir, url = process
    assert requests.get(f"{url}/v1/health", timeout=PATIENCE_S).json() == {"status": "ok"}
    assert requests.post(f"{url}/v1/join", headers=bearer("y" * 43), timeout=PATIENCE_S).status_code == 401
    done = polyrl("status", "--run-dir", str(run_dir), "--json")
    assert json.loads(done.stdout)["refused"] == {"token": 1}
    log = (run_dir.parent / "log").read_text()
    for name in ("worker.token", "admin.token"):
        assert (run_dir / name).read_text().strip() not in done.stdout + done.stderr + log


def test_a_worker_cannot_write_on_the_screen_of_who_asks_for_the_status(process: tuple[Path, str]):
    run_dir, url = process
    headers = bearer((run_dir / "worker.token").read_text().strip())

    def join(engine: str) -> int:
        return requests.post(
            f"{url}/v1/join", json={**JOIN, "engine": engine}, headers=headers, timeout=PATIENCE_S
        ).status_code

    assert [join("\x1b[2J"), join("two\nlines"), join("[/bold]")] == [400, 400, 200]
    done = polyrl("status", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert "[/bold]" in done.stdout


@pytest.mark.parametrize("command", [("status",), ("drain", "w1"), ("doctor",)], ids=lambda command: command[0])
def test_a_token_of_another_run_is_one_line_with_its_file(
    process: tuple[Path, str], tmp_path: Path, command: tuple[str, ...]
):
    _, url = process
    other = tmp_path / "other.token"
    other.write_text("y" * 43)
    done = polyrl(*command, "--manager", url, "--token-file", str(other))
    assert done.returncode == 2
    assert only_line(done) == f"polyrl: error: {url}: that is not a token of this run ({other})\n"


@pytest.mark.parametrize(
    ("command", "who"), [("status --manager", ""), ("worker --quiet --name w1 --join", "worker w1: ")]
)
def test_a_token_of_another_run_is_one_line_with_the_variable_that_has_it(
    process: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, command: str, who: str
):
    monkeypatch.setenv(TOKEN_VARIABLE, "y" * 43)
    done = polyrl(*command.split(), process[1])
    assert only_line(done) == f"polyrl: error: {who}{process[1]}: that is not a token of this run (POLYRL_TOKEN)\n"


def test_a_second_manager_on_a_run_is_one_line(process: tuple[Path, str]):
    run_dir, url = process
    for port in ("0", url.rpartition(":")[2]):
        done = polyrl("manager", "--run-dir", str(run_dir), "--port", port)
        assert done.returncode == 2
        assert "another manager runs on this directory" in only_line(done)


def test_a_port_in_use_is_one_line_and_nothing_is_left_of_the_run(tmp_path: Path, process: tuple[Path, str]):
    port = process[1].rpartition(":")[2]
    done = polyrl("manager", "--run-dir", str(tmp_path / "run"), "--port", port)
    assert done.returncode == 2
    words = "address already in use; another port will do, 0 is any that is free"
    assert only_line(done) == f"polyrl: error: the manager cannot listen on 127.0.0.1:{port}: {words}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["limits.request_timeout=5"], "limits.request_timeout: unknown key; did you mean limits.request_timeout_s?"),
        (["limits.request_timeout_s=-1"], "limits.request_timeout_s: "),
        (["journal.fsync=sometimes"], "journal.fsync: "),
        (["--port", "70000"], "--port: 70000"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key belong together"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_settings_that_cannot_be_are_one_line_with_their_name(tmp_path: Path, args: list[str], words: str):
    done = polyrl("manager", "--run-dir", str(tmp_path / "run"), *args)
    assert done.returncode == 2
    assert words in only_line(done)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_a_file_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = polyrl("manager", "--run-dir", str(tmp_path / "file"), "--port", "0")
    assert done.returncode == 2
    assert "a run cannot be kept there" in only_line(done)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signed by itself, for 127.0.0.1."""
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=polyrl -addext subjectAltName=IP:127.0.0.1"
    out = ["-out", str(path), "-keyout", str(path.with_suffix(".key"))]
    subprocess.run([*make.split(), *out], check=True, capture_output=True, timeout=30)
    return path


def test_status_and_worker_dial_over_tls_and_trust_only_whom_they_are_told_to(tmp_path: Path, certificate: Path):
    run_dir = tmp_path / "run"
    tls = ("--tls-cert", str(certificate), "--tls-key", str(certificate.with_suffix(".key")))
    with manager_process(run_dir, *tls) as url:
        assert url.startswith("https://")
        ca, token = ("--ca", str(certificate)), ("--token-file", str(run_dir / "worker.token"))
        worker = subprocess.Popen([*POLYRL, "worker", "--join", url, *token, *ca, "--name", "w1", "--quiet"])
        try:
            until_there(lambda: workers_of(run_dir, ca) == {"w1": True})
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
        stranger = polyrl("status", "--run-dir", str(run_dir))
        assert stranger.returncode == 2
        assert "certificate is not trusted: self-signed certificate (--ca" in only_line(stranger)
        admin = ("--token-file", str(run_dir / "admin.token"))
        plain = polyrl("status", "--manager", url.replace("https:", "http:"), *admin)
        assert plain.returncode == 2
        assert only_line(plain).endswith("(if it goes on: is it https://?)\n")
        stranger = polyrl("worker", "--join", url, *token, "--name", "w2", "--quiet", "start_s=600")
        assert stranger.returncode == 2
        assert "certificate is not trusted" in only_line(stranger)


def test_https_to_a_manager_without_it_is_one_line(process: tuple[Path, str]):
    run_dir, url = process
    secure = url.replace("http:", "https:")
    done = polyrl("status", "--manager", secure, "--token-file", str(run_dir / "admin.token"))
    assert done.returncode == 2
    assert only_line(done) == f"polyrl: error: {secure}: it does not speak TLS; is it http://?\n"


def workers_of(run_dir: Path, ca: tuple[str, ...]) -> dict[str, bool]:
    done = polyrl("status", "--run-dir", str(run_dir), "--json", *ca)
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["connected"] for one in json.loads(done.stdout)["workers"]}


def until_there(holds: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)

"""`polyrl train` with a certificate: real processes, and a worker that joins over https as it is told to."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model, processes_in, start
from tests.integration.test_train import desk
from tests.weights.test_tls import certificate

from polyrl.cli.main import main
from polyrl.config.recipe import ManagerSection
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import UserError
from polyrl.run.encryption import encryption
from polyrl.run.workers import worker_arguments
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "desk", "model"]  # fixtures
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate"),
    pytest.mark.timeout(300),  # a run, strangers and a worker, of which each has its own limit
]


def make_certificate(folder: Path, names: str) -> tuple[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    cert, key = certificate(folder, names)
    return str(cert), str(key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a name alone: neither the manager nor the weights are at an address that it is of."""
    return make_certificate(tmp_path_factory.mktemp("tls"), "DNS:localhost")


def polyrl(command: str) -> list[str]:
    return [sys.executable, "-m", *shlex.split(command)]


def test_a_run_trains_with_a_worker_that_joins_over_https_as_printed_and_strangers_are_refused(desk: Path, files):
    cert, key = files
    run = start(
        f"manager.tls_cert={cert}", f"manager.tls_key={key}", f"manager.ca={cert}", "train.local_generation=false"
    )
    assert run.stdout is not None
    found: dict[str, str] = {}
    for line in run.stdout:
        if "status: " in line:
            found["status"] = line.partition("status: ")[2].strip()
        if "a worker joins with:  " in line:
            found["join"] = line.partition("with:  ")[2].strip()
            break
    assert "--join https://localhost:" in found["join"] and f"--ca {cert}" in found["join"]
    refused = [
        found["status"],
        found["join"].replace("--engine builtin --model model dtype=float32", "--engine emulated"),
    ]
    strangers = [
        subprocess.Popen(polyrl(one.replace(f" --ca {cert}", "")), stderr=subprocess.PIPE, text=True) for one in refused
    ]
    for stranger in strangers:
        errors = stranger.communicate(timeout=60)[1]
        assert stranger.returncode != 0
        assert "its certificate is not trusted: self-signed certificate (--ca names whom" in errors
        assert "Traceback" not in errors
    assert subprocess.run(polyrl(found["status"]), timeout=60, check=False, capture_output=True).returncode == 0
    worker = subprocess.Popen(polyrl(found["join"] + " --name elsewhere --slots 12"), stderr=subprocess.PIPE, text=True)
    said, errors = run.communicate(timeout=100)
    told = worker.communicate(timeout=30)[1]
    assert run.returncode == 0 and "done: all 2 steps are trained" in said, errors
    assert worker.returncode == 0 and "version 1 from the trainer in" in told, told
    assert [line["step"] for line in read_metrics(desk / "runs/tiny/metrics.jsonl")] == [0, 1]
    assert processes_in(desk) == []


def test_the_runs_own_workers_are_told_whom_to_trust(desk: Path, files):
    cert, key = files
    settings = [f"manager.tls_cert={cert}", f"manager.tls_key={key}", f"manager.ca={cert}"]
    arguments = worker_arguments(load_recipe("recipe.toml", settings), desk, "https://localhost:1", "w")
    assert arguments[arguments.index("--ca") + 1] == cert


@pytest.mark.parametrize(
    "names, host, dialled",
    [
        ("DNS:localhost,IP:127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("DNS:*.cluster.lan,DNS:trainer.example.com", "127.0.0.1", "trainer.example.com"),
        ("DNS:*.cluster.lan", "trainer.cluster.lan", "trainer.cluster.lan"),
        ("DNS:trainer.example.com", "0.0.0.0", "trainer.example.com"),
        ("IP:::1", "::1", "::1"),
    ],
)
def test_everyone_dials_where_it_listens_if_the_certificate_is_of_that_and_else_its_first_name(
    tmp_path: Path, names: str, host: str, dialled: str
):
    cert, key = make_certificate(tmp_path, names)
    found = encryption(ManagerSection(host=host, tls_cert=cert, tls_key=key, ca=cert))
    assert found is not None and found.host == dialled
    assert found.url(5000) == ("https://[::1]:5000" if dialled == "::1" else f"https://{dialled}:5000")


def test_a_certificate_that_no_worker_would_believe_is_refused_by_its_key(tmp_path: Path, files):
    cert, key = files
    with pytest.raises(UserError, match=r"^manager: .*not vouched for by what this system trusts: self-.*manager\.ca"):
        encryption(ManagerSection(tls_cert=cert, tls_key=key))
    other, _ = make_certificate(tmp_path / "other", "DNS:localhost")
    with pytest.raises(UserError, match=f"^manager: {cert}: not vouched for by {other}: "):
        encryption(ManagerSection(tls_cert=cert, tls_key=key, ca=other))
    wild, its_key = make_certificate(tmp_path / "wild", "DNS:*.cluster.lan")
    with pytest.raises(UserError, match=r"^manager.tls_cert: .* is of \*\.cluster\.lan; expected a name"):
        encryption(ManagerSection(tls_cert=wild, tls_key=its_key, ca=wild))


@pytest.mark.parametrize(
    "settings, words",
    [
        (["manager.tls_cert={cert}"], "manager.tls_key: missing, expected a file"),
        (["manager.ca={cert}"], "manager.ca: nothing is checked against it without tls_cert"),
        (["manager.tls_cert=no.pem", "manager.tls_key={key}"], "manager: no.pem: cannot be read: No such file"),
        (["manager.tls_cert={cert}", "manager.tls_key={cert}"], "not a certificate and its key"),
        (["manager.tls_cert={cert}", "manager.tls_key={key}", "manager.ca=no.pem"], "no.pem: cannot be read"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_files_that_are_none_are_one_line_before_anything_starts(
    desk: Path,
    files,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    words: str,
    options: tuple[str, ...],
):
    cert, key = files
    given = [one.format(cert=cert, key=key) for one in settings]
    assert main(["train", "recipe.toml", *options, *given]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and words in said
    assert not (desk / "runs").exists()


def signed_by_another(folder: Path) -> tuple[str, str, str]:
    """A certificate, its key, and the certificate of who signed it."""
    ca, ca_key = make_certificate(folder / "ca", "DNS:ca.example.com")
    cert, key, asked = str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "asked.pem")
    asking = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-addext", "subjectAltName=DNS:localhost")
    signing = ("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-days", "1", "-copy_extensions", "copy")
    for made in ((*asking, "-keyout", key, "-out", asked), (*signing, "-out", cert)):
        subprocess.run(["openssl", *made], check=True, capture_output=True, timeout=30)
    return cert, key, ca


def join_line(run_dir: Path, cert: str, key: str, **environment: str) -> str:
    command = polyrl(f"polyrl manager --run-dir {run_dir} --port 0 --tls-cert {cert} --tls-key {key}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        process.terminate()
    return said[1]


def test_a_manager_that_serves_https_says_how_to_join_it(tmp_path: Path, files):
    """By the name that its certificate is of. Who signed it is named only if workers do not know."""
    token = f"--token-file {tmp_path / 'worker.token'}"
    line = join_line(tmp_path, *files)
    assert "join with: polyrl worker --join https://localhost:" in line
    assert line.endswith(f" {token} --ca {files[0]}\n")
    cert, key, ca = signed_by_another(tmp_path / "signed")
    line = join_line(tmp_path, cert, key, SSL_CERT_FILE=ca)
    assert "--join https://localhost:" in line
    assert line.endswith(f" {token}\n")
    vouches_for_itself = sys.version_info >= (3, 13)  # any certificate does, if it is trusted, since then
    unknown = f" --ca {cert}" if vouches_for_itself else f" --ca FILE  (FILE: the authority that signed {cert})"
    assert join_line(tmp_path, cert, key).endswith(f" {token}{unknown}\n")

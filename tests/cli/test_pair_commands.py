"""`cpsgd pair`: tasks as files, refusals, and every party as a command."""

from __future__ import annotations

import datetime
import ipaddress
import json
import signal
import ssl
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.running import PairServerOptions, open_books, read_tokens
from cpsgd.engines.pair.store import Verdict
from cpsgd.engines.pair.task import PairTask, Secrets
from cpsgd.errors import ParameterError
from cpsgd.secagg.pair.upload import make_upload
from tests.engines.pair.local import DIM
from tests.engines.pair.processes import servers

URLS = ("--leader", "http://127.0.0.1:8001", "--helper", "http://127.0.0.1:8002")


PLAN = (
    "plan",
    "--clients",
    30,
    "--dim",
    DIM,
    "--epsilon",
    4,
    "--delta",
    1e-4,
    "--bits",
    6,
    "--mechanism",
    "coins",
    "--pair",
)
TASK = (*PLAN, *URLS, "--rounds", 2, "--server-messages", 20, "--out")  # planned once, and then remembered


def test_a_plan_makes_a_task_and_its_secrets(cpsgd: Any, tmp_path: Path) -> None:
    found = cpsgd.json(*TASK, "phones.json")
    folder = tmp_path
    task = PairTask.read(folder / "phones.json")
    assert found["protocol"] == task.protocol.to_dict()
    assert found["upload_bytes"] == task.shape(0).upload_bytes
    assert found["secrets"] == ["leader.json", "helper.json", "collector.json"]
    assert (task.admission, task.rounds, task.server_messages, task.clients) == ("roster", 2, 20, 30)
    for role in ("leader", "helper", "collector"):
        assert stat.S_IMODE((folder / f"{role}.json").stat().st_mode) == 0o600
        Secrets.read(folder / f"{role}.json")
    assert json.loads((folder / "collector.json").read_text()).keys() >= {"collector"}
    assert Secrets.read(folder / "collector.json").private == ()
    for name in ("phones.json", "others.json"):  # no secret is ever replaced
        assert cpsgd(*TASK, name).exit_code == 2
    assert PairTask.read(folder / "phones.json") == task
    assert not (folder / "others.json").exists()
    (folder / "leader.json").chmod(0o644)
    words = ("--task", "phones.json", "--secrets", "leader.json", "--store", "s", "--roster", "r")
    cpsgd.refuses("Others may read", "pair", "leader", *words)


def test_tokens_are_made_for_clients_and_servers(cpsgd: Any, tmp_path: Path) -> None:
    words = (*TASK, "task.json", "--admission", "tokens")
    cpsgd.refuses("--tokens", *words)
    cpsgd.succeeds(*words, "--tokens", 5)
    lines = (tmp_path / "tokens.txt").read_text().splitlines()
    assert len(set(lines)) == 5
    books = {
        role: open_books(
            role,
            PairServerOptions(
                task=tmp_path / "task.json",
                secrets=tmp_path / f"{role}.json",
                store=str(tmp_path / f"{role}.db"),
                tokens=tmp_path / f"{role}-tokens.txt",
            ),
        )
        for role in ("leader", "helper")
    }
    leader, helper, task = Leader(books["leader"]), Helper(books["helper"]), books["leader"].task
    keys = {"leader_key": task.key("leader", 0), "helper_key": task.key("helper", 0)}
    verdicts = []
    for line in [*lines[:2], lines[0]]:
        (tmp_path / "own.txt").write_text(line + "\n")
        integers, tokens = np.ones(DIM, dtype=np.uint32), read_tokens(tmp_path / "own.txt")
        [found] = leader.read([make_upload(task.shape(0), 0, integers, tokens=tokens, **keys).to_bytes()])
        if isinstance(found, Prepared):
            [found] = leader.settle([found], helper.verify(leader.evaluate([found])))
        verdicts.append(found)
    assert verdicts == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.SENT_BEFORE]
    for each in books.values():
        each.store.close()
    for wrong in ("", "ab", lines[0].split()[0], "x" * 64 + " " + "y" * 64):
        (tmp_path / "own.txt").write_text(wrong)
        with pytest.raises(ParameterError, match="tokens"):
            read_tokens(tmp_path / "own.txt")


def test_a_missing_extra_is_named(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.cli.pair.find_spec", lambda name: None if name == "uvicorn" else object())
    cpsgd.refuses("need uvicorn: pip install 'cpsgd[pair]'", "pair", "demo")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--leader", "http://phones.example"), "not encrypted"),
        (("--helper", "ftp://x"), "https://"),
        (("--rounds", "0"), "rounds"),
        (("--admission", "all"), "admission"),
        (("--participation", "poisson:0.1", "--rounds", "5"), "servers see who sends"),
    ],
)
def test_tasks_that_would_be_unsafe_are_refused(
    cpsgd: Any, changed: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    cpsgd.refuses(said, *PLAN, *URLS, "--out", "task.json", *changed)
    for words in ((*PLAN, "--out", "task.json"), (*PLAN, *URLS), (*PLAN[:-1], *URLS, "--out", "task.json")):
        cpsgd.refuses("addresses of both servers", *words)
    assert not list(tmp_path.iterdir())


def test_servers_refuse_what_is_missing(cpsgd: Any) -> None:
    cpsgd.succeeds(*TASK, "task.json")
    words = ("--task", "task.json", "--secrets", "helper.json", "--store", "helper.db")
    cpsgd.refuses("Missing --roster", "pair", "helper", *words)
    cpsgd.refuses("plain http", "pair", "helper", *words, "--host", "0.0.0.0")
    cpsgd.refuses("--certificate and --key", "pair", "helper", *words, "--key", "k")
    cpsgd.refuses("--population", "pair", "helper", *words, "--ledger", "l")
    cpsgd.refuses("identity or tokens", "pair", "submit", "v.npy", "--task", "task.json", "--upload", "u")


@pytest.mark.slow
def test_a_round_by_commands_over_tls_with_roster_and_budget(cpsgd: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    folder.mkdir()
    roster = []
    for index in range(9):
        roster.append(cpsgd.json("round identity", "create", f"client{index}.key")["public_key"])
        np.save(f"v{index}.npy", np.full(DIM, 0.1))
    Path("roster").write_text("\n".join(roster) + "\n")
    cpsgd.succeeds("budget", "create", "b.ledger", "--population", "phones", "--epsilon", 20, "--delta", 1e-4)
    _certificate(tmp_path)
    options = (
        *("--certificate", "server.pem", "--key", "server.key", "--ca", "server.pem"),
        *("--roster", "roster", "--ledger", "b.ledger", "--population", "phones"),
    )
    with servers(folder, admission="roster", scheme="https", options=options) as running:
        for index in range(9):
            words = ("pair", "submit", f"v{index}.npy", "--task", "pair/task.json", "--ca", "server.pem")
            sent = (*words, "--identity", f"client{index}.key", "--upload", f"u{index}")
            assert cpsgd.json(*sent)["verdict"] == "accepted"
            # Again with the same bytes, and the vector is not needed any more.
            Path(f"v{index}.npy").unlink()
            assert cpsgd.json(*sent)["verdict"] == "accepted"
        untrusted = cpsgd(
            "pair", "submit", "v0.npy", "--task", "pair/task.json", "--identity", "client0.key", "--upload", "u0"
        )
        assert untrusted.exit_code == 2
        asked = (
            "pair",
            "collect",
            "--task",
            "pair/task.json",
            "--secrets",
            "pair/collector.json",
            "--ca",
            "server.pem",
        )
        old = ssl.create_default_context(cafile="server.pem")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        for url in (running.task.leader.url, running.task.helper.url):
            with pytest.raises(httpx.ConnectError, match="SSL"):
                httpx.get(url, verify=old, trust_env=False)
        found = cpsgd.json(*asked, "--round", 0, "--out", "mean.npy", "--at", 9)
        assert found["reports"] == 9
        first = np.load("mean.npy")
        assert first.shape == (DIM,)
        cpsgd.succeeds(*asked, "--round", 0, "--out", "again.npy")
        assert np.array_equal(np.load("again.npy"), first)
        start = time.monotonic()
        cpsgd.refuses("are needed", *asked, "--round", 1, "--out", "none.npy", "--within", 1.5)
        assert time.monotonic() - start > 1.5
        assert [running.stop(role, signal.SIGINT) for role in ("leader", "helper")] == [0, 0]
    # Each server has charged for itself.
    entries = cpsgd.json("budget", "show", "b.ledger")["populations"][0]["entries"]
    assert len(entries) == 2
    assert "Traceback" not in (folder / "leader.log").read_text() + (folder / "helper.log").read_text()


def _certificate(folder: Path) -> None:
    """A certificate of 127.0.0.1 that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.mark.slow
def test_the_demo_runs(cpsgd: Any) -> None:
    found = cpsgd.json("pair", "demo", "--clients", 40, "--dim", 50)
    assert found["reports"] == 32
    assert found["squared_error"] < 5 * found["expected_squared_error"]

"""`zufluss doctor` without a server: what it finds on this machine."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from zufluss.cli import local_checks
from zufluss.cli.local_checks import LocalFinding, machine_findings, server_findings
from zufluss.config.load import Configuration

from .conftest import Result

Run = Callable[..., Result]
FAST = ("-D", "client.connect-timeout=1s", "-D", "client.request-timeout=1s")


def found(settings: dict[str, str], subject: str) -> list[LocalFinding]:
    """The findings about one subject for a server with these settings."""
    findings = server_findings(Configuration.of(settings))
    return [finding for finding in findings if finding.subject == subject]


def test_every_check_of_the_machine_says_something() -> None:
    subjects = [finding.subject for finding in machine_findings()]
    wanted = {"python", "packages", "kernels", "open files", "memory", "threads", "clock", "spark"}
    assert wanted <= {*subjects}
    assert all(finding.state in ("ok", "warning", "problem") for finding in machine_findings())


def test_doctor_works_without_a_server_and_says_so(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("doctor", "-o", "json", "--bootstrap", address, *FAST)
    assert result.code == 5, "the user named a server that does not answer"
    rows = json.loads(result.out)
    (server,) = (row for row in rows if row["subject"] == "server")
    assert "only this machine was checked" in server["finding"]
    assert {"kernels", "data directory"} <= {row["subject"] for row in rows}


def test_a_configuration_is_checked_key_by_key(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("dta.dir: x\nzufluss.log.flush: os\n")
    result = run("doctor", "-o", "json", "--config", str(config), "-b", "127.0.0.1:1", *FAST)
    rows = {row["subject"]: row for row in json.loads(result.out)}
    assert "did you mean data.dir?" in rows["configuration"]["finding"]
    assert rows["durability"]["state"] == "warning"
    config.write_text("zufluss.log.flush: never\n")
    wrong = run("doctor", "-o", "json", "--config", str(config), "-b", "127.0.0.1:1", *FAST)
    rows = {row["subject"]: row for row in json.loads(wrong.out)}
    assert rows["configuration"]["state"] == "problem"
    assert "never" in rows["configuration"]["finding"]


def test_a_data_directory_that_cannot_be_used_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fine, *_) = found({"data.dir": str(tmp_path / "new" / "deep")}, "data directory")
    assert "which the first start creates" in fine.text
    file = tmp_path / "file"
    file.write_text("")
    (problem, *_) = found({"data.dir": str(file)}, "data directory")
    assert (problem.state, "is not a directory" in problem.text) == ("problem", True)
    monkeypatch.setattr(local_checks.os, "access", lambda *args: False)
    (problem, *_) = found({"data.dir": str(tmp_path)}, "data directory")
    assert (problem.state, "is not writable" in problem.text) == ("problem", True)


@pytest.mark.parametrize(
    ("kind", "state"), [("nfs4", "warning"), ("tmpfs", "warning"), ("ext4", "ok")]
)
def test_the_file_system_of_the_data_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nother {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr(local_checks, "MOUNTS", mounts)
    monkeypatch.setattr(local_checks, "DISK_MIN", 0)
    finding = found({"data.dir": str(tmp_path)}, "data directory")[0]
    assert finding.state == state
    assert kind in finding.text


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_checks, "DISK_MIN", 1 << 60)
    finding = found({"data.dir": str(tmp_path)}, "data directory")[0]
    assert (finding.state, "without space writes are refused" in finding.text) == ("problem", True)


def test_a_taken_port_names_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = found({"bind.listeners": f"FLUSS://127.0.0.1:{port}"}, f"port {port}")
        assert "is taken by process " in finding.text
    (free,) = found({"bind.listeners": f"FLUSS://127.0.0.1:{port}"}, f"port {port}")
    assert (free.state, "is free" in free.text) == ("ok", True)
    (wrong,) = found({"bind.listeners": "FLUSS://192.0.2.1:7"}, "port 7")
    assert wrong.state == "problem"


def test_dangerous_values_are_warned_of() -> None:
    open_to_all = {"bind.listeners": "FLUSS://0.0.0.0:0"}
    assert found(open_to_all, "security")[0].state == "warning"
    assert not found(open_to_all | {"security.protocol.map": "FLUSS:sasl"}, "security")
    assert found({"zufluss.kv.memory": "9000gb"}, "row memory")[0].state == "warning"
    assert not found({}, "security") + found({}, "durability") + found({}, "row memory")


def test_a_catalog_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    lake = {
        "datalake.format": "iceberg",
        "datalake.iceberg.type": "rest",
        "datalake.iceberg.uri": "http://127.0.0.1:1",
        "datalake.iceberg.warehouse": str(tmp_path),
    }
    (problem,) = found(lake, "lake")
    assert problem.state == "problem"
    lake |= {
        "datalake.iceberg.type": "sql",
        "datalake.iceberg.uri": f"sqlite:///{tmp_path}/catalog.db",
    }
    (fine,) = found(lake, "lake")
    assert (fine.state, "answers" in fine.text) == ("ok", True)


def test_limits_that_are_too_low_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        resource.RLIMIT_NOFILE: (256, 512),
        resource.RLIMIT_AS: (1 << 30, 1 << 30),
        resource.RLIMIT_NPROC: (50, 50),
    }
    monkeypatch.setattr(local_checks.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(local_checks, "MEMORY_MIN", 1 << 60)
    states = {finding.subject: finding.state for finding in machine_findings()}
    assert states["open files"] == states["address space"] == states["memory"] == "problem"
    assert states["threads"] == "warning"


def test_a_check_that_fails_is_a_finding_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no look")

    monkeypatch.setattr(local_checks, "_version", lambda name: fail())
    findings = {finding.subject: finding for finding in machine_findings()}
    assert "no look" in findings["python"].text
    assert "clock" in findings

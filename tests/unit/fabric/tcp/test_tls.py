"""Certificates: whose name they must carry, and that renewed ones are used without a restart."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from testkit.fabric.tcp import SECRET, Serve, doubles, linked, table_at
from testkit.models.checkpoints import save_checkpoint
from testkit.processes.certificates import Authority
from testkit.waiting import until

from services.attention.setup.batch_size import WITHOUT_GPU
from services.attention.setup.remote_link import remote_link
from services.config import Settings
from services.errors import ConfigError
from services.experts.serving import Loader
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.tls import ClientTls, ServerTls, server_tls
from services.model.load_spec import load_spec
from services.routing import RoutingTable, Seat, even_groups

NAME = "mesh-experts.models.svc"
"""As a headless service has one, whatever address a pod gets."""
CPU = torch.device("cpu")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def server(served: Serve, authority: Authority) -> ExpertServer:
    return served(tls=ServerTls(*authority.certificate(f"DNS:{NAME}")))


def answered(server: ExpertServer, tls: ClientTls | None) -> bool:
    with linked(table_at(server), tls=tls) as link:
        return doubles(link)


def refused(server: ExpertServer, tls: ClientTls | None) -> str:
    """Why an attention worker does not use the seat."""
    with linked(table_at(server), tls=tls, ready=False) as link:
        (seat,) = link._seats.links.values()
        until(lambda: seat.problem is not None, "it is refused")
        assert link.faults().get("tls", 0) >= 1
        assert not link.usable()
        return seat.problem.message


def test_a_certificate_may_carry_a_name_that_is_not_the_address(
    server: ExpertServer, authority: Authority, tmp_path: Path
) -> None:
    """The name alone is not enough: another authority's certificate may carry it, too."""
    unknown = Authority(tmp_path / "elsewhere", "another")
    assert answered(server, ClientTls(authority.file, NAME))
    assert "IP address mismatch" in refused(server, ClientTls(authority.file))
    assert "Hostname mismatch" in refused(server, ClientTls(authority.file, "another.models.svc"))
    assert "certificate verify failed" in refused(server, ClientTls(unknown.file, NAME))


def test_rows_of_many_calls_travel_encrypted(server: ExpertServer, authority: Authority) -> None:
    x_TD = torch.randn(2000, 4)
    with linked(table_at(server), tls=ClientTls(authority.file, NAME)) as link:
        handles = [link.dispatch(0, x_TD, torch.zeros(2000, 1).long(), torch.ones(2000, 1)) for _ in range(20)]
        assert all(torch.equal(link.combine(handle), 2 * x_TD) for handle in handles)


def test_a_renewed_certificate_is_used_by_the_next_connection(server: ExpertServer, authority: Authority) -> None:
    with linked(table_at(server), tls=ClientTls(authority.file, NAME)) as before:
        authority.certificate("DNS:renewed")
        assert answered(server, ClientTls(authority.file, "renewed"))
        assert "Hostname mismatch" in refused(server, ClientTls(authority.file, NAME))
        assert doubles(before)
        assert [seat.connections for seat in before._seats.links.values()] == [1], "what was there goes on"


def test_a_renewed_authority_is_trusted_by_the_next_connection(server: ExpertServer, authority: Authority) -> None:
    tls = ClientTls(authority.file, NAME)
    assert answered(server, tls)
    renewed = Authority(authority.file.parent, "the next authority")
    renewed.certificate(f"DNS:{NAME}")
    assert answered(server, tls)


def test_a_secret_of_kubernetes_changes_by_a_link(served: Serve, tmp_path: Path, authority: Authority) -> None:
    """Folders by number, and a link to the one in force, which is swapped."""
    for number, name in enumerate((NAME, "renewed")):
        authority.certificate(f"DNS:{name}")
        shutil.copytree(authority.file.parent, tmp_path / f"..{number}")
    (tmp_path / "..data").symlink_to("..0")
    for file in ("tls.crt", "tls.key"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    server = served(tls=ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key"))
    assert answered(server, ClientTls(authority.file, NAME))
    (tmp_path / "..tmp").symlink_to("..1")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    assert answered(server, ClientTls(authority.file, "renewed"))


def test_files_that_do_not_fit_together_yet_change_nothing(
    server: ExpertServer, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.file.with_name("tls.crt"), authority.file.with_name("tls.key")
    renewed = authority.certificate("DNS:renewed", "next")
    os.replace(renewed[0], cert)
    for _ in range(2):
        assert answered(server, ClientTls(authority.file, NAME))
    notes = [record for record in caplog.records if "stays in use" in record.getMessage()]
    assert len(notes) == 1
    os.replace(renewed[1], key)
    assert answered(server, ClientTls(authority.file, "renewed"))


def test_files_that_are_gone_for_a_while_change_nothing(server: ExpertServer, authority: Authority) -> None:
    cert = authority.file.with_name("tls.crt")
    hidden = cert.rename(cert.with_name("hidden"))
    assert answered(server, ClientTls(authority.file, NAME))
    hidden.rename(cert)
    assert answered(server, ClientTls(authority.file, NAME))


def test_files_that_are_none_or_not_all_are_refused_by_name(tmp_path: Path) -> None:
    (file := tmp_path / "not-pem").write_text("not PEM")
    assert server_tls(None, None) is None
    for wrong in (lambda: server_tls(file, None), lambda: server_tls(None, file)):
        with pytest.raises(ConfigError, match="--fabric-tls-cert and --fabric-tls-key"):
            wrong()
    with pytest.raises(ConfigError, match="not-pem"):
        server_tls(file, file)
    with pytest.raises(ConfigError, match=r"--fabric-tls-ca .*nowhere"):
        ClientTls(tmp_path / "nowhere")


def test_a_key_that_asks_for_a_password_is_refused_and_not_waited_for(authority: Authority) -> None:
    cert, key = authority.certificate(f"DNS:{NAME}")
    locked = key.with_name("locked.key")
    words = ["pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"locked\.key"):
        server_tls(cert, locked)


def test_the_settings_of_both_roles_meet(tmp_path: Path, authority: Authority) -> None:
    """As the command line gives them; the seat's address is in nobody's certificate."""
    folder = save_checkpoint(tmp_path / "model", "qwen3_moe")
    (secret := tmp_path / "secret").write_bytes(SECRET)
    spec, facts = load_spec(folder), {"fabric_secret_file": secret, "fabric_lane": "tcp"}
    cert, key = authority.certificate(f"DNS:{NAME}")
    (group,) = even_groups(list(spec.moe_layers), spec.num_experts, 1)
    seat_settings = Settings(model=folder, fabric_tls_cert=cert, fabric_tls_key=key, **facts)
    loader = Loader(seat_settings, spec, worker="experts-0", dtype=torch.float32, device=CPU, version="0")
    serving = loader(group, 0, threading.Event())
    seats = (Seat(number=0, worker="experts-0", group=0, host="127.0.0.1", port=serving.port),)
    table = RoutingTable(
        epoch=1, fingerprint=spec.fingerprint, num_experts=spec.num_experts, groups=(group,), seats=seats
    )
    try:
        for name, ready in ((NAME, True), (None, False)):
            settings = Settings(layout="disaggregated", fabric_tls_ca=authority.file, fabric_tls_name=name, **facts)
            link = remote_link(settings, spec, torch.float32, CPU, "attention-0", size=WITHOUT_GPU)
            link.apply(table)
            try:
                until(lambda: link.wait_ready(0.1) or link.faults(), "it is used or refused")  # noqa: B023
                assert (not link.missing(), link.faults().keys()) == (ready, {"tls"} - ({"tls"} if ready else set()))
            finally:
                link.close()
    finally:
        serving.drain(0.0)

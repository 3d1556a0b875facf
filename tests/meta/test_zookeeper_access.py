"""Login and encryption between a store and ZooKeeper."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kazoo.exceptions import NoAuthError

from zufluss.config.load import Configuration
from zufluss.errors import ConfigError
from zufluss.meta.api import Create, MetaStoreError
from zufluss.meta.open import open_store
from zufluss.meta.zookeeper import ZooKeeperStore
from zufluss.meta.zookeeper_client import ZooKeeperAccess, ZooKeeperClient
from zufluss.testing.zookeeper import ZooKeeper


def _access(address: str, **keys: str) -> ZooKeeperAccess:
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    own = {f"zufluss.zookeeper.{key}": value for key, value in named.items()}
    return ZooKeeperAccess.of(Configuration.of({"zookeeper.address": address, **own}))


async def _roundtrip(access: ZooKeeperAccess, path: str = "/a") -> None:
    store = await ZooKeeperStore.open(access, "/zufluss")
    try:
        await store.transact([Create(path, b"1")])
        assert await store.read(path) is not None
    finally:
        await store.close()


# Digest


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    with ZooKeeper(tmp_path_factory.mktemp("single")) as zookeeper:
        yield zookeeper


async def test_nodes_of_a_user_are_closed_to_others(
    single: ZooKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading is refused as well: the metadata have what tables hold, and who wrote it."""
    await _roundtrip(_access(single.address, digest="ann:secret"))
    await _roundtrip(_access(single.address, digest="ann:secret"), "/again")
    for stranger in ({}, {"digest": "ann:wrong"}, {"digest": "bob:secret"}):
        with pytest.raises(MetaStoreError, match=r"does not let this server use .*digest"):
            await _roundtrip(_access(single.address, **stranger), "/stranger")
    nobody = await ZooKeeperClient.open(_access(single.address))
    with pytest.raises(NoAuthError):
        await nobody.data(["/zufluss", "/zufluss/store/a"])
    await nobody.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# TLS


class Authority:
    """Signs certificates, and writes them to files."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(_pem(self._certificate(self._name, self._key, is_authority=True)))

    def issue(self, name: str) -> tuple[Path, Path]:
        """The files of a certificate for this host, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(_pem(self._certificate(_name(name), key)))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, key_file

    def _certificate(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(address, critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def encrypted(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[ZooKeeper]:
    certificate, key = authority.issue("server")
    both = certificate.with_name("server-both.pem")
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    tls = {
        "ssl.keyStore.location": str(both),
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": str(authority.file),
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "need",
    }
    with ZooKeeper(tmp_path_factory.mktemp("encrypted"), tls=tls) as zookeeper:
        yield zookeeper


async def test_a_store_and_zookeeper_show_each_other_certificates(
    encrypted: ZooKeeper, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = map(str, authority.issue("client"))
    ours = {"tls": "true", "tls__certificate": certificate, "tls__key": key}
    await _roundtrip(_access(encrypted.address, tls__ca=str(authority.file), **ours))
    monkeypatch.setattr("zufluss.meta.zookeeper_client.CONNECT_SECONDS", 1.5)
    impostor = Authority(tmp_path, "impostor")
    theirs = tuple(map(str, impostor.issue("client")))
    refused = [
        _access(encrypted.address, tls__ca=str(impostor.file), **ours),  # not who signs servers
        _access(encrypted.address, **ours),  # nor are the authorities of the system
        _access(encrypted.address, tls="true", tls__ca=str(authority.file)),  # no certificate
        _access(
            encrypted.address,
            tls="true",
            tls__ca=str(authority.file),
            tls__certificate=theirs[0],
            tls__key=theirs[1],
        ),
        _access(encrypted.address),  # not encrypted
    ]
    for access in refused:
        with pytest.raises(MetaStoreError, match="let this one in"):
            await _roundtrip(access, "/stranger")


# SASL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_only_users_who_log_in_by_sasl_are_let_in_and_nodes_belong_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZooKeeper(tmp_path, sasl={"ann": "secret", "bob": "other"}) as zookeeper:
        await _roundtrip(_access(zookeeper.address, sasl="ann:secret"))
        await _roundtrip(_access(zookeeper.address, sasl="ann:secret"), "/again")
        with pytest.raises(MetaStoreError, match=r"does not let this server use .*sasl"):
            await _roundtrip(_access(zookeeper.address, sasl="bob:other"), "/stranger")
        with monkeypatch.context() as impatient:
            impatient.setattr("zufluss.meta.zookeeper_client.CONNECT_SECONDS", 1.5)
            for stranger in ({"sasl": "ann:wrong"}, {}):
                with pytest.raises(MetaStoreError):
                    await _roundtrip(_access(zookeeper.address, **stranger), "/stranger")
        store = await ZooKeeperStore.open(_access(zookeeper.address, sasl="ann:secret"), "/zufluss")
        zookeeper.stop()
        zookeeper.let_in({"ann": "new"})
        zookeeper.start()
        with pytest.raises(MetaStoreError, match="refused a request"):
            await store.read("/a")  # not "did not answer": there is nothing to wait for
        await store.close()


# Configuration


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"zookeeper.address": "one:2181/path"}, r"belongs into zookeeper\.path\.root"),
        ({"zufluss.zookeeper.digest": "ann"}, "allowed: user:password"),
        ({"zufluss.zookeeper.digest": ":secret"}, "allowed: user:password"),
        ({"zufluss.zookeeper.sasl": "ann:"}, "allowed: user:password"),
        (
            {"zufluss.zookeeper.digest": "ann:secret", "zufluss.zookeeper.sasl": "ann:secret"},
            "two logins; set one of them",
        ),
        ({"zufluss.zookeeper.tls.key": "file"}, "go together"),
    ],
)
def test_an_access_that_cannot_work_is_refused(keys: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        ZooKeeperAccess.of(Configuration.of({"zookeeper.address": "one:2181", **keys}))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"zookeeper.address": "one:abc"}, r"zookeeper\.address = 'one:abc' is not allowed"),
        ({"zookeeper.path.root": "a//b"}, r"zookeeper\.path\.root = 'a//b' is not allowed"),
    ],
)
async def test_the_error_names_the_option_that_is_wrong(keys: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        await open_store(Configuration.of({"zookeeper.address": "one:2181", **keys}))

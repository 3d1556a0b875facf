"""Keys of lake formats: taken from every source as text, secrets kept to ourselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from zufluss.config import Configuration
from zufluss.config.lake import embedded_lake, handed_out, is_secret
from zufluss.config.options import DATALAKE_FORMAT

SECRETS = {
    "s3.access-key-id": "AKIA",
    "s3.secret-access-key": "wJalr",
    "s3.session-token": "FwoG",
    "credential": "id:geheim",
    "jdbc.Password": "geheim",
    "header.Authorization": "Bearer x",
    "uri": "postgresql+psycopg://iceberg:geheim@db:5432/catalog",
}
OPEN = {
    "type": "rest",
    "uri": "https://catalog.example:8181/ws?warehouse=a:b@c",
    "warehouse": "s3://lake/warehouse",
    "s3.endpoint": "http://minio:9000",
    "s3.path-style-access": "true",
}


def test_lake_keys_come_from_yaml_environment_and_command_line_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "datalake.format: iceberg\n"
        "datalake.iceberg.uri: http://one\n"
        "datalake:\n  iceberg:\n    s3:\n      path-style-access: true\n      region: us-east-1\n"
        "datalake.paimon.warehouse: /paimon\n"
    )
    environ = {
        "ZUFLUSS_DATALAKE_ICEBERG_URI": "http://two",
        "ZUFLUSS_DATALAKE_ICEBERG_S3_ACCESS__KEY__ID": "AKIA",
        "ZUFLUSS_DATALAKE_ICEBERG_S3_REGION": "eu-central-1",
    }
    conf = Configuration.load(path, environ, ["datalake.iceberg.s3.region=eu-west-1"])
    assert conf[DATALAKE_FORMAT] == "iceberg"
    assert conf.lake_properties("iceberg") == {
        "uri": "http://two",
        "s3.path-style-access": "true",
        "s3.access-key-id": "AKIA",
        "s3.region": "eu-west-1",
    }
    assert conf.lake_properties("paimon") == {"warehouse": "/paimon"}
    assert conf.lake_properties("lance") == {}
    assert caplog.records == []


@pytest.mark.parametrize("key", ["datalake.icebreg.uri", "datalake.iceberg.", "datalake.uri"])
def test_a_key_of_no_lake_format_is_still_unknown(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf = Configuration.of({key: "x"})
    assert key in caplog.records[0].getMessage()
    assert conf.lake_properties("iceberg") == {}


@pytest.mark.parametrize(("key", "value"), SECRETS.items())
def test_a_secret_is_neither_shown_nor_handed_out(key: str, value: str) -> None:
    conf = Configuration.of({f"datalake.iceberg.{key}": value})
    (row,) = [r for r in conf.effective() if r.key == f"datalake.iceberg.{key}"]
    assert (row.value, row.origin) == ("******", "code")
    assert value not in repr(conf)
    assert handed_out("iceberg", conf.lake_properties("iceberg")) == {}


@pytest.mark.parametrize(("key", "value"), OPEN.items())
def test_what_is_no_secret_is_shown_and_handed_out_as_a_table_property(
    key: str, value: str
) -> None:
    conf = Configuration.of({f"datalake.iceberg.{key}": value})
    shown = {row.key: row.value for row in conf.effective()}
    assert shown[f"datalake.iceberg.{key}"] == value
    assert not is_secret(key, value)
    out = handed_out("iceberg", conf.lake_properties("iceberg"))
    assert out == {f"table.datalake.iceberg.{key}": value}


def test_the_embedded_lake_lies_in_the_data_directory_and_is_icebergs_alone(
    tmp_path: Path,
) -> None:
    assert embedded_lake("paimon", tmp_path) == {}
    keys = embedded_lake("iceberg", tmp_path)
    assert keys["datalake.iceberg.uri"] == f"sqlite:///{tmp_path}/lake/catalog.db"
    assert keys["datalake.iceberg.warehouse"] == f"file://{tmp_path}/lake/warehouse"
    assert handed_out("iceberg", Configuration.of(keys).lake_properties("iceberg")).keys() == {
        "table.datalake.iceberg.type",
        "table.datalake.iceberg.uri",
        "table.datalake.iceberg.warehouse",
    }

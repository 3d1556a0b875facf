"""Stands in for the command `aws s3 sync FROM TO` of the pages, with the library it is made of.

The objects at the old address are deleted, because nothing may need them after the move.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import boto3

from zufluss.remote.uri import parse_location
from zufluss.testing.s3 import ACCESS_KEY, REGION, SECRET_KEY

ENDPOINT = "ZUFLUSS_TEST_S3_ENDPOINT"
"""The environment variable with the address of the store."""


def client(endpoint: str) -> Any:
    """Return a client of the store at an address."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def main(service: str, command: str, source: str, target: str) -> None:
    assert (service, command) == ("s3", "sync")
    store = client(os.environ[ENDPOINT])
    origin, place = (parse_location(uri, "the page") for uri in (source, target))
    listed = store.list_objects_v2(Bucket=origin.authority, Prefix=origin.path[1:] + "/")
    assert listed["KeyCount"] > 0
    for each in listed["Contents"]:
        key = place.path[1:] + each["Key"].removeprefix(origin.path[1:])
        copied = {"Bucket": origin.authority, "Key": each["Key"]}
        store.copy_object(Bucket=place.authority, Key=key, CopySource=copied)
        store.delete_object(**copied)


if __name__ == "__main__":
    main(*sys.argv[1:])

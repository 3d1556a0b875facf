"""An S3 server that checks signatures and policies: what tokens really open.

moto looks at the policies of users and roles, not at the policy of a session. So a session policy
is tried by giving it to a role of its own.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3

from zufluss.testing.s3 import REGION, S3Server

ACCOUNT = "123456789012"
SERVER_ARN = f"arn:aws:iam::{ACCOUNT}:user/server"
EVERYTHING = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
}


class Iam:
    """Users and roles of a server of moto."""

    def __init__(self, s3: S3Server) -> None:
        self.s3 = s3
        self._client = self._iam("setup", "setup")
        admin = self.user("admin")
        self._admin = self._iam(admin["s3.access-key"], admin["s3.secret-key"])

    def _iam(self, access_key: str, secret_key: str) -> Any:
        return boto3.client(
            "iam",
            endpoint_url=self.s3.endpoint,
            region_name=REGION,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
        )

    def user(self, name: str) -> dict[str, str]:
        """Make a user that may do everything; the properties of a store with its keys."""
        self._client.create_user(UserName=name)
        self._client.put_user_policy(
            UserName=name, PolicyName="all", PolicyDocument=json.dumps(EVERYTHING)
        )
        return self.keys(name)

    def keys(self, name: str) -> dict[str, str]:
        """New keys of a user."""
        key = self._client.create_access_key(UserName=name)["AccessKey"]
        return {
            **self.s3.properties,
            "s3.access-key": key["AccessKeyId"],
            "s3.secret-key": key["SecretAccessKey"],
        }

    def revoke(self, name: str, keys: dict[str, str]) -> None:
        """Make keys of a user invalid, also while requests are checked."""
        self._admin.delete_access_key(UserName=name, AccessKeyId=keys["s3.access-key"])

    def role(self, name: str, policy: dict[str, Any] = EVERYTHING) -> str:
        """Make a role that the user `server` may assume; its ARN."""
        trust = {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Principal": {"AWS": SERVER_ARN}, "Action": "sts:AssumeRole"}
            ],
        }
        made = self._client.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
        self._client.put_role_policy(
            RoleName=name, PolicyName="policy", PolicyDocument=json.dumps(policy)
        )
        return str(made["Role"]["Arn"])

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Check every request meanwhile."""
        self._check_after("0")
        try:
            yield
        finally:
            self._check_after("inf")

    def _check_after(self, requests: str) -> None:
        request = urllib.request.Request(
            f"{self.s3.endpoint}/moto-api/reset-auth",
            requests.encode(),
            {"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request).close()

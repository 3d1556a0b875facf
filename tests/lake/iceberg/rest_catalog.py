"""A small Iceberg REST catalog over real HTTP, for tests of what lines and servers do wrong.

It answers from a SQLite catalog. `faults` says what happens to the next commits: `lost-request`
closes the line before the commit, `lost-answer` after it; a number is a status that is answered
instead, and with `+` in front after the commit was applied.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

_STATUS = {
    NoSuchTableError: 404,
    NoSuchNamespaceError: 404,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    CommitFailedException: 409,
}


class RestServer(ThreadingHTTPServer):
    """The server; `faults` are used up by commits, one each."""

    daemon_threads = True

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.catalog = catalog
        self.faults: list[str] = []

    @property
    def uri(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def rest_server(catalog: Catalog) -> Iterator[RestServer]:
    """A running server in front of a catalog."""
    server = RestServer(catalog)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def rest(self) -> RestServer:
        return cast(RestServer, self.server)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, handle: Any) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")][1:]
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        try:
            status, answer = handle(parts, body)
        except tuple(_STATUS) as problem:
            status, answer = _problem(_STATUS[type(problem)], str(problem))
        if status == 0:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _get(self, parts: list[str], _body: bytes) -> tuple[int, Any]:
        catalog = self.rest.catalog
        if parts == ["config"]:
            return 200, {"defaults": {}, "overrides": {}}
        if len(parts) == 2:
            properties = catalog.load_namespace_properties(parts[1])
            return 200, {"namespace": [parts[1]], "properties": properties}
        if len(parts) == 3:
            found = catalog.list_tables(parts[1])
            return 200, {"identifiers": [{"namespace": [n[0]], "name": n[1]} for n in found]}
        return 200, _table(catalog.load_table((parts[1], parts[3])))

    def _post(self, parts: list[str], body: bytes) -> tuple[int, Any]:
        catalog = self.rest.catalog
        if parts == ["namespaces"]:
            catalog.create_namespace(json.loads(body)["namespace"][0])
            return 200, {"namespace": json.loads(body)["namespace"]}
        if parts == ["tables", "rename"]:
            ends = [json.loads(body)[end] for end in ("source", "destination")]
            catalog.rename_table(*((*end["namespace"], end["name"]) for end in ends))
            return 200, {}
        if len(parts) == 3:
            return 200, _table(
                _create(
                    catalog,
                    parts[1],
                    CreateTableRequest.model_validate({"location": None, **json.loads(body)}),
                )
            )
        return self._commit((parts[1], parts[3]), CommitTableRequest.model_validate_json(body))

    def _commit(self, name: tuple[str, str], request: CommitTableRequest) -> tuple[int, Any]:
        fault = self.rest.faults.pop(0) if self.rest.faults else ""
        if fault == "lost-request":
            return 0, None
        if fault.isdecimal():
            return _problem(int(fault), "as the test asked")
        catalog = self.rest.catalog
        done = catalog.commit_table(catalog.load_table(name), request.requirements, request.updates)
        if fault == "lost-answer":
            return 0, None
        if fault.startswith("+"):
            return _problem(int(fault), "as the test asked, but applied")
        return 200, json.loads(done.model_dump_json())


def _create(catalog: Catalog, namespace: str, request: CreateTableRequest) -> Table:
    return catalog.create_table(
        (namespace, request.name),
        schema=request.table_schema,
        location=request.location,
        partition_spec=request.partition_spec or UNPARTITIONED_PARTITION_SPEC,
        sort_order=request.write_order or UNSORTED_SORT_ORDER,
        properties=request.properties,
    )


def _table(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _problem(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "Test", "code": status}}

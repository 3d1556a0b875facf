"""Generate the Python of the wire messages from `src/zufluss/wire/proto/*.proto`.

The generated code is checked in, so that installing zufluss needs no compiler. This script writes
it again after a change of a `.proto` file:

    <topic>_pb2.py, <topic>_pb2.pyi   protoc (grpcio-tools) with the mypy-protobuf plugin

`--check` writes nothing; it exits 1 and names the files that are not what would be generated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
PACKAGE = Path("zufluss/wire/proto")


def proto_files() -> list[Path]:
    """The `.proto` files, in name order."""
    return sorted((SRC / PACKAGE).glob("*.proto"))


def compile_protos(out: Path) -> None:
    """Run protoc over all topics into `out`, keeping the package path."""
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--proto_path={SRC}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
        *(str(path) for path in proto_files()),
    ]
    subprocess.run(command, check=True)


def generate(out: Path) -> dict[Path, str]:
    """All generated files: path relative to `src`, and text."""
    compile_protos(out)
    generated = sorted(p for p in out.rglob("*") if p.suffix in (".py", ".pyi"))
    return {path.relative_to(out): path.read_text() for path in generated}


def stale(files: dict[Path, str]) -> list[Path]:
    """The checked-in files that differ from `files`, and generated ones nothing generates now."""
    leftover = {p.relative_to(SRC) for p in (SRC / PACKAGE).glob("*_pb2.py*")} - files.keys()
    differing = {
        path
        for path, text in files.items()
        if not (SRC / path).exists() or (SRC / path).read_text() != text
    }
    return sorted(leftover | differing)


def write(files: dict[Path, str]) -> None:
    """Bring the checked-in files to the generated state."""
    for path in stale(files):
        if path in files:
            (SRC / path).write_text(files[path])
        else:
            (SRC / path).unlink()
        print(f"src/{path}")


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Generate the Python of the wire messages.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        files = generate(Path(out))
    if not arguments.check:
        write(files)
        return 0
    outdated = stale(files)
    for path in outdated:
        print(f"src/{path} is not current; run scripts/proto.py", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())

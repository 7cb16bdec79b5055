"""The committed code is what the protos say, and every field says what it is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import specdiff_dist.pb
from specdiff_dist.pb import roles_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "protos" / "specdiff" / "v1" / "roles.proto"
pytest.importorskip("grpc_tools", reason="the `test` extra brings grpcio-tools")


def documented_command() -> list[str]:
    """The line in specdiff_dist/pb/__init__.py that regenerates."""
    lines = [line for line in (specdiff_dist.pb.__doc__ or "").splitlines() if line.startswith("python -m ")]
    assert len(lines) == 1
    return [sys.executable, *shlex.split(lines[0])[1:]]


def run_protoc(folder: Path, *extra: str) -> None:
    command = [part.replace("_out=.", f"_out={folder}") for part in documented_command()]
    done = subprocess.run([*command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_committed_code_is_current(tmp_path):
    run_protoc(tmp_path, f"--descriptor_set_out={tmp_path / 'set'}")
    (fresh,) = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    fresh.ClearField("source_code_info")
    for described in fresh.message_type:
        for field in described.field:
            field.ClearField("json_name")  # protoc adds it, generated code leaves it out
    committed = FileDescriptorProto()
    roles_pb2.DESCRIPTOR.CopyToProto(committed)
    for described in committed.message_type:
        for field in described.field:
            field.ClearField("json_name")
    assert fresh == committed, "regenerate with the command in specdiff_dist/pb/__init__.py"


def test_committed_stub_is_current(tmp_path):
    run_protoc(tmp_path)
    fresh = (tmp_path / "specdiff_dist" / "pb" / "roles_pb2.pyi").read_text()
    assert fresh == Path(roles_pb2.__file__).with_suffix(".pyi").read_text()


def test_package_and_services():
    assert roles_pb2.DESCRIPTOR.package == "specdiff.v1"
    methods = {
        name: [m.name for m in service.methods] for name, service in roles_pb2.DESCRIPTOR.services_by_name.items()
    }
    assert methods == {
        "Drafter": ["Info", "Draft", "Release", "Calls"],
        "Verifier": ["Info", "Verify", "Resolve", "Release", "Calls"],
    }


DECLARATION = re.compile(r"^\s*(message|enum|service|rpc|(repeated |optional )?[\w.]+ \w+ = \d+;|[A-Z_0-9]+ = \d+;)")


def undocumented(source: str) -> list[str]:
    """Declarations not preceded by a comment line."""
    lines = source.splitlines()
    return [
        line.strip()
        for before, line in zip(["", *lines], lines, strict=False)
        if DECLARATION.match(line) and not before.strip().startswith("//")
    ]


def test_everything_declared_has_a_comment():
    source = PROTO.read_text()
    declared = sum(bool(DECLARATION.match(line)) for line in source.splitlines())
    described = FileDescriptorProto()
    roles_pb2.DESCRIPTOR.CopyToProto(described)
    enums = [*described.enum_type, *(enum for message in described.message_type for enum in message.enum_type)]
    expected = (
        len(described.message_type)
        + sum(len(message.field) for message in described.message_type)
        + sum(1 + len(enum.value) for enum in enums)
        + sum(1 + len(service.method) for service in described.service)
    )
    assert declared == expected, "the scan misses declarations"
    assert undocumented(source) == []


def test_the_scan_sees_a_missing_comment():
    assert undocumented("// Yes.\nmessage A {\n  // Yes.\n  bytes b = 1;\n  repeated C d = 2;\n}") == [
        "repeated C d = 2;"
    ]

"""Hub ids, against a hub of thirty lines on localhost."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.models.tiny_folder import write_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0" * 40
SCRIPT = """
import sys
from pathlib import Path
from specdiff_dist.errors import ModelUnavailable
from specdiff_dist.models import resolve
try:
    folder = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))
except ModelUnavailable as error:
    print("unavailable:", error)
else:
    print(folder.name, *sorted(path.name for path in folder.path.iterdir()))
"""


def resolve_at(endpoint: str, name: str, cache: Path) -> str:
    """What `resolve` says in a fresh process that knows this hub."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cache / "home")}
    command = [sys.executable, "-c", SCRIPT, name, str(cache)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def hub(tmp_path) -> Iterator[str]:
    """Endpoint of a hub that has one model, org/tiny, with code and other formats beside the data."""
    files = write_tiny_folder(tmp_path / "published")
    for name in ("modeling_evil.py", "pytorch_model.bin", "onnx/config.json", "consolidated.safetensors"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("unwanted")
    names = [path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()]

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            resolved = f"/org/tiny/resolve/{COMMIT}/"
            if self.path.startswith("/api/models/org/tiny/revision/main"):
                siblings = [{"rfilename": name} for name in names]
                self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
            elif self.path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
                tree = [{"type": "file", "path": n, "size": (files / n).stat().st_size, "oid": "0"} for n in names]
                self.answer(json.dumps(tree).encode())
            elif self.path.startswith(resolved):
                self.answer((files / self.path.removeprefix(resolved)).read_bytes())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_data_is_fetched_and_code_is_not(hub, tmp_path):
    expected = "org/tiny config.json model.safetensors tokenizer.json"
    assert resolve_at(hub, "org/tiny", tmp_path / "cache") == expected
    # What has been fetched once serves without the hub.
    assert resolve_at("http://127.0.0.1:9", "org/tiny", tmp_path / "cache") == expected


def test_a_model_the_hub_does_not_have(hub, tmp_path):
    said = resolve_at(hub, "org/absent", tmp_path / "cache")
    assert said.startswith("unavailable: org/absent is no local folder, and the hub has no public model of this name")


def test_a_hub_that_cannot_be_reached(tmp_path):
    said = resolve_at("http://127.0.0.1:9", "org/tiny", tmp_path / "cache")
    assert said.startswith("unavailable: org/tiny is no local folder, and cannot be fetched from the hub")
    assert said.endswith("name a local model folder")

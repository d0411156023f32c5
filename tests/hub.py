"""A Hub on loopback: the requests of huggingface_hub's snapshot_download, for tests."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"  # the commit of every repository


@dataclass
class Hub:
    """Repositories by name, and the paths that have been requested."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    url: str = ""
    requests: list[str] = field(default_factory=list)

    @property
    def downloads(self) -> list[str]:
        """Names of the files whose content has been requested."""
        return [path.rpartition("/")[2] for path in self.requests if path.startswith("GET:")]


@contextmanager
def serve_hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            is_listing = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_listing else parts[:2])
            folder = hub.repositories.get(name)
            if name in hub.gated:
                self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif folder is None:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif is_listing and parts[4] == "revision" and parts[5] not in ("main", COMMIT):
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif is_listing:
                hub.requests.append(f"{parts[4]}:{name}")
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                tree = [
                    {
                        "type": "file",
                        "path": str(path.relative_to(folder)),
                        "size": path.stat().st_size,
                        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                    }
                    for path in files
                ]
                info = {"id": name, "sha": COMMIT, "siblings": []}
                self.send(200, json.dumps(tree if parts[4] == "tree" else info).encode(), {})
            else:
                if self.command == "GET":
                    hub.requests.append(f"GET:{name}/{'/'.join(parts[4:])}")
                content = folder.joinpath(*parts[4:]).read_bytes()
                digest = hashlib.sha1(content).hexdigest()
                self.send(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

        def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

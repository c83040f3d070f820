"""A model hub on this machine: as much of its protocol as `huggingface_hub` asks for, and faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """Serves `files` of one repository. requests: what was asked for, as `METHOD path`; sent: bytes of file contents.

    status, error_code: of every answer, where there is a fault. cut_after: how many bytes of a file are sent before the
    connection breaks, for each of the next downloads. silent: nothing is answered until `stop`.
    """

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.requests: list[str] = []
        self.ranges: list[str | None] = []
        self.sent = 0
        self.status, self.error_code, self.cut_after = 200, "", list[int]()
        self.silent = False
        self._stopped = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def wait(self) -> None:
        self._stopped.wait(60)

    def stop(self) -> None:
        self._stopped.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if hub.silent:
            hub.wait()
        if hub.status != 200:
            self._send(hub.status, b"{}", with_body, {"X-Error-Code": hub.error_code})
        elif path.startswith(f"/api/models/{hub.repo}/revision/"):
            self._json({"id": hub.repo, "sha": COMMIT, "siblings": [_entry(*each) for each in hub.files.items()]}, with_body)
        elif path.startswith(f"/api/models/{hub.repo}/tree/"):
            self._json([_entry(name, data) for name, data in hub.files.items()], with_body)
        elif path.startswith(f"/{hub.repo}/resolve/") and path.rsplit("/", 1)[1] in hub.files:
            self._file(hub.files[path.rsplit("/", 1)[1]], with_body)
        else:
            missing = "EntryNotFound" if f"/{hub.repo}/" in path else "RepoNotFound"
            self._send(404, b"{}", with_body, {"X-Error-Code": missing})

    def _file(self, data: bytes, with_body: bool) -> None:
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not with_body:
            return self._send(200, data, False, tag)
        asked = self.headers.get("Range")
        self.hub.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if asked:
            tag["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cut_after.pop(0) if self.hub.cut_after else None
        self._send(206 if asked else 200, data[start:], True, tag, cut)

    def _json(self, value: Any, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), with_body, {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            with contextlib.suppress(ConnectionError):  # who asked went away
                self.wfile.write(body[:cut])
            self.hub.sent += len(body[:cut]) if "X-Repo-Commit" in headers else 0
        if cut is not None:
            self.close_connection = True


def _entry(name: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    lfs = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 134}
    return {
        "type": "file",
        "path": name,
        "rfilename": name,
        "size": len(data),
        "oid": digest[:40],
        "blobId": digest[:40],
        "lfs": lfs,
    }

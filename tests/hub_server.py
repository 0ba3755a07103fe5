"""A stand-in for the Hugging Face Hub on this machine: repositories, their visibility, and the commits made to them."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Repository:
    """What a repository was created as, and the files of its commits, the latest version of each."""

    def __init__(self, private: bool):
        self.private = private
        self.files: dict[str, bytes] = {}
        self.commits: list[set[str]] = []

    def download(self, folder: Path) -> Path:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


class HubServer(ThreadingHTTPServer):
    """
    Answers what `create_repo`, `repo_info` and `upload_folder` ask, and keeps all that is sent; 404 to anything else.

    All files are said to be small ones, so that their contents come with the commit and not by a storage protocol.
    """

    def __init__(self, user: str = "me"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.user = user
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str | None] = set()
        self.refused: list[str] = []
        self.mirror: Path | None = None  # folder that each repository is written to, as `user/name`
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self):
        parts = self._parts()
        if parts[:2] == ["api", "models"] and len(parts) == 4:
            name = "/".join(parts[2:])
            repository = self.server.repositories.get(name)
            if repository is not None:
                return self._answer(200, {"id": name, "private": repository.private, "sha": "0" * 40, "tags": []})
        return self._answer(404, {"error": "not found"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.tokens.add(self.headers["Authorization"])
        parts = self._parts()
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return self._answer(200, {"errors": [], "warnings": []})
        if parts[:2] == ["api", "models"] and parts[4:] in (["preupload", "main"], ["commit", "main"]):
            name = "/".join(parts[2:4])
            return self._preupload(body) if parts[4] == "preupload" else self._commit(name, body)
        self.server.refused.append(self.path)
        return self._answer(404, {"error": "not found"})

    def _create(self, wanted: dict):
        name = f"{wanted.get('organization') or self.server.user}/{wanted['name']}"
        status = 409 if name in self.server.repositories else 200
        if status == 200:
            private = wanted.get("private") is True or wanted.get("visibility") == "private"
            self.server.repositories[name] = Repository(private)
        self._answer(status, {"url": f"{self.server.endpoint}/{name}"})

    def _preupload(self, body: bytes):
        names = [file["path"] for file in json.loads(body)["files"]]
        files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        self._answer(200, {"files": files})

    def _commit(self, name: str, body: bytes):
        repository = self.server.repositories[name]
        rows = [json.loads(line) for line in body.splitlines()]
        assert rows[0]["key"] == "header" and {row["key"] for row in rows[1:]} == {"file"}
        files = {row["value"]["path"]: base64.b64decode(row["value"]["content"]) for row in rows[1:]}
        repository.files |= files
        repository.commits.append(set(files))
        if self.server.mirror is not None:
            repository.download(self.server.mirror / name)
        self._answer(200, {"commitUrl": f"{self.server.endpoint}/me/x/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _answer(self, status: int, content: dict):
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format, *args):
        pass

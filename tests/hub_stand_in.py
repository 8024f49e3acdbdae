"""A stand-in for the Hugging Face Hub on loopback: enough of its HTTP API for the real client to push and to load.

Repositories live in memory. Small files arrive inside the commit, large ones through LFS (a batch request, then a PUT);
files are served with the headers that the client's cache relies on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubStandIn:
    """Use as a context manager; `url` is what HF_ENDPOINT must be."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.unknown: list[str] = []
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sha(self, repo: str) -> str:
        """The commit id of a repository's only branch."""
        listing = "".join(f"{name}{hashlib.sha256(data).hexdigest()}" for name, data in self.repos[repo].items())
        return hashlib.sha1(listing.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: HubStandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def missing(self, code: str) -> None:
        self.reply(404, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def do_POST(self) -> None:
        hub, data = self.stand_in, self.body()
        if self.path == "/api/repos/create":
            wanted = json.loads(data)
            repo = f"{wanted['organization']}/{wanted['name']}"
            hub.repos.setdefault(repo, {})
            self.reply(200, {"url": f"{hub.url}/{repo}", "id": repo, "name": repo})
        elif self.path == "/api/validate-yaml":
            self.reply(200, {"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            files = json.loads(data)["files"]
            modes = {True: "lfs", False: "regular"}
            answer = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in files
            ]
            self.reply(200, {"files": answer})
        elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", self.path):
            objects = [
                {
                    "oid": item["oid"],
                    "size": item["size"],
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{found[1]}/{item['oid']}"}},
                }
                for item in json.loads(data)["objects"]
            ]
            self.reply(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            for line in data.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    hub.commits.append(value["summary"])
                elif entry["key"] == "file":
                    hub.repos[found[1]][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.repos[found[1]][value["path"]] = hub.blobs[value["oid"]]
            sha = hub.sha(found[1])
            self.reply(200, {"commitUrl": f"{hub.url}/{found[1]}/commit/{sha}", "commitOid": sha})
        else:
            hub.unknown.append(f"POST {self.path}")
            self.missing("EntryNotFound")

    def do_PUT(self) -> None:
        data = self.body()
        oid = self.path.rsplit("/", 1)[-1]
        assert hashlib.sha256(data).hexdigest() == oid, "the uploaded bytes differ from their announced checksum"
        self.stand_in.blobs[oid] = data
        self.reply(200)

    def do_GET(self) -> None:
        hub = self.stand_in
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            if found[1] not in hub.repos:
                self.missing("RepoNotFound")
                return
            names = [{"rfilename": name} for name in hub.repos[found[1]]]
            self.reply(200, {"id": found[1], "modelId": found[1], "sha": hub.sha(found[1]), "siblings": names})
        elif (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path)) and found[1] in hub.repos:
            files = hub.repos[found[1]].items()
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files
            ]
            self.reply(200, entries)
        elif path == "/api/agent-harnesses" or re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/.+", path):
            self.missing("EntryNotFound")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = hub.repos.get(found[1], {}).get(found[2])
            if content is None:
                self.missing("EntryNotFound")
            else:
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                self.reply(200, content, ETag=etag, X_Repo_Commit=hub.sha(found[1]), Accept_Ranges="bytes")
        else:
            hub.unknown.append(f"{self.command} {self.path}")
            self.missing("EntryNotFound")

    do_HEAD = do_GET

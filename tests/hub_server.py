"""A stand-in for the Hub on loopback that speaks as much of its protocol as the kit's client asks for.

Commits have times, of a clock that a test may set, and name their parent; an answer can be lost on its way.
"""

import base64
import contextlib
import datetime as dt
import hashlib
import json
import re
import socket
import threading
import time
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDERS = {"models": "model", "datasets": "dataset", "spaces": "space"}


class Hub:
    """Repositories as lists of commits, each a dict of files; faults are put in by `answers`."""

    def __init__(self):
        self.repos = {}  # (kind, name) -> {"private": bool, "commits": [(id, {path: bytes})]}, or "hidden"
        self.collections = {}  # slug -> as the Hub tells it
        self.uploads = {}  # sha256 -> bytes
        self.calls = []  # (method, path, authorisation)
        self.faults = []  # (part of a path, status), each once; "drop" answers nothing to what it does; or a call
        self.clock = lambda: dt.datetime.now(dt.timezone.utc)
        self.times = {}  # of commits by their id
        self.lock = threading.Lock()

    def files(self, name, kind="model"):
        return self.repos[kind, name]["commits"][-1][1]

    def commit(self, name, changes, kind="model"):
        """Add a commit and return its id; a change of None deletes."""
        commits = self.repos[kind, name]["commits"]
        files = {path: content for path, content in {**commits[-1][1], **changes}.items() if content is not None}
        digest = hashlib.sha1(commits[-1][0].encode())
        for path in sorted(files):
            digest.update(path.encode() + files[path])
        commits.append((digest.hexdigest(), files))
        self.times[commits[-1][0]] = self.clock()
        return commits[-1][0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        if self.dropped:
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while length := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def serve(self):
        body, token = self.body(), self.headers.get("Authorization", "")
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub = self.hub
        hub.calls.append((self.command, path, token))
        self.dropped = False
        for fault in hub.faults:
            if fault[0] in path:
                hub.faults.remove(fault)
                if isinstance(fault[1], int):
                    return self.refuse(fault[1], "Faulty")
                self.dropped = True
                if callable(fault[1]):
                    fault[1]()
                break
        if path == "/api/repos/create":
            return self.create(json.loads(body), token)
        if found := re.fullmatch("/api/collections(?:/([^/]+/[^/]+))?(/items)?", path):
            return self.collection(found[1], bool(found[2]), json.loads(body) if body else {})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path.startswith("/_upload/") and self.command == "PUT":
            hub.uploads[hashlib.sha256(body).hexdigest()] = body
            return self.answer(200, {})
        if found := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body))
        if found := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/(.*))?", path):
            return self.repository(FOLDERS[found[1]], found[2], found[3] or "", body, token)
        if found := re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.download(FOLDERS[found[1] or "models"], *found.group(2, 3, 4))
        return self.refuse(404, "NotFound")

    def create(self, asked, token):
        if not token:
            return self.refuse(401, "Unauthorized")
        kind, name = asked.get("type") or "model", f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"http://{self.headers['Host']}/{name}"
        if (kind, name) in self.hub.repos:
            return self.answer(409, {"error": "You already created this repo", "url": url})
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        first = hashlib.sha1(f"{kind} {name}".encode()).hexdigest()
        self.hub.repos[kind, name] = {"private": private, "commits": [(first, {".gitattributes": b""})]}
        self.hub.times[first] = self.hub.clock()
        return self.answer(200, {"url": url, "name": name, "id": name})

    def collection(self, slug, is_item, asked):
        known = self.hub.collections
        if slug is None:
            slug = f"{asked['namespace']}/{asked['title'].lower()}-0123456789abcdef01234567"
            if slug in known:
                return self.answer(409, {"slug": slug})
            about = {"owner": {"name": asked["namespace"]}, "lastUpdated": "2026-01-01T00:00:00.000Z", "upvotes": 0}
            known[slug] = {**asked, **about, "slug": slug, "items": [], "position": 0, "theme": "green"}
        if is_item:
            if any(item["id"] == asked["item"]["id"] for item in known[slug]["items"]):
                return self.refuse(409, "Conflict")
            item = {"_id": str(len(known[slug]["items"])), "position": len(known[slug]["items"])}
            known[slug]["items"].append(asked["item"] | item)
        return self.answer(200, known[slug])

    def batch(self, asked):
        host, known = self.headers["Host"], self.hub.uploads
        objects = []
        for one in asked["objects"]:
            actions = {"upload": {"href": f"http://{host}/_upload/{one['oid']}", "header": {}}}
            objects.append({**one, **({} if one["oid"] in known else {"actions": actions})})
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def repository(self, kind, name, rest, body, token):
        repo = self.hub.repos.get((kind, name))
        if repo is None or "hidden" in repo:
            return self.refuse(404, "RepoNotFound")
        revision, _, under = (rest.partition("/")[2] or "main").partition("/")
        ids = {one: files for one, files in repo["commits"]}
        commit = repo["commits"][-1][0] if revision == "main" else revision
        if rest == "" or rest.startswith("revision/"):
            if commit not in ids:
                return self.refuse(404, "RevisionNotFound")
            siblings = [{"rfilename": path} for path in ids[commit]]
            return self.answer(200, {"id": name, "sha": commit, "private": repo["private"], "siblings": siblings})
        if rest.startswith(("tree/", "paths-info/")):
            asked = urllib.parse.parse_qs(body.decode()).get("paths") or (json.loads(body)["paths"] if body else [])
            files = ids.get(commit, {})
            wanted = [path for path in files if path.startswith(under and f"{under}/")] if rest[0] == "t" else asked
            wanted = [path for path in wanted if path in files]
            if under and not wanted:
                return self.refuse(404, "EntryNotFound")
            return self.answer(
                200,
                [
                    {"type": "file", "path": p, "size": len(files[p]), "oid": hashlib.sha1(files[p]).hexdigest()}
                    for p in wanted
                ],
            )
        if rest.startswith("commits/"):
            listed = [
                {"id": one, "title": "", "message": "", "date": f"{self.hub.times[one]:%Y-%m-%dT%H:%M:%S.000Z}"}
                for one in reversed(ids)
            ]
            return self.answer(200, [one | {"authors": []} for one in listed])
        if rest.startswith("preupload/"):
            mode = {True: "lfs", False: "regular"}
            asked = json.loads(body)["files"]
            told = [
                {
                    "path": f["path"],
                    "uploadMode": mode[f["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for f in asked
            ]
            return self.answer(200, {"files": told})
        if rest.startswith("commit/"):
            if not token:
                return self.refuse(401, "Unauthorized")
            changes, (head, *lines) = {}, map(json.loads, body.splitlines())
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    changes[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    changes[value["path"]] = self.hub.uploads[value["oid"]]
                else:
                    changes[value["path"]] = None
            with self.hub.lock:
                if head["value"].get("parentCommit", repo["commits"][-1][0]) != repo["commits"][-1][0]:
                    return self.refuse(412, "PreconditionFailed")
                made = self.hub.commit(name, changes, kind)
            return self.answer(200, {"commitUrl": f"http://{self.headers['Host']}/{name}", "commitOid": made})
        return self.refuse(404, "NotFound")

    def download(self, kind, name, revision, path):
        repo = self.hub.repos.get((kind, name))
        if repo is None:
            return self.refuse(404, "RepoNotFound")
        commits = dict(repo["commits"])
        commit = repo["commits"][-1][0] if revision == "main" else revision
        if path not in commits.get(commit, {}):
            return self.refuse(404, "EntryNotFound")
        content = commits[commit][path]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.answer(200, content, ETag=tag, X_Repo_Commit=commit, Accept_Ranges="bytes")

    do_GET = do_POST = do_PUT = do_HEAD = serve


@contextlib.contextmanager
def serve_hub():
    """Serve a Hub of its own; yield it and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Serving", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def hub_in_use(monkeypatch, folder, token="hf_never_to_be_seen"):
    """Let the kit speak to a Hub of its own, with a token, without long pauses; yield it."""
    with serve_hub() as (hub, hub.address):
        speak_to(hub.address, monkeypatch, folder, token)
        yield hub


def speak_to(address, monkeypatch, folder, token="hf_never_to_be_seen"):
    """Let the kit of this process speak to the Hub of an address."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    from cpbkit.hub import client

    monkeypatch.setattr(client, "HfApi", lambda token: huggingface_hub.HfApi(endpoint=address, token=token))
    monkeypatch.setattr(client, "get_token", lambda: token)
    monkeypatch.setattr(client, "PAUSE", 0.001)
    patient = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr(_http, "time", patient)  # the client has tries and pauses of its own
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)

"""A Hub on the loopback interface: the endpoints that huggingface_hub calls, over a temporary folder.

    with HubServer(folder, tokens={"hf_...": "someone"}) as hub:
        HfApi(endpoint=hub.url, token="hf_...").create_repo("someone/draft")

Commits hold whole trees (path to blob), so every revision that a client knows can be read. Contents are files named by
their hash, as on the Hub: git's SHA-1 of a regular file, SHA-256 of one in LFS. `hub.requests` lists what was asked,
`hub.fail` makes an endpoint answer an error for a while.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass
class Blob:
    oid: str  # of the content: SHA-1 as git has it, SHA-256 in LFS
    size: int
    lfs: bool = False

    @property
    def entry(self) -> dict:
        """As the tree endpoint lists it."""
        pointer = {"lfs": {"oid": self.oid, "size": self.size, "pointerSize": 134}} if self.lfs else {}
        oid = hashlib.sha1(self.oid.encode()).hexdigest() if self.lfs else self.oid  # LFS: that of the pointer file
        return {"type": "file", "oid": oid, "size": self.size, **pointer}


@dataclass
class Commit:
    message: str
    files: dict[str, Blob]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: dict[str, str], name: str, message: str, files: dict[str, Blob]) -> str:
        text = json.dumps([message, len(self.commits), {path: blob.oid for path, blob in files.items()}])
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = Commit(message, files)
        ref[name] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        named = {**self.branches, **self.tags, **self.pulls}
        return named.get(revision, revision if revision in self.commits else None)


class Refusal(Exception):
    """An answer with an error status, and the header by which huggingface_hub knows it."""

    def __init__(self, status: int, text: str, code: str | None = None, headers: dict | None = None):
        self.status, self.body = status, {"error": text}
        self.headers = {"X-Error-Message": text, **({"X-Error-Code": code} if code else {}), **(headers or {})}


class HubServer:
    """
    Args:
        folder: Of contents and state.
        tokens: Token to user; a user writes to the namespace of that name.
        lfs: Whether weights (`.safetensors`) are uploaded through LFS.
    """

    def __init__(self, folder: Path, tokens: dict[str, str], lfs: bool = False):
        self.folder, self.tokens, self.lfs = folder, tokens, lfs
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[list] = []
        self.lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        handler = type("Handler", (Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()

    def fail(self, request: str, times: int, status: int = 500) -> None:
        """The next `times` requests that match the pattern "METHOD path" are answered with `status`."""
        self.failures.append([request, times, status])

    def asked(self, pattern: str) -> list[str]:
        """Requests so far that match "METHOD path"."""
        return [f"{method} {path}" for method, path in self.requests if re.search(pattern, f"{method} {path}")]

    def store(self, content: bytes, lfs: bool = False) -> Blob:
        header = b"" if lfs else f"blob {len(content)}\0".encode()
        oid = (hashlib.sha256 if lfs else hashlib.sha1)(header + content).hexdigest()
        (self.folder / oid).write_bytes(content)
        return Blob(oid, len(content), lfs)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        blobs = repo.commits[repo.resolve(revision)].files
        return {path: (self.folder / blob.oid).read_bytes() for path, blob in blobs.items()}

    def save(self) -> None:
        state = {name: asdict(repo) for name, repo in self.repos.items()}
        (self.folder / "state.json").write_text(json.dumps(state))


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def answer(self) -> None:
        self.path, _, query = self.path.partition("?")
        self.path, self.query = unquote(urlsplit(self.path).path), parse_qs(query)
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path))
            try:
                status, headers, body = self.route()
            except Refusal as refusal:
                status, headers, body = refusal.status, refusal.headers, refusal.body
            self.hub.save()
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    @property
    def json(self) -> dict:
        return json.loads(self.content)

    @property
    def user(self) -> str | None:
        """Whose token it is.

        Raises:
            Refusal: Nobody's.
        """
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def repo(self, repo_id: str, *, write: bool = False) -> Repo:
        user, repo = self.user, self.hub.repos.get(repo_id)
        mine = user == repo_id.partition("/")[0]
        if repo is None or (repo.private and not mine):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not mine:
            raise Refusal(403, "You don't have the rights to write to this repository")
        return repo

    def at(self, repo: Repo, revision: str) -> str:
        if (oid := repo.resolve(revision)) is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    def route(self) -> tuple[int, dict, dict | list | bytes]:
        request = f"{self.command} {self.path}"
        for failure in self.hub.failures:
            if failure[1] and re.search(failure[0], request):
                failure[1] -= 1
                raise Refusal(failure[2], "Internal Error - We're working hard to fix this as soon as possible!")
        for pattern, method in ROUTES:
            if match := re.fullmatch(pattern, request):
                return getattr(self, method)(**match.groupdict())
        raise Refusal(404, f"No endpoint {request}")

    def whoami(self):
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        return 200, {}, {"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token"}}

    def validate_yaml(self):
        block = re.match(r"---\n(.*?)\n---\n", self.json["content"], flags=re.DOTALL)
        data = yaml.safe_load(block[1]) if block else {}
        errors = []
        if not isinstance(data.get("license"), str):
            errors.append('"license" must be one of [apache-2.0, mit, ...]')
        if any(not re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in [data.get("base_model") or "a/b"]):
            errors.append('"base_model" with value is not valid. Use a model id from https://hf.co/models.')
        body = {"errors": [{"message": text} for text in errors], "warnings": []}
        return (400 if errors else 200), {}, body

    def create(self):
        name, owner = self.json["name"], self.json.get("organization") or self.user
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if owner != self.user:
            raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id, url = f"{owner}/{name}", f"{self.hub.url}/{owner}/{name}"
        if repo_id in self.hub.repos:
            return 409, {}, {"error": "You already created this model repo", "url": url}
        repo = self.hub.repos[repo_id] = Repo(private=self.json.get("visibility") == "private")
        repo.commit(repo.branches, "main", "initial commit", {".gitattributes": self.hub.store(b"*.bin lfs\n")})
        return 200, {}, {"url": url, "name": repo_id}

    def info(self, repo_id: str, revision: str = "main"):
        repo = self.repo(repo_id)
        oid = self.at(repo, revision)
        siblings = [{"rfilename": path} for path in repo.commits[oid].files]
        return 200, {}, {"id": repo_id, "sha": oid, "private": repo.private, "siblings": siblings, "tags": []}

    def tree(self, repo_id: str, revision: str, folder: str | None):
        repo = self.repo(repo_id)
        files = repo.commits[self.at(repo, revision)].files
        listed = [
            {"path": p, **blob.entry} for p, blob in files.items() if p.startswith(f"{folder}/" if folder else "")
        ]
        if not listed:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        return 200, {}, listed

    def preupload(self, repo_id: str, revision: str):
        repo = self.repo(repo_id, write="create_pr" not in self.query)
        there = repo.commits[self.at(repo, revision)].files
        answers = []
        for file in self.json["files"]:
            lfs = self.hub.lfs and file["path"].endswith(".safetensors")
            blob = there.get(file["path"])
            oid = blob.oid if blob and blob.lfs == lfs else None
            mode = "lfs" if lfs else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {}, {"files": answers}

    def lfs_batch(self, repo_id: str):
        self.repo(repo_id, write=True)
        objects = []
        for wanted in self.json["objects"]:
            missing = not (self.hub.folder / wanted["oid"]).exists()
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append({**wanted, **({"actions": upload} if missing else {})})
        return 200, {"Content-Type": "application/vnd.git-lfs+json"}, {"objects": objects, "transfer": "basic"}

    def lfs_put(self, oid: str):
        if self.hub.store(self.content, lfs=True).oid != oid:
            raise Refusal(400, "The content has another hash")
        return 200, {}, {}

    def commit(self, repo_id: str, revision: str):
        pull_request = "create_pr" in self.query
        repo = self.repo(repo_id, write=not pull_request)
        head = self.at(repo, revision)
        files, message = dict(repo.commits[head].files), ""
        for line in self.content.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", head) != head:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = self.hub.store(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if not (self.hub.folder / value["oid"]).exists():
                    raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = Blob(value["oid"], value["size"], lfs=True)
            elif key == "deletedFile":
                del files[value["path"]]
        if pull_request:
            revision = f"refs/pr/{len(repo.pulls) + 1}"
            repo.pulls[revision] = head
        oid = repo.commit(repo.pulls if revision in repo.pulls else repo.branches, revision, message, files)
        url = f"{self.hub.url}/{repo_id}"
        pull = {"pullRequestUrl": f"{url}/discussions/{revision.rpartition('/')[2]}"} if pull_request else {}
        return 200, {}, {"commitOid": oid, "commitUrl": f"{url}/commit/{oid}", **pull}

    def branch(self, repo_id: str, name: str):
        repo = self.repo(repo_id, write=True)
        if name in repo.branches:
            raise Refusal(409, "Reference already exists")
        repo.branches[name] = self.at(repo, self.json.get("startingPoint", "main"))
        return 200, {}, {}

    def tag(self, repo_id: str, revision: str):
        repo = self.repo(repo_id, write=True)
        if self.json["tag"] in repo.tags:
            raise Refusal(409, "Tag reference exists already")
        repo.tags[self.json["tag"]] = self.at(repo, revision)
        return 200, {}, {}

    def discuss(self, repo_id: str):
        repo, number = self.repo(repo_id), len(self.repo(repo_id).pulls) + 1
        repo.pulls[f"refs/pr/{number}"] = repo.branches["main"]
        return 200, {}, {"num": number}

    def discussion(self, repo_id: str, number: str):
        details = {"num": int(number), "title": "", "status": "draft", "author": {"name": self.user}, "events": []}
        details |= {
            "isPullRequest": True,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "diff": "",
            "changes": {"base": "main"},
        }
        return 200, {}, {**details, "filesWithConflicts": [], "repo": {"name": repo_id, "type": "model"}}

    def resolve(self, repo_id: str, revision: str, path: str):
        repo = self.repo(repo_id)
        oid = self.at(repo, revision)
        blob = repo.commits[oid].files.get(path)
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": oid})
        linked = {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": blob.size} if blob.lfs else {}
        headers = {"X-Repo-Commit": oid, "ETag": f'"{blob.oid}"', **linked}
        return 200, headers, (self.hub.folder / blob.oid).read_bytes()


REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
ROUTES = [
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/validate-yaml", "validate_yaml"),
    ("POST /api/repos/create", "create"),
    ("PUT /lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    (r"POST /(?P<repo_id>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", "lfs_batch"),
    (rf"(GET|HEAD) /(?P<repo_id>[\w.-]+/[\w.-]+)/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    *(
        (rf"{verb} /api/models/(?P<repo_id>[\w.-]+/[\w.-]+){rest}", method)
        for verb, rest, method in [
            ("GET", "", "info"),
            ("GET", "/revision/(?P<revision>.+)", "info"),
            ("GET", rf"/tree/{REVISION}(/(?P<folder>.+))?", "tree"),
            ("POST", "/preupload/(?P<revision>.+)", "preupload"),
            ("POST", "/commit/(?P<revision>.+)", "commit"),
            ("POST", "/branch/(?P<name>.+)", "branch"),
            ("POST", "/tag/(?P<revision>.+)", "tag"),
            ("POST", "/discussions", "discuss"),
            ("GET", r"/discussions/(?P<number>\d+)", "discussion"),
        ]
    ),
]

"""A dashboard of its own process, and a browser's part without one: cookies, forms, open pages."""

import http.client
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

from oobleck.cli.client import MasterClient
from support.commands import end, run, start_agent, start_master
from support.forked import Forked
from support.waiting import PATIENCE_S, until


class Dashboard:
    """`oobleck dashboard` with its secret in `folder`. Use it as a context."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "dashboard"
        where = ("--listen", "127.0.0.1:0", "--dir", str(self.folder))
        self.process = Forked("oobleck", "dashboard", *where, *options)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r" at (https?)://(\S+)$", line.strip())
        assert found, line
        self.tls, self.address = found[1] == "https", found[2]

    def __enter__(self) -> "Dashboard":
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def token(self, *options: str) -> str:
        made = run("dashboard", "token", "--dir", str(self.folder), *options)
        assert made.returncode == 0, made
        return made.stdout.strip()

    def visitor(self, role: str = "viewer") -> "Visitor":
        """One who is logged in."""
        visitor = Visitor(self.address, tls=self.tls)
        answer = visitor.log_in(self.token("--role", role))
        assert answer.status == 200, answer
        return visitor


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def told(self) -> str:
        """What stands in its banners."""
        found = re.findall(r'class="banner[^>]*>(.*?)</p>', self.text, re.DOTALL)
        lines = (" ".join(unescape(re.sub("<[^>]+>", "", one)).split()) for one in found)
        return "; ".join(filter(None, lines))

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.text)
        assert found, self.text
        return found[1]


class Visitor:
    def __init__(self, address: str, *, keeps_cookies: bool = True, tls: bool = False) -> None:
        """`tls`: whatever the certificate is."""
        self.address = address
        self._tls = ssl._create_unverified_context() if tls else None
        self.cookies: dict[str, str] = {}
        #: The path of the session, below which all pages are; before a log-in there is none.
        self.base = ""
        #: As they came, with what holds for them.
        self.told_cookies: list[str] = []
        self._keeps = keeps_cookies

    def get(self, path: str, **headers: str) -> Answer:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, form: Mapping[str, str], **headers: str) -> Answer:
        """What comes of the form, and of the page that it leads to."""
        answer = self._ask("POST", path, urlencode(form), headers)
        while answer.status == 303:
            where = answer.headers["location"]
            if found := re.match(r"(/~[^/]+)(/.*)", where):
                self.base, where = found[1], found[2]
            answer = self.get(where)
        return answer

    def send(self, path: str, **form: str) -> Answer:
        """A form as a page of this session has it."""
        return self.post(path, {"csrf": self.get("/").csrf, **form})

    def log_in(self, token: str, after: str = "/") -> Answer:
        return self.post("/login", {"token": token, "next": after})

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        return http.client.HTTPSConnection(self.address, timeout=PATIENCE_S, context=self._tls)

    def _ask(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Answer:
        connection = self._connection()
        try:
            connection.request(method, self.base + path, body, self._headers(body, headers))
            response = connection.getresponse()
            if self._keeps:
                for cookie in response.headers.get_all("Set-Cookie", ()):
                    self.told_cookies.append(cookie)
                    name, _, value = cookie.partition(";")[0].partition("=")
                    self.cookies[name] = value.strip('"')
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read().decode())
        finally:
            connection.close()

    def _headers(self, body: str | None, others: Mapping[str, str]) -> dict[str, str]:
        headers = {name.replace("_", "-"): value for name, value in others.items()}
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={of}" for name, of in self.cookies.items())
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        return headers

    @contextmanager
    def watching(self, path: str) -> Iterator[Iterator[tuple[str, str]]]:
        """The element and its new content, one after the other, of the open page at `path`."""
        connection = self._connection()
        connection.request("GET", f"{self.base}/live{path}", headers=self._headers(None, {}))
        response = connection.getresponse()
        assert response.status == 200, response.read()

        def changes() -> Iterator[tuple[str, str]]:
            event = ""
            while line := response.readline().decode():
                name, _, value = line.strip().partition(": ")
                if name == "event":
                    event = value
                elif name == "data" and event == "change":
                    yield from ((id, html) for _, id, html in json.loads(value))
                elif name == "data" and event == "end":
                    yield "end", json.loads(value)

        try:
            yield changes()
        finally:
            connection.close()


#: The stand-in takes the milliseconds of a step from the seed.
JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: ["data.txt"]}
training: {steps: 1000000, global_batch: 4, seed: 50}
"""
NODES = ("n1", "n2", "n3")


class Stand:
    """A master, its agents, a job that runs, and the dashboard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master, self.address = start_master(folder / "state")
        self.agents = {name: start_agent(self.address, name) for name in NODES}
        self.client = MasterClient(self.address)
        until(lambda: len(self.client.nodes()) == len(NODES), "the agents register")
        (folder / "data.txt").write_text("some text " * 100)
        (folder / "job.yaml").write_text(JOB)
        made = run("submit", str(folder / "job.yaml"), "--master", self.address)
        assert made.returncode == 0, made
        self.job = made.stdout.strip()
        until(lambda: self.client.job(self.job).committed_step > 3, "steps")
        self.dashboard = Dashboard(folder, "--master", self.address)

    def restart_master(self) -> None:
        self.master.kill()
        end(self.master)
        self.master, _ = start_master(self.folder / "state", self.address)

    def end(self) -> None:
        end(self.dashboard.process)
        self.client.close()
        for process in (*self.agents.values(), self.master):
            end(process)

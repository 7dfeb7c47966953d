"""``telic board``: the reports of a folder of runs, on this machine alone and only for who has the token."""

import hashlib
import secrets
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from html import escape
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from telic.reports.log import Log
from telic.reports.pages import asset, fragment, page
from telic.reports.reading import METRICS, Run, find_runs, read_run, stamp_of
from telic.reports.sections import last_metrics
from telic.reports.text import number, visible

_HOST = "127.0.0.1"
_COOKIE = "telic_board_{port}"
_MAX_COMPARED = 12
_NEWEST_BYTES = 2**18
"""What the list reads of each run's metrics."""


class Board(ThreadingHTTPServer):
    """A server of the runs below a folder.

    Args:
      folder: Where the run directories are.
      port: Port; 0 takes a free one.
      token: What a request must know; None makes one.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, *, port: int = 0, token: str | None = None):
        self.folder = folder
        self.token = token or secrets.token_urlsafe(24)
        self._logs: dict[Path, Log] = {}
        self._lock = threading.Lock()
        super().__init__((_HOST, port), _Handler)

    def read(self, directory: Path, name: str) -> Run:
        """Read a run; of those looked at last, only what came since."""
        with self._lock:
            log = self._logs.pop(directory, None) or Log(directory / METRICS)
            self._logs[directory] = log
            while len(self._logs) > _MAX_COMPARED:
                del self._logs[next(iter(self._logs))]
        return read_run(directory, name, log=log)

    @property
    def address(self) -> str:
        """Where a browser finds it, with the token."""
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"


def serve(folder: Path, *, port: int = 0, say: Callable[[str], None] = print) -> None:
    """Serve until Ctrl-C.

    Args:
      folder: Where the run directories are.
      port: Port; 0 takes a free one.
      say: Takes the lines for the person who started it.
    Raises:
      OSError: The port is taken.
    """
    board = Board(folder, port=port)
    say(f"Runs below {folder}: {board.address}")
    say("It answers on this machine alone. Ctrl-C ends it.")
    with board, _ended_by_terminate():
        try:
            board.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")


@contextmanager
def _ended_by_terminate() -> Generator[None]:
    """Let SIGTERM end a server as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: a list of runs, a report, or what of it changed."""

    server: Board  # pyright: ignore[reportIncompatibleVariableOverride] it is only ever this one
    server_version = "telic"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer."""
        address = urlsplit(self.path)
        # A directory's name need not be text: it comes back as it went.
        asked = parse_qs(address.query, keep_blank_values=True, errors="surrogateescape")
        # A page of another site may know this machine's name for itself; it does not know ours for it.
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}:
            self._refuse(421, "This board answers to 127.0.0.1 alone.")
            return
        if not self._knows(asked):
            self._refuse(403, "Open the address that telic board printed: it holds the token.")
            return
        if "token" in asked:
            # Kept in a cookie, so that it does not stay in the address and the history.
            rest = _query(asked.get("run", []))
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "", {"Location": address.path + (f"?{rest}" if rest else ""), "Set-Cookie": cookie})
            return
        match address.path:
            case "/":
                self._answer(200, index(self.server.folder))
            case "/rows":
                self._answer(200, rows(self.server.folder))
            case "/report" | "/data":
                self._report(asked.get("run", []), is_data=address.path == "/data")
            case _:
                self._refuse(404, "There is nothing here.")

    def _report(self, names: list[str], *, is_data: bool) -> None:
        there = find_runs(self.server.folder)
        missing = [name for name in names if name not in there]
        if missing or not 0 < len(names) <= _MAX_COMPARED:
            what = f"no run {visible(missing[0], 60)!r}" if missing else f"choose 1 to {_MAX_COMPARED} runs"
            self._refuse(404, f"There is nothing to show: {what}.")
            return
        marks = "|".join(f"{name}={stamp_of(there[name])}" for name in names)
        runs = [self.server.read(there[name], name) for name in names]
        marks += "|".join(run.status for run in runs)
        tag = f'"{hashlib.sha256(marks.encode(errors="surrogateescape")).hexdigest()[:24]}"'
        if is_data and self.headers.get("If-None-Match") == tag:
            self._answer(304, "", {"ETag": tag})
            return
        shown = fragment(runs)
        if is_data:
            self._answer(200, shown.as_json(), {"Content-Type": "application/json; charset=utf-8", "ETag": tag})
            return
        self._answer(200, page(shown, live=f"/data?{_query(names)}", back="/"))

    @property
    def _cookie(self) -> str:
        # Cookies of one host are shared by all its ports, and another board may answer on another one.
        return _COOKIE.format(port=self.server.server_port)

    def _knows(self, asked: dict[str, list[str]]) -> bool:
        given = asked.get("token", [""])[0]
        if not given:
            try:
                found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
            except CookieError:
                found = None
            given = found.value if found is not None else ""
        return secrets.compare_digest(given.encode(), self.server.token.encode())

    def _refuse(self, code: int, text: str) -> None:
        self._answer(code, f"<!doctype html><title>Telic</title><p>{escape(text)}</p>")

    def _answer(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        body = b"" if code == 304 else text.encode("utf-8", errors="replace")
        more = {
            "Content-Type": "text/html; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }
        try:
            self.send_response(code)
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: what is asked for is nobody's business."""


def _query(names: Iterable[str]) -> str:
    return "&".join(f"run={quote(name, errors='surrogateescape')}" for name in names)


def index(folder: Path) -> str:
    """Give the page that lists the runs below a folder, to choose from; it keeps itself up to date."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Runs · Telic</title>
<style>{asset("page.css")}</style>
</head>
<body>
<main>
<h1>Runs</h1>
<p class="soft">Below {escape(visible(folder))}, the newest first.</p>
<form action="/report">
<div class="card scroll"><table id="rows">{rows(folder)}</table></div>
<p><button>Compare what is ticked</button></p>
</form>
</main>
<script nonce="{nonce}">{asset("board.js")}</script>
</body>
</html>
"""


def rows(folder: Path) -> str:
    """Give the rows of that list."""
    found = find_runs(folder).items()
    runs = [read_run(path, name, log=Log(path / METRICS, max_bytes=_NEWEST_BYTES)) for name, path in found]
    if not runs:
        return (
            '<tr><td class="soft">There are no runs yet. loop.record("runs/name") and runs with checkpoints make '
            "some.</td></tr>"
        )
    names = list(dict.fromkeys(name for run in runs for name in last_metrics(run)))[:4]
    heads = "".join(f'<th class="number">{escape(visible(name, 40))}</th>' for name in names)
    top = f'<tr><th></th><th>run</th><th>status</th><th class="number">batches</th>{heads}</tr>'
    return top + "".join(_row(run, names) for run in runs)


def _row(run: Run, names: list[str]) -> str:
    last = last_metrics(run)
    called = escape(run.name, quote=True)
    batches = max((line.batches for line in run.lines), default=0)
    values = "".join(f'<td class="number">{escape(number(last[n])) if n in last else ""}</td>' for n in names)
    link = escape(f"/report?{_query([run.name])}", quote=True)
    return (
        f'<tr><td><input type="checkbox" name="run" value="{called}" aria-label="compare"></td>'
        f'<td class="name"><a href="{link}">{escape(visible(run.name))}</a></td>'
        f'<td><span class="status {escape(run.status)}">{escape(run.status)}</span></td>'
        f'<td class="number">{batches:,}</td>{values}</tr>'
    )

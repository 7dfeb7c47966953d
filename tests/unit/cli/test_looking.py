"""`telic report`, `watch`, `board` and `doctor`: what they write, refuse and let in."""

import http.client
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from telic.cli import diagnosis, main
from telic.cli.serving import Board, rows
from telic.cli.watching import spark, watch
from telic.reports.series import Curve
from tests.unit.reports.test_page import EVIL, evil_run


def a_run(directory: Path, status: str = "completed", losses: tuple[float, ...] = (2.0, 1.0, 0.5)) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps({"status": status, "plan": {"epochs": 1}}))
    (directory / "metrics.jsonl").write_text("".join(a_line(i, x) for i, x in enumerate(losses, start=1)))
    return directory


def a_line(batches: int, loss: float) -> str:
    values = {
        "kind": "interval",
        "epoch": 0,
        "total_iterations": batches,
        "seconds": batches,
        "metrics": {"loss": loss},
    }
    return json.dumps(values) + "\n"


# -- report -----------------------------------------------------------------------------------------------------------


def test_report_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a page in another place than the one it says."""
    monkeypatch.chdir(tmp_path)
    first, second = a_run(tmp_path / "first"), a_run(tmp_path / "second")
    assert main(["report", str(first)]) == 0
    assert str(first / "report.html") in capsys.readouterr().out
    assert "<h1>first</h1>" in (first / "report.html").read_text()
    assert main(["report", "first", "second", "--out", "new/both.html"]) == 0
    assert "2 runs compared" in (tmp_path / "new" / "both.html").read_text()
    assert second.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "give the directory of a run"),
        (["report", "none"], "none is no directory"),
        (["report", "empty"], "has no record of a run"),
        (["report", "first", "--out", "empty"], "is a directory"),
        (["watch", "first/run.json"], "is no directory"),
        (["watch", "first", "--every", "0"], "more than 0, got 0"),
        (["watch", "first", "--every", "inf"], "at most a day and more than 0, got inf"),
        (
            ["report", "first", "--out", "first/run.json/page.html"],
            "cannot be written: File exists; give another place",
        ),
        (["board", "none"], "none is no directory"),
        (["board", "first", "--port", "70000"], "from 0 to 65535"),
        (["doctor", "--folder", "first/run.json"], "is a file"),
    ],
)
def test_a_wrong_call_is_a_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a traceback for a slip of the finger."""
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# -- watch ------------------------------------------------------------------------------------------------------------


def watched(directory: Path, *, plain: bool, sleep: Any = lambda seconds: None) -> str:
    stream = io.StringIO()
    watch(directory, plain=plain, console=Console(file=stream, width=110, force_terminal=not plain), sleep=sleep)
    return stream.getvalue()


def test_watching_a_finished_run_ends(tmp_path: Path) -> None:
    """Catches a watch that never ends, or leaves out the last line."""
    lines = watched(a_run(tmp_path / "run"), plain=True).splitlines()
    assert lines == [
        "epoch 1, batch 1: loss 2",
        "epoch 1, batch 2: loss 1",
        "epoch 1, batch 3: loss 0.5",
        "run: completed",
    ]


def test_watching_waits_and_follows(tmp_path: Path) -> None:
    """Catches lines written twice or lost while a run goes on, and a run that cannot be watched before it starts."""
    steps = iter(
        [
            lambda: a_run(tmp_path / "run", "running", (2.0,)),
            lambda: a_run(tmp_path / "run", "running", (2.0, 1.0)),
            lambda: a_run(tmp_path / "run", "completed", (2.0, 1.0, 0.5)),
        ]
    )
    lines = watched(tmp_path / "run", plain=True, sleep=lambda seconds: next(steps)() and None).splitlines()
    assert lines[0].startswith("waiting for")
    assert [line.split("loss ")[1] for line in lines[1:4]] == ["2", "1", "0.5"]
    assert lines[4] == "run: completed"


@pytest.mark.parametrize("plain", [True, False])
def test_names_do_not_move_the_cursor(plain: bool, tmp_path: Path) -> None:
    """Catches a metric's name that clears the terminal of whoever watches."""
    shown = watched(evil_run(tmp_path / "run"), plain=plain)
    assert "\x1b[2J" not in shown
    assert "\\x1b[2J" in shown


def test_what_is_known_of_a_run_is_shown(tmp_path: Path) -> None:
    """Catches a rate, a learning rate, a memory or a use of the device that the record has and the terminal lacks."""
    place = a_run(tmp_path / "run", "running", (2.0, 1.0))
    known = {
        **json.loads(a_line(3, 0.5)),
        "training": {"learning_rate": 1e-3, "gradient_norm": 2.5},
        "speed": {
            **{"tokens_per_second": 51234.0, "examples_per_second": 9.0, "utilisation": 0.417},
            "memory": {"device_bytes": 3 * 2**30, "host_bytes": 5 * 2**20},
        },
    }
    with (place / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(known) + "\n")
    drew = watched(place, plain=False, sleep=lambda seconds: finish(place))
    for fact in (
        *("51,234 tokens/s", "utilisation 41.7%", "learning rate 0.001", "gradient norm 2.5"),
        *("device 3.0 GiB", "host 5.0 MiB", "epoch 1 of 1, batch 3"),
    ):
        assert fact in drew, fact
    assert "examples/s" not in drew
    line = watched(place, plain=True).splitlines()[2]
    assert line == "epoch 1, batch 3: loss 0.5  learning_rate 0.001  gradient_norm 2.5  51,234 tokens/s"


def test_operations_are_shown_where_nobody_knows_what_the_device_can_do(tmp_path: Path) -> None:
    """Catches a device without a data sheet of which nothing is said."""
    place = a_run(tmp_path / "run", losses=())
    known = {**json.loads(a_line(1, 0.5)), "speed": {"flops_per_second": 2.5e11}}
    (place / "metrics.jsonl").write_text(json.dumps(known) + "\n")
    drew = watched(place, plain=False)
    assert "250 GFLOP/s" in drew
    assert "utilisation" not in drew


def finish(place: Path) -> None:
    record = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({**record, "status": "completed"}))


def test_a_curve_of_characters() -> None:
    """Catches a curve that is upside down, and one of equal values that divides by zero."""
    assert spark(Curve("r", "c", tuple(enumerate([0.0, 1.0, 2.0])))) == "▁▅█"
    assert spark(Curve("r", "c", ((0, 1.0), (1, 1.0)))) == "▅▅"
    assert spark(Curve("r", "c", ((0, None), (1, 1.0)))) == " ▅"
    assert spark(Curve("r", "c", ((0, None),))) == ""
    assert len(spark(Curve("r", "c", tuple((i, float(i)) for i in range(500))))) == 48


# -- board ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    a_run(tmp_path / "first")
    evil_run(tmp_path / "evil <b> & co")
    made = Board(tmp_path, token="secret-token")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)


def get(board: Board, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=30)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def cookie(board: Board, token: str = "secret-token") -> str:
    return f"telic_board_{board.server_port}={token}"


def test_the_board_lets_in_who_has_the_token(board: Board) -> None:
    """Catches a board that any process, page or machine may read."""
    assert board.server_address[0] == "127.0.0.1"
    for path, headers in (
        ("/", {}),
        ("/?token=wrong", {}),
        ("/?token=", {}),
        ("/report?run=first", {"Cookie": cookie(board, "wrong")}),
        ("/data?run=first", {"Cookie": "telic_board_1=secret-token"}),
    ):
        assert get(board, path, **headers)[0] == 403, path
    status, headers, _ = get(board, "/?token=secret-token")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    status, headers, text = get(board, "/", Cookie=cookie(board))
    assert status == 200
    assert "first" in text
    assert headers["X-Frame-Options"] == "DENY"
    assert "secret-token" not in text


def test_the_board_answers_to_its_own_name_alone(board: Board) -> None:
    """Catches a page elsewhere that reads the board by giving its own name this machine's address."""
    assert get(board, "/", Cookie=cookie(board), Host="evil.example")[0] == 421
    assert get(board, "/", Cookie=cookie(board), Host=f"localhost:{board.server_port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/report", "/report?run=none", "/report?run=../first", "/report?run=/etc", "/etc/passwd", "/data?run="],
)
def test_the_board_gives_nothing_but_runs(board: Board, path: str) -> None:
    """Catches a path that leads out of the folder."""
    status, _, text = get(board, path, Cookie=cookie(board))
    assert status == 404
    assert "<b>" not in text


def test_the_board_says_when_nothing_changed(board: Board, tmp_path: Path) -> None:
    """Catches a page that is drawn anew every two seconds, and one that misses a line."""
    status, headers, text = get(board, "/data?run=first", Cookie=cookie(board))
    assert status == 200
    assert set(json.loads(text)) == {"title", "html", "charts"}
    tag = headers["ETag"]
    assert get(board, "/data?run=first", Cookie=cookie(board), If_None_Match=tag)[0] == 304
    with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
        file.write(a_line(9, 0.1))
    status, headers, _ = get(board, "/data?run=first", Cookie=cookie(board), If_None_Match=tag)
    assert status == 200
    assert headers["ETag"] != tag


def test_an_evil_name_is_shown_on_the_board(board: Board) -> None:
    """Catches the name of a directory that becomes part of the list."""
    _, _, text = get(board, "/", Cookie=cookie(board))
    assert "evil &lt;b&gt; &amp; co" in text
    assert EVIL not in text
    status, _, text = get(board, "/report?run=evil%20%3Cb%3E%20%26%20co", Cookie=cookie(board))
    assert status == 200
    assert "evil &lt;b&gt; &amp; co" in text


def test_a_name_that_is_no_text_has_a_report(board: Board, tmp_path: Path) -> None:
    """Catches a directory whose name is no UTF-8 and that takes the list of all runs with it."""
    try:
        a_run(tmp_path / os.fsdecode(b"odd\xff"))
    except OSError:
        pytest.skip("this file system takes no such name")
    status, _, text = get(board, "/", Cookie=cookie(board))
    assert status == 200
    assert "odd\\udcff" in text
    assert get(board, "/report?run=odd%FF", Cookie=cookie(board))[0] == 200


def test_the_list_has_the_newest_run_first_with_its_last_metrics(tmp_path: Path) -> None:
    """Catches a list in another order, without a status, or with the first metrics of a run and not its last."""
    for i, (name, status) in enumerate((("old", "completed"), ("deep/new", "failed"))):
        place = a_run(tmp_path / name, status, (2.0, 1.0 - i))
        for path in (place / "run.json", place / "metrics.jsonl"):
            os.utime(path, (1000 + i, 1000 + i))
    many = {**json.loads(a_line(3000, 0.25)), "metrics": {f"m{i}": float(i) for i in range(9)}}
    with (tmp_path / "old" / "metrics.jsonl").open("a") as file:
        # Longer than what the list reads of a run.
        file.write(a_line(2999, 0.5) * 4000 + json.dumps(many) + "\n")
    os.utime(tmp_path / "old" / "metrics.jsonl", (1000, 1000))
    text = rows(tmp_path)
    heads, *found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", text)]
    assert heads == ["", "run", "status", "batches", "loss", "m0", "m1", "m2"]
    texts = [[re.sub("<[^>]*>", "", cell) for cell in row] for row in found]
    assert texts == [
        ["", "deep/new", "failed", "2", "0", "", "", ""],
        ["", "old", "completed", "3,000", "0.5", "0", "1", "2"],
    ]
    assert 'href="/report?run=deep/new"' in text
    assert rows(tmp_path / "old" / "none").startswith('<tr><td class="soft">There are no runs yet.')


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Catches a part that is not looked at, and one that changes what it looks at."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "versions", "extras", "devices", "a step", "cache", "disk"):
        assert f"  {subject} " in out, subject
    assert "Nothing is wrong" in out
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_is_said_and_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a doctor that is ill itself."""

    def broken() -> Any:
        raise RuntimeError("no driver\x1b[2J")

    monkeypatch.setattr(diagnosis, "_devices", broken)
    monkeypatch.setattr(diagnosis, "_step", lambda: [])
    found = {check.subject: check for check in diagnosis.examine(tmp_path)}
    assert found["broken"].level == "bad"
    assert "no driver\\x1b[2J" in found["broken"].line
    assert found["disk"].level in ("good", "warning")

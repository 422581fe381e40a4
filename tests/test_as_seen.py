"""What a person sees of a sweep: the states of a real terminal over time, and of `cpbkit status` beside it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.archive_server import make_rows, serving

COLUMNS = 80
LIMIT = 600.0  # s; a machine with other work on it takes ten times as long as a quiet one
TOTAL = 5  # models: three of one worker, two of the other, so that some end long before the others
SWEEP = """sweep --source synthetic --symbols BTC,ETH,SOL,ADA,XRP --intervals 1h --start 2025-01-01 --end 2025-01-31
    --workers 2 --epochs 40 --set patience=39 --set schedule=constant --set steps=3 --set batch=256
    --set name=asleep:Asleep --run run""".split()
# It sleeps, so that a sweep takes its time on a quiet machine, and not the cores of a busy one. Its numbers are read
# as it goes, which torch.func cannot stack: stacked models would sleep, and end, together.
ASLEEP = """
import time

from torch import nn


class Asleep(nn.Module):
    def __init__(self, task, model):
        super().__init__()
        self.head = nn.Linear(len(task.features), task.horizon)

    def forward(self, x):
        time.sleep(0.02)
        forecast = self.head(x[:, -1])[..., None]
        float(forecast.detach().sum())
        return forecast
"""
CPBKIT = [sys.executable, "-m", "cpbkit"]
# Ctrl-C reaches those whose own terminal it is typed in.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# A second process, asked for the status at every line; a process for each answer would take the cores.
ANSWER = """
import sys
import click
from cpbkit.cli.main import cpbkit

for question in sys.stdin:
    try:
        cpbkit(["status", "run"], standalone_mode=False)
    except click.ClickException as error:
        print(error.message)
    print(flush=True)
"""
STATE = re.compile(rf"\[(#*)(\.*)\]  (\d) of {TOTAL} done  (\d+) %")
TIME_LEFT = r"(at most )?(\d+ s|\d+ m \d\d s) left"
PACE = r"[\d.]+( k| M)? samples/s"
DONE = f"[##########]  {TOTAL} of {TOTAL} done  100 %"
GO_ON = "Stopped. Nothing is left half done; the same command goes on from here."


@dataclass
class Seen:
    """What was shown, line by line as it changed, and how it ended."""

    written: bytes = b""
    code: int | None = None

    @property
    def lines(self) -> list[str]:
        """All that stood in a line, one after another; of the last one maybe a part."""
        text = self.written.decode(errors="replace").replace("^C", "")  # what a terminal shows of the key
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    @property
    def states(self) -> list[str]:
        return [line for line in self.lines if STATE.match(line)]

    @property
    def done(self) -> list[int]:
        return [int(STATE.match(line)[3]) for line in self.states]

    @property
    def shares(self) -> list[int]:
        return [int(STATE.match(line)[4]) for line in self.states]

    @property
    def rows(self) -> list[str]:
        """Those of the table of verdicts."""
        return [line for line in self.lines if re.search(r"_1h +(BEATS|TIES|LOSES|TOO FEW TO TELL) +[-+]", line)]


def look(arguments, folder, stop: Callable[[Seen], int | None] = lambda seen: None, piped: bool = False) -> Seen:
    """Run cpbkit in a terminal of 80 columns, or with its progress in a pipe, and collect what it shows.

    stop: called again and again; may return a signal to end it with, of which Ctrl-C is typed.
    """
    ours, theirs = os.pipe() if piped else pty.openpty()
    command, streams = [*CPBKIT, *arguments], {"stdout": theirs, "stderr": theirs}
    if not piped:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        command, streams = [sys.executable, "-c", IN_TERMINAL, *command], streams | {"stdin": theirs}
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    seen, sent = Seen(), None
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
    os.close(theirs)
    limit = threading.Timer(LIMIT, process.kill)
    limit.start()
    try:
        while True:
            if select.select([ours], [], [], 0.1)[0]:
                if not (data := _read(ours)):
                    break
                seen.written += data
            if not sent and (sent := stop(seen)):
                if sent == signal.SIGINT:
                    os.write(ours, b"\x03")
                else:
                    process.send_signal(sent)
        seen.code = process.wait()
    finally:
        limit.cancel()
        process.kill()
        os.close(ours)
    return seen


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # Linux says so when all have left a terminal
        return b""


def status(folder) -> str:
    return subprocess.run([*CPBKIT, "status", "run"], cwd=folder, capture_output=True, text=True, check=True).stdout


def make_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    (folder / "asleep.py").write_text(ASLEEP)
    return folder


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One sweep from its begin to its end, as seen in its terminal and by a second process beside it."""
    folder = make_folder(tmp_path_factory)
    with open(folder / "told", "w") as told:
        beside = subprocess.Popen(
            [sys.executable, "-c", ANSWER], cwd=folder, stdin=subprocess.PIPE, stdout=told, text=True
        )

        def ask(seen: Seen) -> None:
            beside.stdin.write("\n")
            beside.stdin.flush()

        try:
            seen = look(SWEEP, folder, ask)
        finally:
            beside.communicate()  # no more questions
    return folder, seen, (folder / "told").read_text().strip().split("\n\n")


@pytest.mark.slow
def test_a_sweep_is_seen_to_move(swept):
    _, seen, _ = swept
    assert seen.code == 0, seen.lines[-20:]
    first, *between, last = seen.states
    assert first.startswith(f"[..........]  0 of {TOTAL} done  0 %") and last == DONE
    assert len(set(between)) >= 10 and len(set(seen.shares)) >= 10
    assert seen.shares == sorted(seen.shares) and seen.done == sorted(seen.done)
    assert set(seen.done) - {0, TOTAL}, "models end one after another"
    assert len({STATE.match(line)[1] for line in seen.states}) >= 5, "the bar moves too"
    at_work = [line for line in between if re.match(f"{STATE.pattern}  {TIME_LEFT}  {PACE}", line)]
    assert len(set(at_work)) >= 10
    assert len({re.search(TIME_LEFT, line)[2] for line in at_work}) >= 4
    assert "at most" in at_work[0], "no model has shown yet how far it goes"


@pytest.mark.slow
def test_what_is_seen_fits_eighty_columns(swept):
    _, seen, _ = swept
    assert len(seen.rows) == TOTAL
    assert [line for line in seen.states + seen.rows if len(line) > COLUMNS] == []
    ends = re.findall(rf"\r(\[\d/{TOTAL}\] [^\r\n]*)", seen.written.decode())
    assert len(ends) == TOTAL and all(len(line) <= COLUMNS for line in ends), "with the blanks behind them"
    cut = [line for line in seen.states if line.endswith("…")]
    assert cut and all("  training, " in line or "samples/s" in line for line in cut), "what matters is not cut"


@pytest.mark.slow
def test_a_second_process_sees_the_same(swept):
    _, seen, told = swept
    running = [text for text in told if re.search(rf"^run: \d of {TOTAL} done, .* \(process \d+ on ", text)]
    shares = [int(re.search(r", (\d+) %, ", text)[1]) for text in running]
    assert len(set(shares)) >= 3 and shares == sorted(shares)
    assert set(shares) & set(seen.shares) - {0, 100}
    at_work = [text for text in running if re.search(rf" %, {TIME_LEFT}, {PACE}, training, ", text)]
    assert len({re.search(r", (\d+) %, ", text)[1] for text in at_work}) >= 3


@pytest.mark.slow
def test_a_finished_sweep_started_again_begins_with_what_is_done(swept):
    folder, seen, _ = swept
    again = look(SWEEP, folder)
    assert again.code == 0 and again.lines[0] == DONE and again.states == [DONE]
    assert again.rows == seen.rows
    assert status(folder) == f"run: {TOTAL} of {TOTAL} done, 100 %, complete\n"


@pytest.mark.long
def test_a_sweep_that_was_killed_begins_with_what_is_done_and_ctrl_c_ends_it_in_a_sentence(tmp_path_factory):
    folder = make_folder(tmp_path_factory)
    ledger = folder / "run/results.jsonl"

    def kill(seen: Seen) -> int | None:
        some_done = ledger.exists() and ledger.read_text().endswith("\n")
        return signal.SIGKILL if some_done and len(seen.states) >= 2 else None

    killed = look(SWEEP, folder, kill, piped=True)
    assert killed.code == -signal.SIGKILL, killed.lines[-20:]
    assert b"\r" not in killed.written and len(killed.states) >= 2, "lines that are kept come now and then"
    assert killed.done[0] == killed.shares[0] == 0 and killed.shares == sorted(killed.shares)
    count = ledger.read_text().count("\n")
    assert 1 <= count < TOTAL
    share = 100 * count // TOTAL
    assert status(folder).startswith(f"run: {count} of {TOTAL} done, {share} %, stopped without ")

    again = look(SWEEP, folder, lambda seen: signal.SIGINT if "samples/s" in "".join(seen.states) else None)
    assert set(again.done) == {count} and again.shares == sorted(again.shares)
    assert again.shares[0] >= share, "a slow machine has a checkpoint too"
    assert again.states[0].startswith(f"[{'#' * (share // 10)}")
    assert [line for line in again.states if len(line) > COLUMNS] == []
    assert again.code == 1 and again.lines[-1] == GO_ON and "Traceback" not in str(again.lines)


@pytest.mark.parametrize("piped", [False, True])
def test_a_download_shows_its_bytes_and_time(tmp_path, monkeypatch, piped):
    fetch = "fetch --symbols BTC --intervals 4h --start 2024-12-20 --end 2025-03-10".split()
    with serving(today="2025-03-12") as server:
        server.rows["spot", "BTCUSDT", "4h"] = make_rows("4h", "2024-11-01", "2025-03-12T12:00")
        monkeypatch.setenv("CPBKIT_ARCHIVE_URL", server.url)
        monkeypatch.setenv("CPBKIT_REST_URL", server.rest_url)
        seen = look(fetch, tmp_path, piped=piped)
    assert seen.code == 0, seen.lines
    told = [line for line in seen.lines if re.match(r"\d+ of \d+ files, \d+\.\d MB, \d+ s  ", line)]
    assert told and all(len(line) <= COLUMNS for line in told), seen.lines

"""The command line: what it prints, how it fails, and its exit codes."""

import datetime as dt
import errno
import json
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from unittest.mock import Mock

import click
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from conftest import terminal as run
from test_report import write_run
from test_views import EXPERIMENT, FAILED, SICK, made_up_results

import cpbkit as cpb
from benchmarks.archive_server import make_rows, milliseconds, serving
from cpbkit.cli.command import Commands, settle_as_told, status_line
from cpbkit.cli.main import cpbkit
from cpbkit.config.experiment import Data, to_json, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.cache import Entry
from cpbkit.data.klines import Incomplete
from cpbkit.data.load import last_months
from cpbkit.data.synthetic import make_market
from cpbkit.errors import DataError, Terminated, UnknownName
from cpbkit.evaluation.calibration import Cell
from cpbkit.evaluation.leakage import Finding
from cpbkit.gpu_check.doctor import Examination
from cpbkit.gpu_check.findings import check_environment
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.plan import Plan


def failing(error):
    """A command line whose only command raises."""

    @click.group(cls=Commands)
    def cli():
        pass

    @cli.command(examples=("cli work",))
    def work():
        raise error

    return cli


def leaves(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


def test_help_lists_every_command():
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(f"\n  {name} " in shown.output for name in cpbkit.commands)


@pytest.mark.parametrize(("path", "command"), list(leaves(cpbkit)))
def test_help_of_a_command_shows_an_example_that_parses(path, command):
    shown = run(*path, "--help")
    assert shown.exit_code == 0 and "Example" in shown.output and "--debug" in shown.output
    start = " ".join(("cpbkit", *path))
    examples = [line.strip() for line in shown.output.splitlines() if line.strip().startswith(start)]
    assert examples
    for example in examples:
        command.make_context(path[-1], shlex.split(example.removeprefix(start)))


def test_every_command_of_the_readme_parses():
    commands = dict(leaves(cpbkit))
    text = (ROOT / "README.md").read_text() + (ROOT / "AGENTS.md").read_text().replace("$python -m cpbkit", "cpbkit")
    shown = [line for line in text.splitlines() if line.startswith("    cpbkit ")]
    assert len(shown) > 15
    for line in shown:
        words = shlex.split(line.strip(), comments=True)[1:]
        path = next(path for path in commands if path == tuple(words[: len(path)]))
        commands[path].make_context(path[-1], words[len(path) :])


def test_a_failure_is_one_line_and_exit_code_1():
    shown = run("work", cli=failing(DataError("the bars are gone; fetch them again")))
    assert shown.exit_code == 1 and shown.output == "Error: the bars are gone; fetch them again\n"


def test_a_full_disk_is_one_line():
    shown = run("work", cli=failing(OSError(errno.ENOSPC, "No space left on device", "runs/x")))
    assert shown.exit_code == 1 and len(shown.output.splitlines()) == 1
    assert shown.output.startswith("Error: No space left on device: runs/x. Make room there. ")
    assert "the same command goes on" in shown.output


def test_sigterm_is_one_line_and_exit_code_143():
    shown = run("work", cli=failing(Terminated()))
    assert shown.exit_code == 143 and "the same command goes on" in shown.output and "Traceback" not in shown.output


def test_debug_keeps_the_traceback():
    error = DataError("the bars are gone")
    assert run("work", "--debug", cli=failing(error)).exception is error


def test_a_fault_of_the_program_is_not_hidden():
    assert isinstance(run("work", cli=failing(ZeroDivisionError())).exception, ZeroDivisionError)


def test_ctrl_c_says_how_to_go_on():
    shown = run("work", cli=failing(KeyboardInterrupt()))
    assert shown.exit_code == 1 and "the same command goes on" in shown.output and "Traceback" not in shown.output


@pytest.mark.parametrize("arguments", [["sweeep"], ["doctor", "--nothing"], ["doctor", "--set", "width=8"]])
def test_wrong_usage_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (("series", "load.csv", "--learning-rate", "3"), "--learning-rate is a setting: --set learning_rate=VALUE"),
        (("sweep", "--widht", "8"), "No such option '--widht'"),
        (("verdict", "--width", "8"), "No such option '--width'"),
    ],
)
def test_a_setting_given_as_an_option_is_sent_to_its_own(words, said):
    shown = run(*words)
    assert shown.exit_code == 2 and said in shown.output


def test_doctor_speaks_to_people_and_machines(monkeypatch):
    for name in ("CPBKIT_ARCHIVE_URL", "CPBKIT_REST_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    shown, told = run("doctor"), json.loads(run("doctor", "--json").output)
    assert told["facts"]["torch"] in shown.output.splitlines()[0]
    assert all(finding["text"] in shown.output for finding in told["findings"])
    assert [host["name"] for host in told["hosts"]] == ["archive", "REST", "Hub"]
    assert shown.output.count("it cannot be reached from here (ConnectionError)") == 3


def test_python_m_is_the_same():
    done = subprocess.run([sys.executable, "-m", "cpbkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cpbkit, version ")


def test_a_list_of_coins_may_be_short_and_settings_keep_their_type(monkeypatch):
    seen = {}
    monkeypatch.setattr("cpbkit.cli.runs._sweep", lambda experiment, *_, **__: seen.update(experiment=experiment))
    days = ["--start", "2025-01-01", "--end", "2025-01-02"]
    given = ["--symbols", "btc, ETHUSDT", "--set", "learning_rate=1e-2", "--set", "deterministic=true", "--epochs", "3"]
    assert run("sweep", *days, *given, "--set", "features=close_return,rsi_14").exit_code == 0
    experiment = seen["experiment"]
    assert experiment.data.symbols == ("BTCUSDT", "ETHUSDT")
    assert (experiment.training.learning_rate, experiment.training.deterministic) == (0.01, True)
    assert experiment.training.epochs == 3 and experiment.task.features == ("close_return", "rsi_14")


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ("tickers=SPY", "tickers", ("SPY",)),
        ("tickers=SPY, ^VIX", "tickers", ("SPY", "^VIX")),
        ("tickers=", "tickers", ()),
        ("target_weights=2", "target_weights", (2.0,)),
    ],
)
def test_a_tuple_may_be_set_whatever_its_default(monkeypatch, given, setting, value):
    seen = Mock()
    monkeypatch.setattr("cpbkit.cli.runs._sweep", seen)
    assert run("sweep", "--start", "2025-01-01", "--end", "2025-01-02", "--set", given).exit_code == 0
    experiment = seen.call_args.args[0]
    assert experiment == vary(experiment, **{setting: value})


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--source", "synthetic", "--start", "2025-02-01", "--end", "2025-01-01"], "start must not be after end"),
        (["--end", "2025-02-01"], "start must be a day too, such as 2025-03-01; got end 2025-02-01 alone"),
        (["--start", "yesterday", "--end", "2025-01-01"], "a day like 2025-03-01"),
        (["--source", "synthetic", "--start", "2025-W01-1", "--end", "2025-06-01"], "a day like 2025-03-01"),
        (["--set", "learning_rat=1"], "(nearest: learning_rate"),
        (["--set", "epochs=many"], "epochs is a int"),
        (["--set", "epochs"], "epochs=100"),
        (["--preset", "huge"], "quick"),
        (["--symbols", ","], "at least one name"),
        (["--set", "weights=loss,0.01,10"], "weights is a tuple of tuples"),
        (["--set", "repeats=loss,0.01,5"], "repeats is a tuple of tuples"),
        (["--set", "ranges=loss,0,1"], "ranges is a tuple of tuples"),
        (["--set", "target_weights=1,much"], "target_weights is a tuple; got '1,much'"),
        (["--epochs", "3", "--set", "epochs=4"], "epochs is 3 already; leave out --set epochs"),
        (["--files", "bars", "--set", "files=others"], "files is 'bars' already"),
    ],
)
def test_a_wrong_wish_is_told_before_any_work(arguments, hint):
    shown = run("sweep", *arguments)
    assert shown.exit_code == 2 and hint in shown.output and "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("today", "first", "last"),
    [("2026-11-21", "2025-11-01", "2026-10-31"), ("2024-02-29", "2023-02-01", "2024-01-31")],
)
def test_the_last_twelve_months_are_whole(today, first, last):
    assert last_months(dt.date.fromisoformat(today)) == (first, last)


def test_without_days_it_takes_the_last_months_and_a_run_keeps_the_days_it_began_with(monkeypatch, tmp_path):
    seen = Mock()
    monkeypatch.setattr("cpbkit.cli.runs._sweep", seen)
    shown = run("sweep", "--run", tmp_path / "new")
    start, end = last_months(dt.datetime.now(dt.timezone.utc).date())
    data = seen.call_args.args[0].data
    assert (data.start, data.end) == (start, end) and shown.exit_code == 0
    assert f"the last twelve whole months, {start} to {end}" in shown.output
    (tmp_path / "old").mkdir()
    old = vary(PRESETS["quick"], start="2024-01-01", end="2024-12-31")
    (tmp_path / "old" / "experiment.json").write_text(to_json(old))
    shown = run("sweep", "--run", tmp_path / "old")
    assert seen.call_args.args[0] == old and "2024-01-01 to 2024-12-31" in shown.output


def test_the_seeded_market_too_is_had_without_days(tmp_path):
    start, end = last_months(dt.datetime.now(dt.timezone.utc).date())
    shown = run("map", "--source", "synthetic", "--symbols", "BTCUSDT", "--intervals", "1h", "--json")
    assert shown.exit_code == 0, shown.output
    assert f"{start} to {end}" in shown.stderr


def test_a_family_of_presets_is_named():
    shown = run("sweep", "--preset", "v7", "--source", "synthetic")
    assert shown.exit_code == 2 and "'v7' may mean v7_classic or v7_seed" in shown.output


def test_presets_are_listed_with_the_one_to_take_and_why(monkeypatch, tmp_path):
    monkeypatch.setenv("CPBKIT_CACHE", str(tmp_path))
    shown = run("presets").output
    for name in PRESETS:
        assert re.search(rf"^{name} ", shown, re.MULTILINE), name
    assert "334,596" in shown and "cpbv2 v4_train_fast_gru.py" in shown
    assert "Take quick: nothing is timed here yet" in shown
    skill = {"head": "price", "limit": 0.1, "others": 0.0}
    rows = [
        {"preset": name, "seconds_an_epoch": seconds / 10, "seconds_for_all": seconds, "memory": 10**8}
        | {"skill": {**skill, "predictable": found}}
        for name, seconds, found in (("quick", 60.0, 0.01), ("gru", 1800.0, 0.03), ("transformer", 9000.0, 0.09))
    ]
    (tmp_path / "bench_presets.json").write_text(json.dumps({"date": "2026-11-21T10:00", "rows": rows}))
    shown = run("presets").output
    assert "Take gru: skill +3.0 % where there is some to find, forty models in 30" in shown
    assert "2026-11-21" in shown and "+9.0 %" in shown


def test_an_unknown_symbol_is_wrong_usage(monkeypatch):
    error = UnknownName("symbol must be a known name; got 'BTCUSD' (nearest: BTCUSDT)")
    monkeypatch.setattr("cpbkit.data.binance.fetch_klines", Mock(side_effect=error))
    shown = run("fetch", "--symbols", "BTCUSD", "--start", "2025-01-01", "--end", "2025-01-02")
    assert shown.exit_code == 2 and "nearest: BTCUSDT" in shown.output


def test_fetch_shows_the_passports(monkeypatch):
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-06-30")
    fetch = Mock(return_value=market)
    monkeypatch.setattr("cpbkit.data.binance.fetch_klines", fetch)
    wish = ["fetch", "--symbols", "BTC,ETH", "--intervals", "1h", "--start", "2025-01-01", "--end", "2025-06-30"]
    missing = str(sum(bars.passport.unexplained for bars in market.values()))
    wish += ["--allow-gaps", missing]
    shown, told = run(*wish), json.loads(run(*wish, "--json").output)
    assert shown.exit_code == 0
    assert fetch.call_args.args == (("BTCUSDT", "ETHUSDT"), ("1h",), "2025-01-01", "2025-06-30")
    assert [p["series"] for p in told] == ["BTCUSDT_1h", "ETHUSDT_1h"]
    for passport in told:
        assert passport["series"] in shown.output and str(passport["got"]) in shown.output
        assert passport["gaps"] and all(gap["start"] in shown.output for gap in passport["gaps"])
        assert all(
            ", not explained: " in line for line in shown.output.splitlines() if passport["gaps"][0]["start"] in line
        )


def test_fetch_fails_when_bars_are_missing_unless_they_are_accepted(monkeypatch):
    market = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-06-30")
    missing = market["BTCUSDT_1h"].passport.unexplained
    assert missing > 1
    monkeypatch.setattr("cpbkit.data.binance.fetch_klines", Mock(return_value=market))
    wish = ["fetch", "--symbols", "BTC", "--intervals", "1h", "--start", "2025-01-01", "--end", "2025-06-30"]
    shown = run(*wish, "--allow-gaps", missing - 1)
    assert shown.exit_code == 1 and f"got {missing}. They are listed above" in shown.output
    assert "BTCUSDT_1h" in shown.output, "the table comes before the failure"
    assert run(*wish, "--allow-gaps", missing).exit_code == 0


def test_fetch_shows_what_could_be_had_and_fails(monkeypatch):
    market = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-01-05")
    fetch = Mock(side_effect=Incomplete("ETHUSDT_1h: HTTP 503", market, {"ETHUSDT_1h": "HTTP 503"}))
    monkeypatch.setattr("cpbkit.data.binance.fetch_klines", fetch)
    shown = run("fetch", "--symbols", "BTC,ETH", "--intervals", "1h", "--start", "2025-01-01", "--end", "2025-01-05")
    assert shown.exit_code == 1 and "HTTP 503" in shown.output and "BTCUSDT_1h" in shown.output


@pytest.fixture
def server(monkeypatch):
    """A venue whose clock stands at half past ten of 2025-03-12."""
    with serving(today="2025-03-12") as server:
        monkeypatch.setattr("cpbkit.data.binance._now", lambda: milliseconds("2025-03-12T10:30") * 10**6)
        for i, symbol in enumerate(("BTCUSDT", "ETHUSDT")):
            server.rows["spot", symbol, "4h"] = make_rows("4h", "2025-01-01", "2025-03-12T12:00", seed=i)
        monkeypatch.setenv("CPBKIT_ARCHIVE_URL", server.url)
        monkeypatch.setenv("CPBKIT_REST_URL", server.rest_url)
        monkeypatch.setattr("cpbkit.cli.command.today", lambda: dt.date(2025, 3, 12))
        yield server


def test_the_cache_is_brought_up_to_date_shown_and_exported(server, tmp_path):
    shown = run("fetch", "--symbols", "BTC,ETH", "--intervals", "240m", "--start", "2025-02-01", "--end", "2025-03-10")
    assert shown.exit_code == 0, shown.output
    server.asked.clear()
    shown = run("fetch", "--json")
    assert shown.exit_code == 0 and {p["last"] for p in json.loads(shown.stdout)} == {"2025-03-12T04:00"}
    assert server.asked and all("2025-03-1" in path or "klines?" in path for path in server.asked)

    shown = run("passport", "BTC", "--figure", tmp_path / "passport.png", "--json")
    (passport,) = json.loads(shown.stdout)
    assert (passport["series"], passport["first"], passport["last"]) == (
        "BTCUSDT_4h",
        "2025-02-01T00:00",
        "2025-03-12T04:00",
    )
    assert (tmp_path / "passport.png").read_bytes()[:4] == b"\x89PNG"
    shown = run("passport", "DOGE")
    assert shown.exit_code == 1 and "has no such bars of the spot market; it has BTCUSDT_4h, ETHUSDT_4h" in shown.output

    shown = run("export", "BTC", "--to", tmp_path / "out", "--as", "freqtrade")
    assert shown.exit_code == 0 and shown.output.strip() == str(tmp_path / "out" / "BTC_USDT-4h.feather")
    frame = pd.read_feather(tmp_path / "out" / "BTC_USDT-4h.feather")
    assert list(frame.columns) == ["date", "open", "high", "low", "close", "volume"] and len(frame) == 39 * 6 + 2
    for kind, read in (("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        run("export", "--to", tmp_path / "out", "--as", kind)
        assert len(read(tmp_path / "out" / f"ETHUSDT_4h.{kind}")) == 39 * 6 + 2
    shown = run("passport", tmp_path / "out", "--json")
    assert shown.exit_code == 0 and len(json.loads(shown.stdout)) == 2


def test_days_and_patterns_are_resolved_by_the_clock_and_the_venue(server):
    closed = milliseconds("2025-03-12T10:00")
    volumes = {"ETHUSDT": 5, "BTCUSDT": 9, "ETHBTC": 8, "USDCUSDT": 99, "OLDUSDT": 50}
    server.tickers = [
        {"symbol": name, "quoteVolume": str(v), "closeTime": closed - (10**9 if name == "OLDUSDT" else 0)}
        for name, v in volumes.items()
    ]

    def data(*arguments):
        given = cpbkit.commands["fetch"].make_context("fetch", list(arguments)).params
        own = ("refresh", "verify", "allow_gaps", "allow_doubts", "as_json")
        return settle_as_told("quick", {}, **{k: v for k, v in given.items() if k not in own}).experiment.data

    found = data("--symbols", "top1", "--days", "90")
    assert (found.symbols, found.start, found.end) == (("BTCUSDT",), "2024-12-13", "2025-03-12")
    assert data("--symbols", "all", "--start", "2025-03-01").symbols == ("BTCUSDT", "ETHUSDT")
    assert data("--symbols", "all", "--start", "2025-03-01").end == "2025-03-12"
    assert data("--symbols", "*BTC", "--days", "2").symbols == ("ETHBTC",)
    assert data("--symbols", "top5", "--quote", "BTC", "--days", "1").symbols == ("ETHBTC",)
    with pytest.raises(UnknownName, match="no symbol of the spot market fits"):
        data("--symbols", "*XYZ", "--days", "2")
    assert run("fetch", "--days", "3", "--start", "2025-01-01").exit_code == 2


def test_bars_in_doubt_fail_the_fetch_unless_they_are_accepted(server):
    rows = server.rows["spot", "BTCUSDT", "4h"]
    server.edited["BTCUSDT-4h-2025-02.zip"] = [
        [r[0] + "000", *(f"{10 * float(p)}" if i == 7 else p for p in r[1:5]), r[5], r[6] + "999", *r[7:]]
        for i, r in enumerate(r for r in rows if milliseconds("2025-02-01") <= int(r[0]) < milliseconds("2025-03-01"))
    ]
    wish = ["fetch", "--symbols", "BTC", "--intervals", "4h", "--start", "2025-02-01", "--end", "2025-02-28"]
    shown = run(*wish)
    assert shown.exit_code == 1 and "accept them with --allow-doubts 2" in shown.output
    assert "2025-02-02T04:00: BTCUSDT_4h" in shown.output
    assert run(*wish, "--allow-doubts", "2").exit_code == 0


def test_a_symbol_that_would_be_a_path_is_refused(tmp_path):
    wish = ["--source", "synthetic", "--intervals", "1h", "--start", "2025-01-01", "--end", "2025-02-01"]
    shown = run("sweep", *wish, "--symbols", "../../../OUT", "--run", tmp_path / "a" / "b" / "run")
    assert shown.exit_code == 2 and "must be written like BTCUSDT; got '../../../OUT'" in shown.output
    assert not any(tmp_path.rglob("*"))


def test_a_wrong_interval_is_not_called_a_symbol():
    with pytest.raises(UnknownName, match=r"^interval must be written like 1h; got '1-h'$"):
        Data(intervals=("1-h",))
    with pytest.raises(UnknownName, match=r"^series must be written like BTCUSDT_1h; got 'a/b'$"):
        Data(source="files", files="bars", series=("a/b",))


def test_a_run_goes_on_tomorrow_with_the_days_that_it_began_with(tmp_path, monkeypatch):
    wish = ["sweep", "--source", "synthetic", "--symbols", "BTC", "--intervals", "4h", "--days", "60", "--json"]
    wish += ["--epochs", "1", "--set", "steps=2", "--executor", "local", "--run", tmp_path / "run"]
    monkeypatch.setattr("cpbkit.cli.command.today", lambda: dt.date(2025, 3, 12))
    assert run(*wish).exit_code == 0
    monkeypatch.setattr("cpbkit.cli.command.today", lambda: dt.date(2025, 3, 13))
    shown = run(*wish)
    assert shown.exit_code == 0 and "1 of 1 were done already" in shown.stderr
    (row,) = json.loads(shown.stdout)["verdicts"]
    told = run("verdict", tmp_path / "run")
    assert row["p"] is None and told.exit_code == 0 and "TOO FEW TO TELL" in told.output, "a table without any p"


def test_all_own_files_that_are_there_are_listed_and_swept(tmp_path):
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h", "15m"], "2025-01-01", "2025-01-20")
    (tmp_path / "bars").mkdir()
    market["BTCUSDT_1h"].frame.to_csv(tmp_path / "bars" / "BTC_USDT-1h.csv")
    market["ETHUSDT_15m"].frame.to_parquet(tmp_path / "bars" / "ethusdt_15m_data.parquet")
    (tmp_path / "bars" / "SOLUSDT_1h.csv").write_text("time,open,high,low,close\nsoon,1,1,1,1\n")
    wish = ["--files", tmp_path / "bars", "--epochs", "1", "--executor", "local", "--run", tmp_path / "run"]
    shown = run("sweep", *wish, "--start", "2025-01-03", "--set", "steps=2", "--json")
    assert shown.exit_code == 0
    assert "BTCUSDT_1h       2025-01-03T00:00 to 2025-01-20T23:00" in shown.stderr
    assert "not taken: SOLUSDT_1h.csv: times such as 'soon' cannot be read" in shown.stderr
    assert json.loads(shown.stdout)["models"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {line["series"] for line in lines} == {"BTCUSDT_1h", "ETHUSDT_15m"}
    assert all(line["passport"]["first"] == "2025-01-03T00:00" for line in lines)


def test_own_files_that_were_asked_for_and_are_not_there_fail_the_sweep_in_the_end(tmp_path):
    market = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-01-20")
    market["BTCUSDT_1h"].frame.to_csv(tmp_path / "BTCUSDT_1h.csv")
    wish = ["--files", tmp_path, "--symbols", "BTC,ETH", "--epochs", "1", "--executor", "local", "--set", "steps=2"]
    shown = run("sweep", *wish, "--run", tmp_path / "run")
    assert shown.exit_code == 1 and "ETHUSDT_1h: no file of" in shown.output
    assert (tmp_path / "run" / "models" / "BTCUSDT_1h.safetensors").exists()


def test_a_folder_without_a_run_is_told(tmp_path):
    for command in ("status", "verdict"):
        shown = run(command, tmp_path)
        assert shown.exit_code == 1 and "no run folder" in shown.output


SWEEP = "sweep --source synthetic --symbols BTC,ETH --intervals 1h --start 2025-01-01 --end 2025-02-01".split()


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A made-up run of forty: the ledger's lines, and its folder."""
    lines = made_up_results()
    return lines, write_run(tmp_path_factory.mktemp("runs") / "forty", lines)


def test_a_verdict_row_holds_its_models_numbers(judged, monkeypatch):
    lines, folder = judged
    monkeypatch.setenv("COLUMNS", "300")
    shown = run("verdict", folder).output.splitlines()
    rows = {row.split()[0]: row.strip() for row in shown if row.strip().partition(" ")[0] in EXPERIMENT.series}
    assert len(rows) == 40 and shown.index(next(row for row in shown if "BEATS" in row)) == 1, "the best come first"
    for line in lines:
        if line.status != "done":
            assert rows[line.series] == f"{line.series} {line.status}: {line.reason}"
            continue
        j = line.test["price"]
        skill, low, high = (f"{100 * j[name]:+.2f}" for name in ("skill", "skill_low", "skill_high"))
        row = rows[line.series]
        assert re.search(rf" {re.escape(skill)} +{re.escape(low)} to {re.escape(high)} .* persistence ", row)
        assert f" {100 * j['persistence_skill']:+.2f} " in row and f"{j['rmse']:.4g} bp" in row
        assert row.split()[-6:-4] == ["+0.020", "0.3"] and f" {100 * j['direction']:.1f} " in row
    for explained in ("p: of the difference", "persistence %: skill against", "IC: rank", "fee bp: at which"):
        assert sum(row.startswith(explained) for row in shown) == 1
    best = max((line for line in lines if line.test), key=lambda line: line.test["price"]["skill"]).series
    assert sum("information coefficient +0.020" in row for row in shown) == 1
    assert any(row.startswith(f"{best}: information coefficient +0.020") for row in shown)
    assert "3 of 40 beat the best naive forecast of the price; 34 tie; 1 loses; 2 could not be judged" in shown


@pytest.mark.parametrize("columns", [80, 120])
def test_verdict_rows_fit_the_terminal_and_what_they_hold_is_explained(judged, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    head, *rows = run("verdict", judged[1]).output.splitlines()[:39]
    assert max(map(len, (head, *rows))) <= columns and re.search("skill % +95 % interval", head)
    shown = run("verdict", judged[1]).output
    assert (" p " in head or head.endswith(" p")) == ("p: of the difference" in shown)


def test_status_says_how_far_a_run_is_that_stopped_or_goes_on(tmp_path):
    folder = write_run(tmp_path / "run", made_up_results(stop=30))
    stopped, *trouble = run("status", folder).output.splitlines()
    missing = ", ".join(EXPERIMENT.series[30:36])
    assert f"30 of 40 done, 75 %, stopped without {missing} and 4 more. The command that started it goes on" in stopped
    sick, failed = EXPERIMENT.series[SICK], EXPERIMENT.series[FAILED]
    assert trouble == [f"{sick} sick: nan at epoch 7 in <b>decoder & co</b> $x_1$", f"{failed} failed: too few bars"]
    at = {"total": 40, "share": 0.8123, "seconds_left": 112.0, "at_most": True, "samples_per_second": 11_800.0}
    with RunFolder(folder).writing(EXPERIMENT) as held:
        held.tell({"stage": "training, epoch 7", **at})
        shown = run("status", folder).output
        assert "30 of 40 done, 81 %, at most 1 m 52 s left, 11.8 k samples/s, training, epoch 7 (process" in shown
        told = json.loads((folder / "progress/status.json").read_text())
        (folder / "progress/status.json").write_text(json.dumps(told | {"at": told["at"] - 125}))
        assert re.search(
            r"samples/s, nothing new for 2 m \d\d s, training, epoch 7 \(process", run("status", folder).output
        )
    assert "stopped without" in run("status", folder).output


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A run of two series, made by the command itself."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    return folder, run(*SWEEP, "--epochs", "2", "--executor", "local", "--run", folder)


def test_a_plan_is_printed_and_nothing_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = json.loads(run(*SWEEP, "--epochs", "2", "--executor", "local", "--plan", "--json").stdout)
    assert sorted(name for job in told["jobs"] for name in job) == ["BTCUSDT_1h", "ETHUSDT_1h"]
    assert told["epochs"] == 2 and told["seconds"] > 0 and not list(tmp_path.iterdir())


def test_a_plan_tells_its_time_in_minutes(monkeypatch):
    plan = Plan([["BTCUSDT_1h", "ETHUSDT_1h"]], 9, 12, 5, ["cpu"], seconds=90.0, reason="one stack")
    monkeypatch.setattr("cpbkit.runs.sweep.preview", lambda *_, **__: plan)
    shown = run(*SWEEP, "--plan").output
    assert "2 models: one stack." in shown and "about 1.5 min in all" in shown
    assert "At most 12 epochs of 9 steps a model, or 5 without a better one" in shown


def test_what_is_going_on_is_said_every_ten_seconds_where_lines_are_kept(monkeypatch, capfd):
    now = iter((1000.0, 1000.0, 1004.0, 1011.0, 1011.0))
    monkeypatch.setattr("cpbkit.cli.command.time.monotonic", lambda: next(now))
    with status_line() as say:
        for text in ("first", "soon after", "later"):
            say(text)
    assert capfd.readouterr().err == "first\nlater\n"


def test_a_step_without_a_diagnosis_fails_the_command(monkeypatch):
    found = Examination(check_environment(), "quick", failure="one step takes 9.0 s")
    monkeypatch.setattr("cpbkit.gpu_check.doctor.diagnose", lambda *_: found)
    shown = run("doctor", "--preset", "quick")
    assert shown.exit_code == 1 and "quick: no diagnosis. one step takes 9.0 s" in shown.output


def test_a_table_of_ones_own_is_trained_on(tmp_path):
    rng = np.random.default_rng(0)
    times = pd.date_range("2025-01-01", periods=600, freq="h")
    table = pd.DataFrame({"date": times, "load": rng.normal(size=600).cumsum(), "heat": rng.normal(size=600).cumsum()})
    table.to_csv(tmp_path / "town.csv", index=False)
    wish = ["series", tmp_path / "town.csv", "--model", "persistence", "--context", "24", "--horizon", "6"]
    shown, told = run(*wish), json.loads(run(*wish, "--json").stdout)
    assert told["columns"] == ["load", "heat"] and told["errors"] == told["persistence"]
    assert f"{told['errors']['mse']:.4f}" in shown.output and "town: persistence, 24 rows in, 6 out" in shown.output
    ours = [*wish[:2], "--model", "nlinear", *wish[4:], "--epochs", "1", "--set", "steps=3"]
    told, shown = json.loads(run(*ours, "--json").stdout), run(*ours).output
    words = {row["head"]: row["verdict"] for row in told["verdicts"]}
    assert words.keys() == {"load", "heat"} and all(f"{head}: {word}: " in shown for head, word in words.items())
    errors = (told[who][error] for who in ("errors", "persistence") for error in ("mse", "mae"))
    assert re.search(r"all columns +" + " +".join(f"{error:.4f}" for error in errors), shown)
    twice = run(*wish, "--epochs", "3", "--set", "epochs=4")
    assert twice.exit_code == 2 and "epochs is 3 already" in twice.output


def test_sweep_ends_with_the_verdicts(swept):
    folder, shown = swept
    assert shown.exit_code == 0, shown.output
    assert "BTCUSDT_1h" in shown.output and "of 2 beat" in shown.output
    spent = [line for line in shown.output.splitlines() if re.match(r"(Time|in workers): \w+ \d+\.\d s", line)]
    assert len(spent) == 2 and " training " in spent[0] and " epochs " in spent[1]
    assert shown.output.splitlines()[-1] == f"Report: {folder / 'report.html'}" and (folder / "report.html").exists()
    told = json.loads(run("verdict", folder, "--json").output)
    assert {row["series"] for row in told["verdicts"]} == {"BTCUSDT_1h", "ETHUSDT_1h"} and not told["trouble"]
    assert all(row["verdict"] in shown.output for row in told["verdicts"])
    assert told["synthetic"] and "SYNTHETIC" in shown.output, "what reads this alone takes it for no market's"


def test_the_verdicts_of_real_bars_are_not_said_to_be_synthetic(tmp_path):
    real, made_up = (
        write_run(tmp_path / str(synthetic), made_up_results(synthetic=synthetic)) for synthetic in (False, True)
    )
    assert not json.loads(run("verdict", real, "--json").output)["synthetic"]
    assert ["SYNTHETIC" in run("verdict", folder).output for folder in (real, made_up)] == [False, True]
    assert ["SYNTHETIC" in str(cpb.open_run(folder).verdicts()) for folder in (real, made_up)] == [False, True]


def test_what_coding_agents_are_told_is_so(swept, tmp_path, monkeypatch):
    """The lines of Python run on a run of that name, and the folders, files and parameters are there."""
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/small").symlink_to(swept[0])
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"((?:^(?:    .*)?\n)*    import cpbkit as cpb\n(?:^(?:    .*)?\n)*)", text, flags=re.MULTILINE
    )
    exec(textwrap.dedent(block), {})
    named = re.findall(r"\b(?:docs|tests|notebooks|\.ci)/[\w./-]*\w|\bREADME\.md", text)
    assert len(named) > 6 and all((ROOT / name).exists() for name in named)
    for notebook, given in re.findall(r"papermill (notebooks/\S+) \S+((?: -p \S+ \S+)+)", text):
        cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
        (parameters,) = ("".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ()))
        assert all(re.search(rf"^{name} = ", parameters, flags=re.MULTILINE) for name in given.split()[1::3]), given
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"test", "test-long"} <= set(re.findall(r"`make ([\w-]+)`", text)) <= set(targets)


def test_a_run_that_is_done_is_left_alone(swept):
    folder, _ = swept
    before = (folder / "results.jsonl").read_bytes()
    again = run(*SWEEP, "--epochs", "2", "--executor", "local", "--run", folder)
    assert again.exit_code == 0 and "2 of 2 were done already" in again.output
    assert (folder / "results.jsonl").read_bytes() == before


def test_report_can_be_written_again(swept):
    folder, _ = swept
    (folder / "report.html").unlink()
    shown = run("report", folder)
    assert shown.exit_code == 0 and shown.output == f"{folder / 'report.html'}\n"
    assert "BTC" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_can_be_looked_at_without_a_change_in_it(swept, tmp_path):
    """As one that somebody else gave, and that cannot be written."""
    folder, _ = swept
    (folder / "clock.json").write_text("{")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}
    shown = [run("status", folder), run("verdict", folder), run("report", folder, "--out", tmp_path / "elsewhere.html")]
    assert [each.exit_code for each in shown] == [0, 0, 0]
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")} == before
    assert "BTC" in (tmp_path / "elsewhere.html").read_text(encoding="utf-8")


def test_another_experiment_in_the_folder_is_refused_with_the_difference(swept):
    folder, _ = swept
    shown = run(*SWEEP, "--epochs", "5", "--run", folder)
    assert shown.exit_code == 1 and "training.epochs: 2 -> 5" in shown.output


def test_status_counts_what_is_done(swept):
    folder, _ = swept
    assert "2 of 2 done, 100 %, complete" in run("status", folder).output
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text(lines[0])
    told = json.loads(run("status", folder, "--json").output)
    (folder / "results.jsonl").write_text("".join(lines))
    assert (told["done"], told["total"], len(told["missing"])) == (1, 2, 1)


def test_a_series_that_cannot_be_trained_is_told_and_counts(tmp_path, monkeypatch):
    market = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-02-01")
    market |= make_market(["ETHUSDT"], ["1h"], "2025-01-01", "2025-01-02")
    monkeypatch.setattr("cpbkit.runs.settle.load_klines", lambda *_: market)
    shown = run(*SWEEP, "--epochs", "1", "--executor", "local", "--run", tmp_path)
    assert shown.exit_code == 1 and "ETHUSDT_1h failed: ETHUSDT_1h: the train split" in shown.output
    assert "of 2 beat" in shown.output and "could not be judged" in shown.output
    told = json.loads(run("status", tmp_path, "--json").output)
    assert told["done"] == 2 and len(told["trouble"]) == 1
    assert "1 failed; the command that started it tries it again\nETHUSDT_1h failed: " in run("status", tmp_path).output


@pytest.fixture
def audited(monkeypatch):
    """Which experiments were audited; each finding has the word that is put into the list."""
    words, seen = ["OK"], []

    def finding(experiment, series):
        seen.append(experiment)
        return Finding("overfit one batch", "OK", "falls")

    leak = Mock(side_effect=lambda *_, **__: [Finding("future", words[-1], "`rsi` of row 7 changes")])
    monkeypatch.setattr("cpbkit.evaluation.leakage.audit", leak)
    monkeypatch.setattr("cpbkit.evaluation.leakage.check_overfit", finding)
    return words, seen


@pytest.mark.parametrize(("word", "code"), [("OK", 0), ("NOTE", 0), ("FAIL", 1)])
def test_an_audit_that_finds_a_leak_fails(audited, word, code):
    audited[0].append(word)
    wish = ["audit", "--source", "synthetic", "--start", "2025-01-01", "--end", "2025-01-05", "--epochs", "1"]
    shown, told = run(*wish), json.loads(run(*wish, "--json").stdout)
    assert shown.exit_code == code and f"{word:5} future: `rsi` of row 7 changes\n" in shown.output
    first, second = told["BTCUSDT_1h"]
    assert first == {"check": "future", "verdict": word, "evidence": "`rsi` of row 7 changes"}
    assert second["check"] == "overfit one batch"


def test_an_audit_of_a_run_takes_its_settings_and_its_first_series(audited, tmp_path):
    bars = {"source": "synthetic", "symbols": ("ETHUSDT", "BTCUSDT"), "start": "2025-01-01", "end": "2025-01-05"}
    experiment = vary(PRESETS["gru"], **bars, width=7)
    (tmp_path / "experiment.json").write_text(to_json(experiment))
    assert run("audit", tmp_path, "--epochs", "2").exit_code == 0
    assert audited[1] == [vary(experiment, symbols=("ETHUSDT",), intervals=("15m",), epochs=2)]
    assert run("audit", tmp_path, "--symbols", "BTC", "--intervals", "1h,15m").exit_code == 0
    assert [e.series for e in audited[1][1:]] == [("BTCUSDT_1h", "BTCUSDT_15m")] * 2
    assert "is no run folder" in run("audit", tmp_path / "nothing").output
    refused = run("audit", tmp_path, "--preset", "quick")  # its default, but said
    assert refused.exit_code == 2 and "leave out --preset, or the run" in refused.output
    for folder in ([], [tmp_path]):
        refused = run("audit", *folder, "--epochs", "3", "--set", "epochs=4")
        assert refused.exit_code == 2 and "epochs is 3 already" in refused.output
    assert len(audited[1]) == 3
    assert run("audit", tmp_path, "--set", "symbols=BTCUSDT").exit_code == 0
    assert audited[1][-1].series == ("BTCUSDT_15m",)


def test_an_audit_of_own_files_takes_the_first_series_unless_some_are_named(audited, tmp_path):
    for name, one in make_market(("BTCUSDT", "ETHUSDT"), ("1h",), "2025-01-01", "2025-01-05", 0).items():
        one.frame.to_csv(tmp_path / f"{name}.csv")
    told = json.loads(run("audit", "--files", tmp_path, "--json").stdout)
    assert list(told) == ["BTCUSDT_1h"] and len(told["BTCUSDT_1h"]) == 2
    assert list(json.loads(run("audit", "--files", tmp_path, "--symbols", "ETH,BTC", "--json").stdout)) == [
        "BTCUSDT_1h",
        "ETHUSDT_1h",
    ]


@pytest.mark.parametrize(
    "wish", [["runs/x", "--calibration"], ["runs/x", "--inject"], ["--calibration", "--inject"]], ids=" ".join
)
def test_an_audit_is_of_one_thing(wish):
    shown = run("audit", *wish)
    assert shown.exit_code == 2 and "bring series of their own" in shown.output


def test_calibration_alone_needs_no_bars(monkeypatch):
    monkeypatch.setattr("cpbkit.evaluation.calibration.calibrate", lambda: [Cell("iid", 24, 100, 10, False)])
    told = json.loads(run("audit", "--calibration", "--json").stdout)
    assert [finding["verdict"] for finding in told["calibration"]] == ["OK", "OK"]
    (cell,) = told["size, coverage and power"]
    assert cell["check"] == "iid, 24 ahead, 100 windows" and cell["evidence"].startswith("TOO FEW TO TELL")


@pytest.mark.long
def test_smoke_finds_what_is_planted_and_nothing_else():
    told = json.loads(run("smoke", "--epochs", "4", "--json").stdout)
    assert told["planted"] == ["BTCUSDT_15m"] and not told["unexpected"] and not told["sick"]
    assert told["verdicts"]["BTCUSDT_15m"]["word"] == "BEATS"


@pytest.mark.slow
def test_smoke_fails_where_a_model_learns_nothing(monkeypatch):
    monkeypatch.setattr("cpbkit.evaluation.leakage.OVERFIT_STEPS", 50)
    shown = run("smoke", "--epochs", "1", "--set", "learning_rate=1e-9")
    assert shown.exit_code == 1 and "not as expected: BTCUSDT_15m" in shown.output
    assert shown.output.splitlines()[-1] == "Not sound." and "BTCUSDT_15m (planted): " in shown.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_ends_a_sweep_cleanly(tmp_path):
    """A real process and a real signal while it trains; the second call finds everything as it was left."""
    command = [sys.executable, "-m", "cpbkit", *SWEEP, "--run", "r", "--executor", "local"]
    longer = [*command, "--epochs", "4000", "--set", "patience=4000"]
    with subprocess.Popen(longer, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as sweep:
        seen = ""
        while "training" not in seen:
            seen = sweep.stderr.readline()
            assert seen, "it ended before it trained"
        sweep.send_signal(signal.SIGINT)
        rest = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 1 and "the same command goes on" in rest and "Traceback" not in rest
    told = json.loads(run("status", tmp_path / "r", "--json").stdout)
    assert (told["done"], told["total"], told["writer"]) == (0, 2, "")


def test_cache_lists_verifies_and_removes(tmp_path):
    assert run("cache", "list").output.startswith("0 series, 0.0 MB in ")
    assert json.loads(run("cache", "verify", "--json").output) == []
    assert run("cache", "remove").exit_code == 0


def test_a_damaged_file_of_the_cache_is_named_and_fails(monkeypatch):
    sound = Entry("a", "spot", "BTCUSDT_1h", "2025-01-01T00:00", "2025-01-01T23:00", 24)
    broken = Entry("b", "spot", "ETHUSDT_1h", problem="cut off after 3 rows")
    monkeypatch.setattr("cpbkit.data.cache.Store.verify", lambda *_: [sound, broken])
    shown = run("cache", "verify")
    assert shown.exit_code == 1 and "ETHUSDT_1h     cut off after 3 rows" in shown.output
    assert "BTCUSDT_1h     2025-01-01T00:00 to 2025-01-01T23:00" in shown.output and "; 1 damaged" in shown.output
    monkeypatch.setattr("cpbkit.data.cache.Store.verify", lambda *_: [sound])
    assert run("cache", "verify").exit_code == 0

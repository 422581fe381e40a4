"""A record of forecasts over 60 simulated days on the stand-in Hub: nothing lost, nothing double, nothing late."""

import contextlib
import io
import multiprocessing
import random
import signal
import threading
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import hub_in_use, speak_to

import cpbkit as cpb
from cpbkit.config.experiment import vary
from cpbkit.data.synthetic import make_market
from cpbkit.errors import DataError
from cpbkit.hub import client
from cpbkit.hub.client import HubError
from cpbkit.hub.record import FIELDS, SCHEMA, from_parquet, record, to_parquet
from cpbkit.hub.score import check, score, standing

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAMES = "BTCUSDT_1d", "ETHUSDT_1d"
REPO, STEP, MINUTE = "me/forty-record", pd.Timedelta(days=1), pd.Timedelta(minutes=1)
BEGIN = pd.Timestamp("2025-09-01", tz="UTC")
SMALL = {"context": 6, "horizon": 3, "width": 2, "epochs": 1, "steps": 2, "executor": "local", "quiet": True}


@pytest.fixture(scope="module")
def bars():
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1d"], "2023-06-01", "2025-11-15")
    market |= make_market(["BTCUSDT", "ETHUSDT"], ["1m"], "2025-08-31", "2025-11-05")
    # Of the minutes those in which something is committed.
    return {name: one.frame if "1d" in name else one.frame[one.frame.index.hour < 4] for name, one in market.items()}


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    known = {name: bars[name][:BEGIN] for name in NAMES}
    return cpb.sweep("quick", data=known, folder=tmp_path_factory.mktemp("record") / "run", **SMALL)


class World:
    """A Hub and a recorder under one clock."""

    def __init__(self, hub, run, bars, cache):
        self.hub, self.models, self.bars, self.now = hub, run.models(), bars, BEGIN
        self.run, self.cache = run, cache
        hub.clock = lambda: self.now.to_pydatetime()

    def closed(self):
        steps = {"1d": STEP, "1m": MINUTE}
        return {name: frame[: self.now - steps[name[-2:]]] for name, frame in self.bars.items()}

    def record(self, name="kit", models=None):
        return record(models or self.models, REPO, name, self.closed(), clock=lambda: self.now)

    def score(self):
        return score(REPO, self.closed(), clock=lambda: self.now)

    def kill(self, do, place):
        """Kill -9 the process that records or scores, as the Hub takes up its call to a place; say how it ended."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cpbkit.api", "cpbkit.hub.score"])
        arguments = (do, self.hub.address, str(self.cache), str(self.run.folder), self.closed(), self.now)
        process = context.Process(target=alone, args=arguments)
        self.hub.faults = [(place, process.kill)]
        process.start()
        process.join(60)
        self.hub.faults = []
        return process.exitcode

    def commits(self):
        return self.hub.repos["dataset", REPO]["commits"]

    def table(self, path):
        return pd.read_parquet(io.BytesIO(self.hub.files(REPO, "dataset")[path]))

    def scores(self):
        files = self.hub.files(REPO, "dataset")
        return pd.concat(
            [self.table(path) for path in files if path.startswith("scores/") and path.endswith("parquet")]
        )


def alone(do, address, cache, folder, closed, now):
    """Record or score in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        speak_to(address, patch, cache)
        if do == "record":
            record(cpb.open_run(folder).models(), REPO, "kit", closed, clock=lambda: now)
        else:
            score(REPO, closed, clock=lambda: now)


@pytest.fixture
def world(monkeypatch, tmp_path, run, bars):
    with hub_in_use(monkeypatch, tmp_path) as hub:
        yield World(hub, run, bars, tmp_path)


class Killed(BaseException):
    """What no code may catch."""


def kill_at(monkeypatch, count):
    """End the process, as it were, at its count-th word with the Hub: before it, or once it is spoken."""
    ask, left = client.ask, [count]

    def deadly(what, call):
        left[0] -= 1
        if left[0] == 0 and count % 2:
            raise Killed
        answer = ask(what, call)
        if left[0] == 0:
            raise Killed
        return answer

    for module in ("client", "record", "score"):
        monkeypatch.setattr(f"cpbkit.hub.{module}.ask", deadly)


def lines_by_first_commit(world):
    """Read from the Hub itself, line by line, when each was first there."""
    first, changed = {}, set()
    for commit, files in world.commits():
        for path, content in files.items():
            if path.startswith("forecasts/") and (path, content) not in changed:
                changed.add((path, content))
                for row in pd.read_parquet(io.BytesIO(content)).itertuples():
                    key = path, row.series, row.target, row.origin, row.bar
                    first.setdefault(key, (world.hub.times[commit], row.forecast, commit))
    return first


@pytest.mark.long
def test_sixty_days_with_kills_double_starts_and_lost_connections(world, bars, monkeypatch):
    monkeypatch.setattr(client, "TRIES", 3)
    chance, spoken, late, killed = random.Random(1), {}, [], []
    for step in range(60):
        minute = chance.randint(1, 29) + 150 * (step - 1 in late)  # time does not run back
        world.now = BEGIN + step * STEP + pd.Timedelta(minutes=minute)
        events = ["", "", "", "", "skip", "kill", "kill", "kill -9", "double", "busy", "lost", "down", "late"]
        event = chance.choice(events)
        if event == "skip":
            continue
        if event == "kill -9":
            for do in ("record", "score"):
                killed.append(world.kill(do, chance.choice(["/api/datasets/", "/resolve/", "/preupload/", "/commit/"])))
        with pytest.MonkeyPatch.context() as patch:
            if event == "kill":
                kill_at(patch, chance.randint(1, 8))
                for call in (world.record, world.score):
                    with contextlib.suppress(Killed):
                        call()
            if event == "down":
                world.hub.faults = [(chance.choice(["/commit/", "/api/datasets/"]), 503)] * 99
                with pytest.raises(HubError, match="HTTP 503, 3 times"):
                    world.record()
        world.hub.faults = [(chance.choice(["/preupload/", "/commit/"]), 500)] * 2 * (event == "busy")
        world.hub.faults += [(chance.choice(["/commit/", "/preupload/"]), "drop")] * (event == "lost")
        if event == "late":  # the Hub takes so long with the commit that a bar has begun by then
            late.append(step)
            over = (BEGIN + (step + 1) * STEP + pd.Timedelta(minutes=150)).to_pydatetime()
            world.hub.clock = lambda over=over: over
        parts = (world.models, world.models[:1], world.models[1:]) if event == "double" else ()  # into the same file
        calls = [threading.Thread(target=world.record, args=("kit", part)) for part in parts]
        for thread in calls:
            thread.start()
        for thread in calls:
            thread.join()
        told = world.record()
        world.hub.clock = lambda: world.now.to_pydatetime()
        first = 0 if minute < 144 else 1  # of the bar that has begun a tenth may have passed
        assert told.lines in (0, 6 - 2 * first) and not told.trouble, event
        spoken[world.closed()[NAMES[0]].index[-1]] = first
        if step % 8 == 7:
            world.score()
    world.now = BEGIN + 66 * STEP
    world.score()
    assert not world.score().commit, "nothing is left to say"

    first, scores = lines_by_first_commit(world), world.scores()
    wanted = {
        (name, origin, origin + (1 + h) * STEP)
        for name in NAMES
        for origin, begin in spoken.items()
        for h in range(begin, 3)
    }
    assert killed.count(-signal.SIGKILL) >= 4
    assert {(key[1], key[3], key[4]) for key in first} == wanted and len(first) == len(wanted), "0 lost, 0 double"
    assert len(scores) == len(first) and not scores.duplicated(["series", "target", "origin", "bar"]).any()
    for row in scores.itertuples():
        when, forecast, commit = first[
            f"forecasts/kit/{row.origin:%Y-%m-%d}.parquet", row.series, row.target, row.origin, row.bar
        ]
        assert row.commit == commit and row.status == ("late" if when >= row.bar + 0.1 * STEP else "scored")
        if row.status == "scored":
            truth, minute = bars[row.series]["close"][row.bar], row.series.replace("1d", "1m")
            price = bars[minute]["close"].asof(pd.Timestamp(when))
            assert row.error == pytest.approx(1e4 * np.log(truth / forecast), abs=1e-6)
            assert row.naive_error == pytest.approx(1e4 * np.log(truth / price), abs=1e-6)
    assert late and (scores["status"] == "late").sum() == 4 * len(late)
    assert check(REPO, world.closed(), clock=lambda: world.now) == []
    table = standing(REPO)
    assert table["name"].tolist() == ["kit"] and table["lines"][0] == len(first) and table["missed %"][0] > 0


def test_a_missed_bar_is_told_and_what_has_begun_is_refused(world):
    first = world.record()
    assert (first.lines, first.missed, first.trouble) == (6, {}, ()), "the first bar begins at this moment"
    assert world.record().lines == 0 and len(world.commits()) == 2
    world.now += 3 * STEP
    later = world.record()
    assert later.missed == dict.fromkeys(NAMES, 2) and "missed, and not filled: 2 bars of BTCUSDT_1d" in str(later)
    short = world.closed() | {NAMES[1]: world.closed()[NAMES[1]].drop(world.now.floor("1D") - 3 * STEP)}
    world.now += STEP
    told = record(world.models, REPO, "other", short, clock=lambda: world.now - STEP)
    assert told.lines == 3 and "must be without a gap" in told.trouble[0]
    with pytest.raises(DataError, match="every bar of these forecasts has begun"):
        record(world.models, REPO, "kit", world.closed(), clock=lambda: world.now + 5 * STEP)
    assert world.hub.repos["dataset", REPO]["private"]


def test_a_close_is_taken_until_a_tenth_of_its_bar_has_passed_and_nothing_else_of_a_bar_that_has_begun(world, tmp_path):
    short = SMALL | {"horizon": 1, "targets": ["high", "close"]}
    known = {name: world.bars[name][:BEGIN] for name in NAMES}
    one = cpb.sweep("quick", data=known, folder=tmp_path / "one", **short).models()
    world.now = BEGIN + 0.1 * STEP
    with pytest.raises(DataError, match="a record takes a close until 10% of its bar have passed, and other targets"):
        world.record("short", one)
    world.now -= pd.Timedelta(seconds=1)
    assert world.record("short", one).lines == 2
    world.now = BEGIN + STEP
    assert world.score().counts["scored"] == 2
    found = world.table(f"scores/short/{BEGIN - STEP:%Y-%m-%d}.parquet").set_index("series")
    assert set(found["target"]) == {"close"} and set(found["bar"]) == {BEGIN}


@pytest.mark.long
def test_who_copies_the_price_of_the_moment_gains_nothing(world):
    """Of somebody who waits till the bar before is nearly over, and then says its price."""
    world.record()
    minutes = make_market(["BTCUSDT"], ["1m"], "2025-08-30", "2025-10-14")["BTCUSDT_1m"].frame
    sides = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    days = minutes.resample("1D").agg(sides)
    for day in range(40):
        bar = BEGIN + (day + 1) * STEP
        world.now, known = bar - MINUTE, minutes["close"].asof(bar - 2 * MINUTE)
        line = {"series": NAMES[0], "origin": bar - 2 * STEP, "bar": bar, "forecast": known}
        foreign(world, [line], "copy", line["origin"])
    world.now += 2 * STEP
    given = {NAMES[0]: days[: world.now - STEP], "BTCUSDT_1m": minutes[: world.now - MINUTE]}
    score(REPO, given, clock=lambda: world.now)
    paths = [path for path in world.hub.files(REPO, "dataset") if path.startswith("scores/copy")]
    copied = pd.concat([world.table(path) for path in paths])
    close = np.log(days["close"])
    naive = 1e4 * (close[copied["bar"]].to_numpy() - close[copied["origin"]].to_numpy())  # who does not peek
    assert len(copied) == 40 and np.mean(copied["error"] ** 2) < 0.8 * np.mean(naive**2)
    assert standing(REPO).set_index("name").loc["copy", "verdict"] == "TIES"


def foreign(world, lines, name="liar", day=BEGIN):
    """Commit lines of somebody else, as `FIELDS` has them, past the kit; none takes the file away."""
    whole = [
        {"market": "spot", "target": "close", "low": None, "high": None, "weights": "", "bars": ""} | x for x in lines
    ]
    path = f"forecasts/{name}/{day:%Y-%m-%d}.parquet"
    content = to_parquet(pd.DataFrame(whole), SCHEMA) if lines else None
    return world.hub.commit(REPO, {path: content}, "dataset")


def test_others_join_with_a_file_and_nobody_polishes(world, bars):
    world.record()
    line = {"series": NAMES[0], "origin": BEGIN, "bar": BEGIN + 3 * STEP, "forecast": 50_000.0}
    world.now = BEGIN + 2.15 * STEP
    late = line | {"bar": BEGIN + 2 * STEP, "forecast": bars[NAMES[0]]["close"][BEGIN + 2 * STEP]}
    other_day = line | {"origin": BEGIN - STEP * 4}
    commit = foreign(world, [line, late, other_day, line | {"series": "../../x"}, line | {"target": "moon"}])
    world.hub.times[commit] = (BEGIN - STEP).to_pydatetime()  # as a push may claim
    world.hub.commit(REPO, {f"forecasts/odd/{BEGIN:%Y-%m-%d}.parquet": b"what is this"}, "dataset")
    foreign(world, [late], "slow")
    world.now = BEGIN + 5 * STEP
    foreign(world, [line | {"forecast": bars[NAMES[0]]["close"][BEGIN + 3 * STEP]}])  # now it knows better
    told = world.score()
    assert told.withdrawn == 2 and told.counts["late"] == 1 and "not in the format of a record" in told.trouble[0]
    found = world.table(f"scores/liar/{BEGIN:%Y-%m-%d}.parquet").set_index("bar")
    assert found["committed"].unique().tolist() == [BEGIN], "never before an earlier commit"
    kept = found.loc[BEGIN + 3 * STEP]
    assert kept["forecast"] == 50_000 and kept["withdrawn"] and kept["status"] == "scored"
    before = dict(world.hub.files(REPO, "dataset"))
    foreign(world, [])
    again = world.score()
    assert again.withdrawn == 0 and world.hub.files(REPO, "dataset").keys() < before.keys()
    table = standing(REPO).set_index("name")
    assert set(table.index) == {"kit", "liar", "slow"} and table.loc["liar", "withdrawn"] == 2, "nobody gets out of it"
    assert table.loc["slow", ["lines", "late", "verdict"]].tolist() == [1, 1, ""]
    assert check(REPO, world.closed(), clock=lambda: world.now) == []
    path = f"scores/kit/{BEGIN - STEP:%Y-%m-%d}.parquet"
    better = world.table(path).assign(error=0.0)
    world.hub.commit(REPO, {path: pa_bytes(better)}, "dataset")
    assert check(REPO, world.closed(), clock=lambda: world.now) == [f"{path}: 6 of 6 lines do not say what happened"]


def test_bars_of_another_place_than_where_a_record_is_scored_are_refused(world):
    elsewhere = [replace(model, experiment=vary(model.experiment, source="yahoo")) for model in world.models]
    with pytest.raises(HubError, match="of bars of a venue, that others can look up; BTCUSDT_1d is of none"):
        world.record(models=elsewhere)
    assert not world.hub.repos


def test_a_long_text_in_every_line_is_refused_before_it_is_unpacked():
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), ["x" * 50_000])
    others = {name: pa.nulls(20_000, kind) for name, kind in FIELDS.items() if name != "weights"}
    pq.write_table(pa.table(others | {"weights": texts}), file := io.BytesIO(), store_schema=False)
    assert len(file.getvalue()) < 10_000
    with pytest.raises(HubError, match="a file has texts of more than 1000 bytes"):
        from_parquet(file.getvalue(), SCHEMA, "a file")


def pa_bytes(table):
    return to_parquet(table, pa.Schema.from_pandas(table, preserve_index=False))


def test_a_repository_of_something_else_and_a_missing_token_are_told(world, monkeypatch):
    world.hub.repos["dataset", REPO] = {"private": True, "commits": [("1" * 40, {"thesis.md": b"mine"})]}
    with pytest.raises(HubError, match="holds other files than a record"):
        world.record()
    with pytest.raises(HubError, match="kept under a name of letters"):
        world.record("../me")
    monkeypatch.setattr(client, "get_token", lambda: None)
    with pytest.raises(HubError, match="writing to me/forty-record needs a token: make one with the right to write"):
        world.record()

"""A record of forecasts over 60 simulated days on the stand-in Hub: nothing lost, nothing double, nothing late."""

import contextlib
import io
import random
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hub_server import hub_in_use

import cpbkit as cpb
from cpbkit.data.synthetic import make_market
from cpbkit.errors import DataError
from cpbkit.hub import client
from cpbkit.hub.client import HubError
from cpbkit.hub.record import SCHEMA, record, to_parquet
from cpbkit.hub.score import check, score, standing

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAMES = "BTCUSDT_1d", "ETHUSDT_1d"
REPO, STEP = "me/forty-record", pd.Timedelta(days=1)
BEGIN = pd.Timestamp("2025-09-01", tz="UTC")
SMALL = {"context": 6, "horizon": 3, "width": 2, "epochs": 1, "steps": 2, "executor": "local", "quiet": True}


@pytest.fixture(scope="module")
def bars():
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1d"], "2023-06-01", "2025-11-15")
    return {name: klines.frame for name, klines in market.items()}


@pytest.fixture(scope="module")
def models(bars, tmp_path_factory):
    known = {name: frame[:BEGIN] for name, frame in bars.items()}
    run = cpb.sweep("quick", data=known, folder=tmp_path_factory.mktemp("record") / "run", **SMALL)
    return [run[name] for name in run]


class World:
    """A Hub and a recorder under one clock."""

    def __init__(self, hub, models, bars):
        self.hub, self.models, self.bars, self.now = hub, models, bars, BEGIN
        hub.clock = lambda: self.now.to_pydatetime()

    def closed(self):
        return {name: frame[: self.now - STEP] for name, frame in self.bars.items()}

    def record(self, name="kit", models=None):
        return record(models or self.models, REPO, name, self.closed(), clock=lambda: self.now)

    def score(self):
        return score(REPO, self.closed(), clock=lambda: self.now)

    def commits(self):
        return self.hub.repos["dataset", REPO]["commits"]

    def table(self, path):
        return pd.read_parquet(io.BytesIO(self.hub.files(REPO, "dataset")[path]))

    def scores(self):
        files = self.hub.files(REPO, "dataset")
        return pd.concat(
            [self.table(path) for path in files if path.startswith("scores/") and path.endswith("parquet")]
        )


@pytest.fixture
def world(monkeypatch, tmp_path, models, bars):
    with hub_in_use(monkeypatch, tmp_path) as hub:
        yield World(hub, models, bars)


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
    chance, spoken, late = random.Random(1), set(), []
    for step in range(60):
        minute = chance.randint(1, 29) + 30 * (step - 1 in late)  # time does not run back
        world.now = BEGIN + step * STEP + pd.Timedelta(minutes=minute)
        event = chance.choice(["", "", "", "", "skip", "kill", "kill", "double", "busy", "lost", "down", "late"])
        if event == "skip":
            continue
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
            over = (BEGIN + (step + 1) * STEP + pd.Timedelta(minutes=30)).to_pydatetime()
            world.hub.clock = lambda over=over: over
        parts = (world.models, world.models[:1], world.models[1:]) if event == "double" else ()  # into the same file
        calls = [threading.Thread(target=world.record, args=("kit", part)) for part in parts]
        for thread in calls:
            thread.start()
        for thread in calls:
            thread.join()
        told = world.record()
        world.hub.clock = lambda: world.now.to_pydatetime()
        assert told.lines in (0, 4) and not told.trouble, event
        spoken.add(world.closed()[NAMES[0]].index[-1])
        if step % 8 == 7:
            world.score()
    world.now = BEGIN + 66 * STEP
    world.score()
    assert not world.score().commit, "nothing is left to say"

    first, scores = lines_by_first_commit(world), world.scores()
    wanted = {(name, origin, origin + (1 + h) * STEP) for name in NAMES for origin in spoken for h in (1, 2)}
    assert {(key[1], key[3], key[4]) for key in first} == wanted and len(first) == len(wanted), "0 lost, 0 double"
    assert len(scores) == len(first) and not scores.duplicated(["series", "target", "origin", "bar"]).any()
    for row in scores.itertuples():
        when, forecast, commit = first[
            f"forecasts/kit/{row.origin:%Y-%m-%d}.parquet", row.series, row.target, row.origin, row.bar
        ]
        assert row.commit == commit and row.status == ("late" if when >= row.bar else "scored")
        if row.status == "scored":
            truth, close = (bars[row.series]["close"][at] for at in (row.bar, pd.Timestamp(when).floor("1D") - STEP))
            assert row.error == pytest.approx(1e4 * np.log(truth / forecast), abs=1e-6)
            assert row.naive_error == pytest.approx(1e4 * np.log(truth / close), abs=1e-6)
    assert late and (scores["status"] == "late").sum() == 2 * len(late)
    assert check(REPO, world.closed(), clock=lambda: world.now) == []
    table = standing(REPO)
    assert table["name"].tolist() == ["kit"] and table["lines"][0] == len(first) and table["missed %"][0] > 0


def test_a_missed_bar_is_told_and_what_has_begun_is_refused(world):
    first = world.record()
    assert (first.lines, first.missed, first.trouble) == (4, {}, ()), "of three bars the first has begun"
    assert world.record().lines == 0 and len(world.commits()) == 2
    world.now += 3 * STEP
    later = world.record()
    assert later.missed == dict.fromkeys(NAMES, 2) and "missed, and not filled: 2 bars of BTCUSDT_1d" in str(later)
    short = world.closed() | {NAMES[1]: world.closed()[NAMES[1]].drop(world.now.floor("1D") - 3 * STEP)}
    world.now += STEP
    told = record(world.models, REPO, "other", short, clock=lambda: world.now - STEP)
    assert told.lines == 2 and "must be without a gap" in told.trouble[0]
    with pytest.raises(DataError, match="every bar of these forecasts has begun"):
        record(world.models, REPO, "kit", world.closed(), clock=lambda: world.now + 5 * STEP)
    assert world.hub.repos["dataset", REPO]["private"]


def foreign(world, lines, name="liar"):
    """Commit lines of somebody else, as `FIELDS` has them, past the kit; none takes the file away."""
    whole = [
        {"market": "spot", "target": "close", "low": None, "high": None, "weights": "", "bars": ""} | x for x in lines
    ]
    path = f"forecasts/{name}/{BEGIN:%Y-%m-%d}.parquet"
    content = to_parquet(pd.DataFrame(whole), SCHEMA) if lines else None
    return world.hub.commit(REPO, {path: content}, "dataset")


def test_others_join_with_a_file_and_nobody_polishes(world, bars):
    world.record()
    line = {"series": NAMES[0], "origin": BEGIN, "bar": BEGIN + 3 * STEP, "forecast": 50_000.0}
    world.now = BEGIN + 2 * STEP
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
    assert check(REPO, world.closed(), clock=lambda: world.now) == [f"{path}: 4 of 4 lines do not say what happened"]


def pa_bytes(table):
    return to_parquet(table, pa.Schema.from_pandas(table, preserve_index=False))


def test_a_repository_of_something_else_and_a_missing_token_are_told(world, monkeypatch):
    world.hub.repos["dataset", REPO] = {"private": True, "commits": [("1" * 40, {"thesis.md": b"mine"})]}
    with pytest.raises(HubError, match="holds other files than a record"):
        world.record()
    with pytest.raises(HubError, match="kept under a name of letters"):
        world.record("../me")
    monkeypatch.setattr(client, "get_token", lambda: None)
    with pytest.raises(HubError, match="needs a token with the right to write"):
        world.record()

import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from cpbkit import atomic
from cpbkit.data.archive import Piece, Record
from cpbkit.data.cache import PART_AGE, RANK, Holding, Store, cache_folder, merge, second_places
from cpbkit.errors import DataError

HOUR = 3600 * 10**9
PARTS = ("parts", "spot", "BTCUSDT_1h")


def piece(kind, first, count, name=None, value=1.0, fetched="2025-03-01T00:00"):
    starts = np.arange(first, first + count, dtype=np.int64) * HOUR
    record = Record(name or f"{kind}-{first}", kind, first * HOUR, (first + count) * HOUR, "ab" * 32, fetched)
    return Piece(record, starts, np.full((count, 8), float(value)))


def same(a, b):
    assert (a.starts == b.starts).all() and (a.values == b.values).all() and (a.ranks == b.ranks).all()
    assert (a.records, a.absent, a.disagreements) == (b.records, b.absent, b.disagreements)
    assert a.first_bar == b.first_bar


def test_what_is_written_is_read_to_the_last_bit(tmp_path):
    store = Store(tmp_path, also=[])
    odd = piece("monthly", 10, 5, value=1 / 3)
    odd.values[2] = [1e-8, 5e-324, 1e300, 0.1, 0, -0.0, 2**53, np.pi]
    written = store.update("spot", "BTCUSDT_1h", [odd], {"x.zip": 123}, first_bar=7)
    found = Store(tmp_path, also=[]).read("spot", "BTCUSDT_1h")
    same(written, found)
    assert found.values.tobytes() == odd.values.tobytes()
    assert found.absent == {"x.zip": 123} and found.first_bar == 7 and found.damage == ""


def test_the_file_is_plain_parquet_with_its_origin(tmp_path):
    store = Store(tmp_path, also=[])
    store.update("um", "BTCUSDT_1h", [piece("daily", 24, 24)])
    table = pq.read_table(store.path("um", "BTCUSDT_1h"))
    assert table.column_names[:6] == ["open_time", "open", "high", "low", "close", "volume"]
    assert str(table.schema.field("open_time").type) == "timestamp[ns, tz=UTC]"
    about = json.loads(table.schema.metadata[b"cpbkit"])
    assert about["records"][0]["sha256"] == "ab" * 32 and about["records"][0]["fetched_at"] and about["kit"]
    assert pq.ParquetFile(store.path("um", "BTCUSDT_1h")).metadata.row_group(0).column(1).compression == "ZSTD"


def test_a_new_series_is_empty():
    held = Store(also=[]).read("spot", "BTCUSDT_1h")
    assert len(held.starts) == 0 and held.values.shape == (0, 8) and held.records == {} and held.damage == ""


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(RANK)), st.integers(0, 30), st.integers(0, 20)), max_size=6))
def test_the_highest_source_wins_and_of_equals_the_later(drawn):
    pieces = [piece(kind, first, count, f"{kind}-{i}", value=i + 1) for i, (kind, first, count) in enumerate(drawn)]
    held = merge(Holding(), pieces)
    best = {}
    for p in pieces:  # an oracle of dictionaries
        for start in p.starts.tolist():
            rank = RANK[p.record.kind]
            if start not in best or rank >= best[start][0]:
                best[start] = (rank, p.values[0, 0])
    assert held.starts.tolist() == sorted(best)
    assert held.values[:, 0].tolist() == [best[s][1] for s in sorted(best)]
    assert held.ranks.tolist() == [best[s][0] for s in sorted(best)]
    in_steps = Holding()
    for p in pieces:
        in_steps = merge(in_steps, [p])
    same(held, in_steps)
    for p in pieces:  # whoever gave a bar that stayed is on record
        if any(best[s][1] == p.values[0, 0] for s in p.starts.tolist()):
            assert p.record.name in held.records


def test_sources_that_disagree_are_reported():
    daily, monthly = piece("daily", 0, 24, value=100.0), piece("monthly", 0, 48, value=100.0)
    assert merge(Holding(), [daily, monthly]).disagreements == ()
    daily.values[5:8, 1] = 102.0
    for order in ([daily, monthly], [monthly, daily]):
        held = merge(Holding(), order)
        (found,) = held.disagreements
        assert (found.between, found.bars, found.compared) == ("monthly and daily", 3, 24)
        assert found.first == "1970-01-01T05:00" and found.largest == pytest.approx(0.02, rel=0.03)
        assert held.values[5, 1] == 100.0


def test_a_record_goes_when_a_higher_one_speaks_for_all_of_it():
    daily, rest = piece("daily", 0, 24), piece("rest", 24, 10)
    assert set(merge(Holding(), [daily, rest]).records) == {"daily-0", "rest-24"}
    assert set(merge(Holding(), [daily, rest, piece("monthly", 0, 48)]).records) == {"monthly-0"}
    short = piece("monthly", 0, 12)
    short = Piece(Record(**{**vars(short.record), "end": 48 * HOUR}), short.starts, short.values)
    assert set(merge(Holding(), [daily, rest, short]).records) == {"monthly-0", "daily-0", "rest-24"}
    empty = Piece(piece("daily", 0, 24).record, np.empty(0, np.int64), np.empty((0, 8)))
    assert set(merge(Holding(), [piece("monthly", 0, 48), empty]).records) == {"monthly-0", "daily-0"}


def test_flipped_bits_are_found(tmp_path):
    store = Store(tmp_path, also=[])
    noise = piece("monthly", 0, 300)
    noise.values[:] = np.random.default_rng(0).random(noise.values.shape)
    good = store.update("spot", "BTCUSDT_1h", [noise], {"x.zip": 5})
    path = store.path("spot", "BTCUSDT_1h")
    blob, draw, found = path.read_bytes(), random.Random(0), 0
    for _ in range(300):
        bad = bytearray(blob)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        held = store.read("spot", "BTCUSDT_1h")
        if held.damage:
            found += 1
            assert len(held.starts) == 0 and str(path) in held.damage
        else:
            same(held, good)  # the bit meant nothing
    assert found > 200
    for size in (0, 3, len(blob) // 2, len(blob) - 1):
        path.write_bytes(blob[:size])
        assert store.read("spot", "BTCUSDT_1h").damage
        (entry,) = store.verify()
        assert "damaged" in entry.problem and entry.series == "BTCUSDT_1h"
    assert store.list()[0].problem
    store.update("spot", "BTCUSDT_1h", [noise], {"x.zip": 5})
    assert path.read_bytes() == blob


def test_second_places_are_read_and_never_written(tmp_path, monkeypatch):
    drive, kaggle = Store(tmp_path / "drive", also=[]), Store(tmp_path / "kaggle", also=[])
    drive.update("spot", "BTCUSDT_1h", [piece("monthly", 0, 24, value=1)], first_bar=3)
    kaggle.update("spot", "BTCUSDT_1h", [piece("monthly", 0, 24, value=2), piece("daily", 24, 24, value=2)])
    monkeypatch.setenv("CPBKIT_CACHE_READ", os.pathsep.join([str(drive.folder), str(kaggle.folder)]))
    assert second_places()[:2] == [drive.folder, kaggle.folder]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.parquet")}
    store = Store(tmp_path / "own")
    held = store.read("spot", "BTCUSDT_1h")
    assert held.values[:, 0].tolist() == [1.0] * 24 + [2.0] * 24 and held.first_bar == 3
    assert {record.place for record in held.records.values()} == {"drive", "kaggle"}, "the Passport names them"
    store.update("spot", "BTCUSDT_1h", [piece("daily", 48, 1, value=3)])
    assert len(Store(tmp_path / "own", also=[]).read("spot", "BTCUSDT_1h").starts) == 49
    assert {p: p.read_bytes() for p in before} == before
    store.remove()
    assert all(path.exists() for path in before)


def test_no_link_inside_a_cache_is_followed(tmp_path):
    store, target = Store(tmp_path / "cache", also=[]), tmp_path / "precious"
    for at in ("locks/spot_BTCUSDT_1h.lock", "klines/spot/BTCUSDT_1h.parquet", "klines/spot", "parts/spot/BTCUSDT_1h"):
        target.mkdir() if at.endswith("spot") or "parts" in at else target.write_text("mine")
        link = store.folder / at
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        with pytest.raises(DataError, match="is a link, and no link inside a cache is followed; remove it"):
            store.keep(PARTS, "a.zip", b"x")
            store.update("spot", "BTCUSDT_1h", [piece("daily", 0, 1)])
        store.remove("spot", "BTCUSDT_1h") if "parquet" in at else link.unlink()
        assert not link.exists()
        assert target.read_text() == "mine" if target.is_file() else list(target.iterdir()) == []
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(target) if target.is_dir() else target.unlink()


@pytest.mark.parametrize("series", ["../../OUT", "a/b", "..", "BTC*", ""])
def test_a_name_that_leads_out_of_the_cache_is_refused(tmp_path, series):
    store = Store(tmp_path / "cache", also=[])
    (tmp_path / "OUT.parquet").write_text("mine")
    for act in (store.path, store.read, lambda *place: store.kept(place, "a.zip"), store.update):
        with pytest.raises(DataError, match="is named in letters, digits and _"):
            act("spot", series, *([[]] if act == store.update else []))
    if series:
        with pytest.raises(DataError, match="is named in letters, digits and _"):
            store.remove("spot", series)
    assert (tmp_path / "OUT.parquet").exists()


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("CPBKIT_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here" == Store().folder
    monkeypatch.delenv("CPBKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sys.platform != "linux" or cache_folder() == tmp_path / "cpbkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    for platform, folder in ((MacOS, "Library/Caches/cpbkit"), (Unix, ".cache/cpbkit")):
        monkeypatch.setattr("platformdirs.PlatformDirs", platform)
        assert cache_folder() == Path.home() / folder


def test_list_verify_and_remove(tmp_path):
    store = Store(tmp_path, also=[])
    assert store.list() == store.verify() == store.remove() == ()
    store.update("spot", "BTCUSDT_1h", [piece("monthly", 0, 24, fetched="2025-04-02T10:00")])
    store.update("um", "BTCUSDT_1h", [piece("daily", 0, 5)])
    store.update("spot", "ETHUSDT_1h", [], {"x.zip": 1})
    empty, whole, future = store.list("spot", "ETHUSDT_1h") + store.list("spot", "BTCUSDT_1h") + store.list("um")
    assert (whole.first, whole.last, whole.bars, whole.files) == ("1970-01-01T00:00", "1970-01-01T23:00", 24, 1)
    assert whole.fetched_at == "2025-04-02T10:00" and whole.bytes == os.path.getsize(whole.path)
    assert (empty.bars, empty.first, future.market) == (0, "", "um")
    assert store.verify() == store.list()
    assert [e.series for e in store.remove("spot", "BTCUSDT_1h")] == ["BTCUSDT_1h"]
    assert [(e.market, e.series) for e in store.list()] == [("spot", "ETHUSDT_1h"), ("um", "BTCUSDT_1h")]
    store.keep(("parts", "spot", "SOLUSDT_1h"), "a.zip", b"left by a fetch that never went on")
    assert len(store.remove()) == 2 and store.list() == ()
    assert not list(tmp_path.rglob("a.zip*"))


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    def write(i):
        Store(tmp_path, also=[]).update("spot", "BTCUSDT_1h", [piece("daily", 24 * i, 24, value=i + 1)])

    threads = [threading.Thread(target=write, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = Store(tmp_path, also=[]).read("spot", "BTCUSDT_1h")
    assert held.values[:, 0].tolist() == [i + 1.0 for i in range(12) for _ in range(24)]
    assert len(held.records) == 12


def test_a_lock_that_is_never_given_back_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("cpbkit.data.cache.LOCK_WAIT", 0.05)
    store = Store(tmp_path, also=[])
    with store._lock("spot", "BTCUSDT_1h"), pytest.raises(DataError, match=r"another process has held .*lock"):
        store.update("spot", "BTCUSDT_1h", [piece("daily", 0, 1)])


def test_a_disk_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    store = Store(tmp_path / "cache", also=[])
    good = store.update("spot", "BTCUSDT_1h", [piece("daily", 0, 24)])

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_bytes", full)
        with pytest.raises(DataError, match=r"cannot be written \(No space left.*untouched.*CPBKIT_CACHE"):
            store.update("spot", "BTCUSDT_1h", [piece("daily", 24, 24)])
    same(store.read("spot", "BTCUSDT_1h"), good)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="cannot be written"):
        Store(tmp_path / "file", also=[]).update("spot", "BTCUSDT_1h", [])
    with pytest.raises(DataError, match="cannot be written"):
        Store(tmp_path / "file", also=[]).keep(PARTS, "a.zip", b"x")


def test_parts_survive_until_they_are_merged(tmp_path, monkeypatch):
    store = Store(tmp_path, also=[])
    store.keep(PARTS, "a.zip", b"whole")
    store.keep(PARTS, "b.zip", b"whole as well")
    (half,) = tmp_path.rglob("b.zip.*")
    half.write_bytes(b"whole as")
    assert store.kept(PARTS, "a.zip", PART_AGE) == b"whole"
    assert store.kept(PARTS, "b.zip", PART_AGE) is None
    assert store.kept(("parts", "um", "BTCUSDT_1h"), "a.zip") is None
    os.utime(next(tmp_path.rglob("a.zip.*")), (0, 0))
    assert store.kept(PARTS, "a.zip", PART_AGE) is None, "a day later the venue may have rewritten it"
    orphan = store.path("spot", "BTCUSDT_1h").parent / ".BTCUSDT_1h.parquet.killed.part"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"half")
    store.update("spot", "BTCUSDT_1h", [piece("daily", 0, 24)])
    assert not list(tmp_path.rglob("*.zip.*")) and not orphan.exists()

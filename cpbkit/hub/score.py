"""What became of recorded forecasts: read from the history of the repository, written beside them, never into them."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError

from cpbkit import foreign
from cpbkit.config.experiment import Task
from cpbkit.data import binance
from cpbkit.data.klines import INTERVAL_SECONDS, series_name, split_name
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.pooled import Losses, pool
from cpbkit.hub.client import TRIES, Conflict, HubError, ask, connect, read
from cpbkit.hub.record import (
    FIELDS,
    KEY,
    MAX_FILE,
    PATH,
    TIME,
    from_parquet,
    is_late,
    keys,
    look,
    read_lines,
    step_of,
    to_parquet,
    utc_now,
    write,
)
from cpbkit.runs.settle import Bars
from cpbkit.runs.trained import closed_bars
from cpbkit.windows.series import TARGETS, Series, from_klines

CURSOR = "scores/walked.json"  # the last commit whose forecasts are taken up, and the files that wait for bars
WAITING, SCORED, LATE, NO_BAR = WORDS = ("waiting", "scored", "late", "no bar")
PATIENCE = pd.Timedelta(days=7)  # after a bar's end, for its venue to tell it
WARM_UP = 100  # bars before the first origin, for targets that look back
SCHEMA = pa.schema(
    [
        *((name, FIELDS[name]) for name in (*KEY, "market", "forecast", "low", "high")),
        ("commit", pa.string()),  # in which the line came
        ("committed", TIME),  # when, by the Hub's clock; never before an earlier commit's
        ("status", pa.string()),  # of WORDS
        ("withdrawn", pa.bool_()),  # whether its owner has changed it or taken it away since
        ("error", pa.float64()),  # truth - forecast, in basis points
        ("naive_error", pa.float64()),  # of a price: the same of the one in the minute of the commit
        ("inside", pa.bool_()),  # whether the truth lay in the interval
    ]
)


@dataclass(frozen=True)
class Scored:
    """What a call of `score` did."""

    repo: str
    counts: Mapping[str, int]  # of lines that this call found to be scored, late, or without a bar
    waiting: int  # lines whose bars are not over
    withdrawn: int  # lines that this call found changed or taken away; what was committed first counts
    commit: str = ""
    trouble: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = ", ".join(f"{number} {word}" for word, number in self.counts.items() if number) or "nothing new"
        lines = [f"{self.repo}: {done}; {self.waiting} wait for their bars"]
        if self.withdrawn:
            lines.append(f"{self.withdrawn} were changed or taken away after their commit; the first ones count")
        return "\n".join([*lines, *self.trouble])


def score(repo: str, bars: Mapping[str, Bars] | None = None, clock: Callable[[], pd.Timestamp] = utc_now) -> Scored:
    """Fill in what happened to the lines of a record whose bars are over, as one commit of files of its own.

    A line counts when its commit is not late, see `is_late`; of two of the same the first. bars: by series, for prices
    those of one minute too; None fetches them from the venue. Errors: HubError.
    """
    api = connect(repo, write=True)
    for _ in range(2 * TRIES):
        head, paths = look(api, repo)
        cursor = _cursor(api, repo, head, paths)
        tables = {path: _stored(api, repo, path, head, paths) for path in cursor["waiting"]}
        before = dict(tables)
        trouble: list[str] = []
        for path, lines, commit, committed in _walk(api, repo, head, cursor["commit"], trouble):
            if path not in tables:
                before[path] = tables[path] = _stored(api, repo, path, head, paths)
            tables[path] = _take(tables[path], lines, commit, committed)
        tables, found = _fill(tables, bars, clock())
        changed = [path for path in tables if not tables[path].equals(before[path])]
        now, then = (pd.concat([_EMPTY, *each.values()]) for each in (tables, before))
        counts = {word: int((now["status"] == word).sum() - (then["status"] == word).sum()) for word in WORDS[1:]}
        waiting = [path for path, table in tables.items() if (table["status"] == WAITING).any()]
        files = {_score_path(path): to_parquet(tables[path], SCHEMA) for path in changed}
        files[CURSOR] = json.dumps({"commit": head, "waiting": sorted(waiting)}).encode()
        try:
            commit = write(api, repo, files, head, "Score") if changed else ""
        except Conflict:
            continue
        withdrawn = int(now["withdrawn"].sum() - then["withdrawn"].sum())
        left = int((now["status"] == WAITING).sum())
        return Scored(repo, counts, left, withdrawn, commit, (*trouble, *found))
    raise HubError(f"scoring {repo}: others committed first, {2 * TRIES} times. The same call goes on")


def check(repo: str, bars: Mapping[str, Bars] | None = None, clock: Callable[[], pd.Timestamp] = utc_now) -> list[str]:
    """Compute every score of a record anew, from its history and the bars; name each file that says otherwise.

    Needs no right to write. Errors: HubError.
    """
    api = connect(repo)
    wrong: list[str] = []
    unread: list[str] = []
    head, paths = look(api, repo)
    tables: dict[str, pd.DataFrame] = {}
    for path, lines, commit, committed in _walk(api, repo, head, "", unread):
        tables[path] = _take(tables.get(path, _EMPTY), lines, commit, committed)
    tables, trouble = _fill(tables, bars, clock())
    for path in _scored(paths):
        told = _stored(api, repo, path, head, paths).set_index(KEY)
        told = told[told["status"] != WAITING]
        anew = tables.get(path, _EMPTY).set_index(KEY).reindex(told.index)
        same = (told["commit"] == anew["commit"]) & (told["status"] == anew["status"])
        for column in ("forecast", "error", "naive_error"):
            same &= np.isclose(told[column], anew[column], rtol=1e-9, atol=1e-3, equal_nan=True)
        if not same.all() or told.index.has_duplicates:
            wrong.append(f"{_score_path(path)}: {int((~same).sum())} of {len(told)} lines do not say what happened")
    return [*wrong, *trouble]


def standing(repo: str) -> pd.DataFrame:
    """Return how all who record stand: a row a participant and head, the best first. Errors: HubError."""
    api = connect(repo)
    head, paths = look(api, repo)
    tables: dict[str, list[pd.DataFrame]] = {}
    for path in _scored(paths):
        tables.setdefault(path.split("/")[1], []).append(_stored(api, repo, path, head, paths))
    rows = []
    for name, parts in tables.items():
        table = pd.concat(parts)
        heads = table["target"].map({target: head for target, (*_, head) in TARGETS.items()})
        rows += [{"name": name, "head": head, **_stand(group)} for head, group in table.groupby(heads)]
    found = pd.DataFrame(rows)
    return found if found.empty else found.sort_values("skill %", ascending=False, ignore_index=True)


def _stand(table: pd.DataFrame) -> dict:
    """Say of the lines of one participant and head what they are worth, over all series at once."""
    done, parts, expected = table[table["status"] == SCORED], {}, 0
    for series, group in done.groupby("series"):
        step = INTERVAL_SECONDS[split_name(series)[1]]
        by_origin = (group[["error", "naive_error"]] ** 2).groupby(group["origin"]).mean()
        times = by_origin.index.tz_localize(None).to_numpy("datetime64[s]").astype(np.int64)
        horizon = int((group["bar"] - group["origin"]).max().total_seconds()) // step
        naive = {"persistence": by_origin["naive_error"].to_numpy()}
        parts[series] = Losses(times, step, horizon, np.ones(len(times)), by_origin["error"].to_numpy(), naive)
        expected += (times[-1] - times[0]) // step + 1
    said: dict = {"lines": len(table), "late": int((table["status"] == LATE).sum())}
    said["withdrawn"] = int(table["withdrawn"].sum())
    if not any(one.baselines["persistence"].any() for one in parts.values()):
        return said | {"verdict": "", "skill %": np.nan}
    pooled = pool(parts)
    said["missed %"] = 100 * (1 - sum(len(one.times) for one in parts.values()) / expected)
    told = {"verdict": pooled.verdict.word, "skill %": 100 * pooled.skill}
    told |= {"low %": 100 * pooled.skill_low, "high %": 100 * pooled.skill_high}
    return said | told | {"inside %": 100 * done["inside"].dropna().astype(float).mean()}


_EMPTY = SCHEMA.empty_table().to_pandas()


def _score_path(path: str) -> str:
    return path.replace("forecasts/", "scores/", 1)


def _scored(paths: set[str]) -> list[str]:
    """Return the files of forecasts that have scores, also those that their owner has taken away."""
    names = [path.replace("scores/", "forecasts/", 1) for path in sorted(paths) if path.startswith("scores/")]
    return [name for name in names if PATH.fullmatch(name)]


def _cursor(api: HfApi, repo: str, head: str, paths: set[str]) -> dict:
    if CURSOR not in paths:
        return {"commit": "", "waiting": []}
    told = foreign.parse(read(api, repo, CURSOR, head, foreign.SIZE, "dataset"), {"commit": str, "waiting": [str]})
    return told | {"waiting": [path for path in told["waiting"] if PATH.fullmatch(path)]}


def _stored(api: HfApi, repo: str, path: str, head: str, paths: set[str]) -> pd.DataFrame:
    """Return what was said before of a file of forecasts."""
    name = _score_path(path)
    return from_parquet(read(api, repo, name, head, MAX_FILE, "dataset"), SCHEMA, name) if name in paths else _EMPTY


def _walk(api: HfApi, repo: str, head: str, since: str, trouble: list[str]) -> Iterable[tuple]:
    """Go through the commits after `since`, oldest first: each file of forecasts that changed, with what it held.

    Yields path, lines, commit and its time. A time before that of an earlier commit, which a push may claim, is
    taken as that one's.
    """
    what = f"reading the history of {repo}"
    commits = ask(what, lambda: api.list_repo_commits(repo, repo_type="dataset", revision=head))[::-1]
    names = [commit.commit_id for commit in commits]
    begin = names.index(since) + 1 if since in names else 0
    tree = _tree(api, repo, since) if begin else {}
    latest = max((commit.created_at for commit in commits[:begin]), default=commits[0].created_at)
    for commit in commits[begin:]:
        latest, now = max(latest, commit.created_at), _tree(api, repo, commit.commit_id)
        for path in sorted(path for path in now.keys() | tree.keys() if now.get(path) != tree.get(path)):
            try:
                lines = (
                    read_lines(api, repo, path, commit.commit_id) if path in now else pd.DataFrame(columns=[*FIELDS])
                )
            except HubError as error:
                trouble.append(str(error))
                continue
            yield path, lines, commit.commit_id, pd.Timestamp(latest)
        tree = now


def _tree(api: HfApi, repo: str, commit: str) -> dict[str, str]:
    """Return the files of forecasts at a commit, with a fingerprint of each."""

    def files() -> list:
        try:
            return list(api.list_repo_tree(repo, "forecasts", recursive=True, revision=commit, repo_type="dataset"))
        except EntryNotFoundError:
            return []

    found = ask(f"reading the history of {repo}", files)
    return {file.path: file.blob_id for file in found if PATH.fullmatch(file.path)}


def _take(table: pd.DataFrame, lines: pd.DataFrame, commit: str, committed: pd.Timestamp) -> pd.DataFrame:
    """Return the table with the lines that are new at a commit, and a mark at those that are not there as they were."""
    told = lines.set_index(KEY)["forecast"].reindex(keys(table)).to_numpy(float)
    table = table.assign(withdrawn=table["withdrawn"].to_numpy(bool) | (told != table["forecast"].to_numpy()))
    fresh = lines[~keys(lines).isin(keys(table))] if len(lines) else lines
    if fresh.empty:
        return table
    status = np.where(is_late(fresh, committed), LATE, WAITING)
    fresh = fresh.assign(commit=commit, committed=committed, status=status, withdrawn=False)
    fresh = fresh.reindex(columns=SCHEMA.names)
    return _typed(pd.concat([table, fresh]) if len(table) else fresh)


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    return pa.Table.from_pandas(table, SCHEMA, preserve_index=False).to_pandas()


def _fill(
    tables: Mapping[str, pd.DataFrame], bars: Mapping[str, Bars] | None, now: pd.Timestamp
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Return the tables with what happened at the bars that are over, and why some could not be looked up."""
    whole = pd.concat([_EMPTY.assign(path=""), *(t.assign(path=path) for path, t in tables.items())])
    trouble: list[str] = []
    if whole.empty:
        return dict(tables), trouble
    whole = whole.reset_index(drop=True)
    over = whole[(whole["status"] == WAITING) & (whole["bar"] + step_of(whole) <= now)]
    for (market, series), lines in over.groupby(["market", "series"]):
        try:
            first = lines["origin"].min() - WARM_UP * step_of(lines).iloc[0]
            targets = tuple(dict.fromkeys(lines["target"]))
            truth = _look_up(market, series, targets, (first, lines["bar"].max() + PATIENCE), bars, now)
            minute = series_name(split_name(series)[0], "1m")
            moments = lines["committed"].min(), lines["committed"].max()
            minutes = _look_up(market, minute, ("close",), moments, bars, now)
        except CpbkitError as error:
            trouble.append(f"{series}: {error}")
            continue
        whole.loc[lines.index, ["status", "error", "naive_error", "inside"]] = _happened(lines, truth, minutes, now)
    return {path: _typed(whole[whole["path"] == path]) for path in tables}, trouble


def _look_up(
    market: str,
    series: str,
    targets: tuple[str, ...],
    span: tuple[pd.Timestamp, pd.Timestamp],
    bars: Mapping[str, Bars] | None,
    now: pd.Timestamp,
) -> Series:
    """Return the columns of a series over a span."""
    symbol, interval = split_name(series)
    if bars is None:
        first, last = (str(min(now, end).date()) for end in span)
        klines = binance.fetch_klines([symbol], [interval], first, last, market=market)[series]
    elif series in bars:
        klines = closed_bars(series, bars[series], now)
    else:
        raise CpbkitError(f"no bars of {series} were given")
    task = Task(context=1, horizon=1, features=("log_close",), targets=targets, target_weights=(1.0,) * len(targets))
    return from_klines(klines, task)


def _happened(lines: pd.DataFrame, truth: Series, minutes: Series, now: pd.Timestamp) -> pd.DataFrame:
    """Return status, errors and whether the truth was inside, a row a line.

    Who waits with a commit, or copies the price of the moment, gains nothing: a price is held against the close of the
    minute in which the commit came, which is the last one that its owner can have known or a later one.
    """
    step, times = np.timedelta64(truth.step_ns, "ns"), truth.times
    bar, committed = (lines[name].dt.tz_localize(None).to_numpy("datetime64[ns]") for name in ("bar", "committed"))
    column = lines["target"].map(truth.targets.index).to_numpy()
    at = np.searchsorted(times, bar).clip(max=len(times) - 1)
    seen = (np.searchsorted(times, committed - step, side="right") - 1).clip(min=0)  # the last one closed by then
    known = (times[at] == bar) & (times[seen] <= committed - step) & (times[seen] > committed - 2 * step)
    minute = (np.searchsorted(minutes.times, committed, side="right") - 1).clip(min=0)
    known &= (minutes.times[minute] <= committed) & (minutes.times[minute] > committed - step)
    of_price = np.array([TARGETS[target][1] == "close" for target in truth.targets])[column]
    naive = np.where(of_price, minutes.levels[minute, 0], truth.anchors[seen, column])
    gone = (times[-1] > bar) | (lines["bar"] + step + PATIENCE < now).to_numpy()
    level = truth.levels[at, column]
    low, high = (np.log(lines[name]) for name in ("low", "high"))
    inside = pd.Series((low <= level) & (level <= high), lines.index, dtype=object)
    found = pd.DataFrame(
        {
            "status": np.where(known, SCORED, np.where(gone, NO_BAR, WAITING)),
            "error": np.where(known, 1e4 * (level - np.log(lines["forecast"])), np.nan),
            "naive_error": np.where(known, 1e4 * (level - naive), np.nan),
            "inside": inside.where(known & lines["low"].notna() & lines["high"].notna(), None),
        },
        index=lines.index,
    )
    return found

"""Forecasts committed to a dataset repository before they happen; the time that counts is that of the commit."""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd, HfApi

from cpbkit import __version__
from cpbkit.data.klines import INTERVAL_SECONDS
from cpbkit.errors import DataError
from cpbkit.hub.client import TRIES, Conflict, HubError, Missing, ask, connect, read
from cpbkit.runs import trained
from cpbkit.runs.settle import Bars
from cpbkit.runs.trained import Forecast, TrainedModel
from cpbkit.windows.series import TARGETS

ABOUT = "record.json"  # what tells a record from other repositories
PATH = re.compile(r"forecasts/([\w.-]{1,60})/(\d{4}-\d\d-\d\d)\.parquet")  # whose, and the UTC day of the origins
STARTED = 0.1  # share of a bar that may have passed when its close is committed; of other targets, none
MAX_FILE, MAX_LINES, FARTHEST = 16 << 20, 1 << 18, 1000  # bytes, lines and bars ahead that are read of a file
LONGEST = 1000  # bytes of a text in it
TIME = pa.timestamp("s", tz="UTC")
FIELDS = {  # of a line, which is one level of one bar to come
    "series": pa.string(),  # BTCUSDT_1h
    "market": pa.string(),  # spot | um
    "target": pa.string(),  # close, ...
    "origin": TIME,  # start of the last closed bar that was seen
    "bar": TIME,  # start of the bar that is forecast
    "forecast": pa.float64(),  # the level: a price
    "low": pa.float64(),  # of the interval; null where there is none
    "high": pa.float64(),
    "weights": pa.string(),  # SHA-256 of the model's file
    "bars": pa.string(),  # SHA-256 of the prices that were seen, see `hash_bars`
}
SCHEMA = pa.schema(list(FIELDS.items()))
KEY = ["series", "target", "origin", "bar"]  # what makes a line another one
CARD = """---
license: mit
tags: [time-series-forecasting, cryptocurrency, cpbkit]
---

# A record of forecasts

Each line was committed before its bar began, that of a close before a tenth of the bar had passed; `forecasts/` is
only added to, and the time that counts is that of the commit. `scores/` says what happened, in later commits, beside
the price in the minute of the commit; `cpbkit score --repo {repo} --check` computes it all anew.
"""


@dataclass(frozen=True)
class Recorded:
    """What a call of `record` did."""

    repo: str
    lines: int  # that are new; 0 where all of them were there
    commit: str  # in which they came; empty for none
    missed: Mapping[str, int] = field(default_factory=dict)  # series -> bars before this one that nothing was said at
    trouble: tuple[str, ...] = ()  # series that could not be forecast, and why

    def __str__(self) -> str:
        said = [f"{self.lines} new lines in {self.repo}" if self.lines else f"nothing new for {self.repo}"]
        if self.missed:
            said.append(f"missed, and not filled: {', '.join(f'{n} bars of {s}' for s, n in self.missed.items())}")
        return "\n".join([*said, *self.trouble])


def utc_now() -> pd.Timestamp:
    """Return the time it is."""
    return pd.Timestamp.now("UTC")


def record(
    models: Sequence[TrainedModel],
    repo: str,
    name: str,
    bars: Mapping[str, Bars] | None = None,
    public: bool = False,
    clock: Callable[[], pd.Timestamp] = utc_now,
) -> Recorded:
    """Commit the forecasts that `is_late` does not refuse, made from the newest closed bars.

    name: whose lines they are; each has files of its own. bars: by series; None fetches the newest. The repository is
    made where it is not there, private unless `public`. The same call again, at once or at the same time, adds nothing
    twice. Errors: HubError; DataError where no series can be forecast.
    """
    if not re.fullmatch(r"[\w.-]{1,60}", name) or name.startswith("."):
        raise HubError(f"a record is kept under a name of letters, digits, '-' and '.'; got {name!r}")
    for model in models:
        data, targets = model.experiment.data, set(model.experiment.task.targets)
        elsewhere = data.source == "yahoo" or data.market not in ("spot", "um")  # than where it is scored
        if model.synthetic or elsewhere or not targets <= set(TARGETS):
            raise HubError(f"a record is of bars of a venue, that others can look up; {model.series} is of none")
    api, what = connect(repo, write=True), f"recording to {repo}"
    found, why = trained.forecast_able(models, bars, clock())
    rows = [row for model in models if model.series in found for row in _lines(model, found[model.series])]
    lines, trouble = pa.Table.from_pylist(rows, SCHEMA).to_pandas(), tuple(why.values())
    if is_late(lines, clock()).all():
        raise DataError(
            f"every bar of these forecasts has begun, the last one at {lines['bar'].max():%Y-%m-%d %H:%M} UTC: a "
            f"record takes a close until {STARTED:.0%} of its bar have passed, and other targets before. Call it as "
            "soon as a bar has closed, or train with a longer horizon"
        )
    for attempt in range(2 * TRIES):
        try:
            head, paths = look(api, repo)
        except Missing:
            if attempt == TRIES:  # it is another's, and private
                raise
            ask(what, lambda: api.create_repo(repo, repo_type="dataset", private=not public, exist_ok=True))
            continue
        known, changed = {}, {}
        for day, group in lines.groupby(lines["origin"].dt.strftime("%Y-%m-%d")):
            path = f"forecasts/{name}/{day}.parquet"
            known[path] = read_lines(api, repo, path, head) if path in paths else group[:0]
            # What happens already is no forecast any more, however long the Hub let us wait.
            fresh = group[~is_late(group, clock()) & ~keys(group).isin(keys(known[path]))]
            if len(fresh):
                changed[path] = pd.concat([known[path], fresh]) if len(known[path]) else fresh
        added = sum(len(new) - len(known[path]) for path, new in changed.items())
        if not added:
            return Recorded(repo, 0, "", {}, trouble)
        earlier = max((p for p in paths if (m := PATH.fullmatch(p)) and m[1] == name and p not in known), default=None)
        before = [*known.values(), *([read_lines(api, repo, earlier, head)] if earlier else [])]
        files = {path: to_parquet(table, SCHEMA) for path, table in changed.items()}
        if ABOUT not in paths:
            files |= {ABOUT: json.dumps({"format": 1, "cpbkit": __version__}).encode()}
            files |= {"README.md": CARD.format(repo=repo).encode()}
        try:
            commit = write(api, repo, files, head, f"Forecast {lines['bar'].min():%Y-%m-%d %H:%M}")
        except Conflict:  # of another recorder, or of this one when the answer was lost: look again
            continue
        return Recorded(repo, added, commit, _missed(lines, pd.concat(before)), trouble)
    raise HubError(f"{what}: others committed first, {2 * TRIES} times. The same call goes on")


def _lines(model: TrainedModel, told: Forecast) -> Iterable[dict]:
    about = {"series": model.series, "market": model.experiment.data.market, "origin": told.last_bar}
    about |= {"weights": model.about["sha256"], "bars": told.seen}
    for bar, levels in told.frame.iterrows():
        for target in model.experiment.task.targets:
            ends = {name: levels.get(f"{target}_{name}") for name in ("low", "high")}
            yield {"bar": bar, "target": target, "forecast": levels[target], **ends, **about}


def keys(lines: pd.DataFrame) -> pd.MultiIndex:
    """Return what tells lines apart."""
    return pd.MultiIndex.from_frame(lines[KEY])


def step_of(lines: pd.DataFrame) -> pd.Series:
    """Return how long a bar of each line's series is; NaT for what is no name of one."""
    interval = lines["series"].str.extract(r"^\w{1,60}_(\w+)$")[0]
    return pd.to_timedelta(interval.map(INTERVAL_SECONDS), unit="s")


def is_late(lines: pd.DataFrame, when: pd.Timestamp) -> pd.Series:
    """Say of each line whether it comes too late at an instant.

    Of a bar that has begun its open is known, its high and low in part; its close is not, and the naive forecast that
    it is held against has the price of that minute.
    """
    return lines["bar"] + STARTED * step_of(lines).where(lines["target"] == "close", pd.Timedelta(0)) <= when


def _missed(lines: pd.DataFrame, before: pd.DataFrame) -> dict[str, int]:
    """Return by series how many bars ended since the one that was last spoken at, and before this one."""
    last, found = before.groupby("series")["origin"].max(), {}
    steps = dict(zip(lines["series"], step_of(lines), strict=True))
    for series, origin in lines.groupby("series")["origin"].max().items():
        if series in last and (gone := (origin - last[series]) // steps[series] - 1) > 0:
            found[series] = int(gone)
    return found


def look(api: HfApi, repo: str) -> tuple[str, set[str]]:
    """Return the newest commit of a record and its files. Errors: HubError for a repository of something else."""
    info = ask(f"opening {repo}", lambda: api.dataset_info(repo))
    paths = {file.rfilename for file in info.siblings or ()}
    if ABOUT not in paths and paths - {".gitattributes"}:
        raise HubError(f"{repo} holds other files than a record of cpbkit; name another repository")
    return info.sha or "", paths


def read_lines(api: HfApi, repo: str, path: str, commit: str) -> pd.DataFrame:
    """Read a file of forecasts as it was at a commit; lines that cannot be any are left out.

    Errors: HubError for a file that is none of this format.
    """
    table = from_parquet(read(api, repo, path, commit, MAX_FILE, "dataset"), SCHEMA, f"{path} of {repo}")
    day = PurePosixPath(path).stem
    ahead = (table["bar"] - table["origin"]) / step_of(table)
    sound = table["target"].isin(TARGETS) & table["market"].isin(("spot", "um")) & ahead.between(1, FARTHEST)
    sound &= (ahead % 1 == 0) & (table["origin"].dt.strftime("%Y-%m-%d") == day)
    for column in ("forecast", "low", "high"):
        sound &= (np.isfinite(table[column]) & (table[column] > 0)) | (table[column].isna() & (column != "forecast"))
    return table[sound].drop_duplicates(KEY)


def from_parquet(content: bytes, schema: pa.Schema, what: str) -> pd.DataFrame:
    """Read a table of a known form within bounds. Errors: HubError."""
    try:
        # One long text may stand in every row for a few bytes of the file: each different one is looked at first.
        texts = [name for name in schema.names if pa.types.is_string(schema.field(name).type)]
        file = pq.ParquetFile(io.BytesIO(content), read_dictionary=texts)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if file.metadata.num_rows > MAX_LINES or sum(group.total_byte_size for group in groups) > 4 * MAX_FILE:
            raise HubError(f"{what} has more than the {MAX_LINES:,} lines that one may have")
        table = file.read(columns=schema.names)
        chunks = [chunk for name in texts for chunk in table[name].chunks if pa.types.is_dictionary(chunk.type)]
        lengths = [pc.max(pc.binary_length(chunk.dictionary)).as_py() or 0 for chunk in chunks]
        if max(lengths, default=0) > LONGEST:
            raise HubError(f"{what} has texts of more than {LONGEST} bytes")
        return table.select(schema.names).cast(schema).to_pandas()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise HubError(f"{what} is not in the format of a record: {str(error).splitlines()[0]}") from None


def to_parquet(table: pd.DataFrame, schema: pa.Schema) -> bytes:
    """Write a table so that the same rows are the same bytes."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(table, schema, preserve_index=False).replace_schema_metadata(), file)
    return file.getvalue()


def write(api: HfApi, repo: str, files: Mapping[str, bytes], parent: str, message: str) -> str:
    """Commit files on top of a commit, whole or not at all. Errors: Conflict where that is not the newest any more."""
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    return ask(
        f"writing to {repo}",
        lambda: api.create_commit(repo, operations, repo_type="dataset", commit_message=message, parent_commit=parent),
    ).oid

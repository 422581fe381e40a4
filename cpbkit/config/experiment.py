"""What a run is: frozen, flat settings."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpbkit import atomic, foreign
from cpbkit.config.given_parts import name_parts
from cpbkit.config.own import is_own
from cpbkit.errors import CpbkitError, UnknownName, check_day, check_name

COINS = tuple("BTC ETH BNB XRP LTC ADA SOL DOGE AVAX LINK UNI ATOM NEAR DYDX ARB OP PEPE INJ SHIB LUNA".split())
SYMBOLS = tuple(f"{coin}USDT" for coin in COINS)
OHLC = ("open", "high", "low", "close")
OHLC_RETURNS = ("open_return", "high_return", "low_return", "close_return")
MAX_SERIES = 100_000  # of a run: a stranger's file of a megabyte could name thousands of millions


@dataclass(frozen=True)
class Data:
    """Which bars."""

    source: str = "binance"  # binance | yahoo | files | synthetic | given (bars as frames) | table (any columns, so)
    files: str = ""  # file, folder or pattern of own bars, in any type and layout that read_files knows
    venue: str = ""  # of own bars: binance (its halts and listings), other, or "" for what their names say
    market: str = "spot"  # spot | um (USD-M futures) | network (traces of a connection, in files, instead of bars)
    symbols: tuple[str, ...] = SYMBOLS  # exchange symbols; of own bars () is all that is there
    intervals: tuple[str, ...] = ("15m", "1h")  # bar lengths; of own bars () is all that is there
    series: tuple[str, ...] = ()  # of own bars: those that are there; () is each symbol at each interval
    start: str = ""  # first UTC day, YYYY-MM-DD
    end: str = ""  # last UTC day, inclusive
    seed: int = 0  # of the synthetic market; unused otherwise
    tickers: tuple[str, ...] = ()  # context series of Yahoo: each gives the features TICKER_close and TICKER_return

    def __post_init__(self):
        check_name("source", self.source, ("binance", "yahoo", "files", "synthetic", "given", "table"))
        check_name("venue", self.venue, ("", "binance", "other"))
        if (self.source == "files") != bool(self.files):
            raise CpbkitError(f"source 'files' goes with where the files are; got {self.source!r}, {self.files!r}")
        check_name("market", self.market, ("spot", "um", "network"))
        if self.source != "files" and not (self.symbols and self.intervals):
            raise CpbkitError(f"at least one symbol and one interval; got {self.symbols!r}, {self.intervals!r}")
        if len(self.symbols) * len(self.intervals) > MAX_SERIES:
            given = f"{len(self.symbols):,} symbols at {len(self.intervals):,} intervals"
            raise CpbkitError(f"a run has at most {MAX_SERIES:,} series; got {given}")
        kinds = {
            "symbol": (self.symbols, "BTCUSDT"),
            "interval": (self.intervals, "1h"),
            "series": (self.series, "BTCUSDT_1h"),
        }
        for kind, (names, example) in kinds.items():
            for name in names:  # they become names of files
                if not re.fullmatch(r"\w{1,40}", name):
                    if self.source == "table":
                        plain = re.sub(r"\W+", "_", name).strip("_")[:40] or "load"
                        raise UnknownName(
                            "a table's name becomes that of files: up to 40 letters, digits and '_', such as "
                            f"{plain!r}; got {name!r}"
                        )
                    plain = re.sub(r"\W|_", "", name).upper()
                    hint = f" (did you mean {plain}?)" if kind == "symbol" else ""
                    raise UnknownName(f"{kind} must be written like {example}; got {name!r}{hint}")
        for name, day in (("start", self.start), ("end", self.end)):
            if day:
                check_day(name, day)
        if self.start and self.end and self.start > self.end:
            raise CpbkitError(f"start must not be after end; got {self.start} .. {self.end}")


@dataclass(frozen=True)
class Task:
    """What is forecast from what."""

    context: int = 60  # bars in
    horizon: int = 10  # bars out
    features: tuple[str, ...] = OHLC_RETURNS  # columns of cpbkit.indicators, in the order of the channels
    targets: tuple[str, ...] = ("close",)  # prices as log return from the last close; others as log change
    target_weights: tuple[float, ...] = (1.0,)  # weight of each target in the loss
    train: float = 0.7  # share of the bars, oldest first
    validation: float = 0.15  # share of the bars, next; the rest is the test split
    purge: int = 0  # bars dropped between splits; 0 means the horizon, which is also the least
    input_clip: float = 8.0  # scaled inputs are clipped at +- this many train standard deviations
    target_scale: str = "persistence"  # (its loss is 1) | standard (train deviation of levels) | range | none
    ranges: tuple[tuple[str, float, float], ...] = ()  # declared (column, lowest, highest), which becomes 0..1
    clip_ranges: bool = True  # inputs outside their declared range count as its end
    loss: str = "mse"  # mse | mae | module:name of a function (forecast, truth), both (..., H, K) -> (...)
    zero_shot: str = ""  # folder or Hub name of a Chronos model: one more naive forecast, or what network `chronos` is
    quantiles: tuple[float, ...] = ()  # such as 0.05, 0.5, 0.95: forecast instead of a number each, by the pinball loss
    # Windows whose next row has `column` above a bound, the first that holds; both act on training alone.
    weights: tuple[tuple[str, float, float], ...] = ()  # (column, bound, weight in the loss relative to the others)
    repeats: tuple[tuple[str, float, int], ...] = ()  # (column, bound, how often an epoch's order has them)

    def __post_init__(self):
        for name in ("context", "horizon"):
            if getattr(self, name) < 1:
                raise CpbkitError(f"{name} must be at least 1 bar; got {getattr(self, name)!r}")
        for name in (*self.features, *self.targets):
            is_own(name)  # each must be a name
        if not self.features or not self.targets:
            raise CpbkitError("a task needs at least one feature and one target")
        if len(self.target_weights) != len(self.targets):
            raise CpbkitError(
                f"one weight a target; got {len(self.target_weights)} weights for {len(self.targets)} targets"
            )
        if not (0 < self.train < 1 and 0 < self.validation < 1 and self.train + self.validation < 1):
            raise CpbkitError(f"train and validation must leave a test share; got {self.train}, {self.validation}")
        if not is_own(self.loss):
            check_name("loss", self.loss, ("mse", "mae"))
        inside = all(a < b for a, b in itertools.pairwise((0.0, *self.quantiles, 1.0)))
        if self.quantiles and not (inside and 0.5 in self.quantiles and len(self.quantiles) > 1):
            raise CpbkitError(f"quantiles must rise from above 0 to below 1, with 0.5 among them; got {self.quantiles}")
        if self.quantiles and self.loss != "mse":
            raise CpbkitError(f"quantiles are trained by the pinball loss; leave out loss, which is {self.loss!r}")
        check_name("target_scale", self.target_scale, ("persistence", "standard", "range", "none"))
        declared = {column for column, _, _ in self.ranges}
        if any(low >= high for _, low, high in self.ranges):
            raise CpbkitError(f"a range runs from its lowest to its highest value; got {self.ranges}")
        if self.target_scale == "range" and not declared.issuperset(self.targets):
            raise CpbkitError(f"target_scale 'range' needs a range of each of {self.targets}; got {sorted(declared)}")
        if any(weight <= 0 for *_, weight in self.weights) or any(times < 1 for *_, times in self.repeats):
            raise CpbkitError(f"weights must be above 0, repeats at least 1; got {self.weights}, {self.repeats}")
        if 0 < self.purge < self.horizon:
            raise CpbkitError(f"purge must be at least the horizon ({self.horizon} bars); got {self.purge}")


@dataclass(frozen=True)
class Model:
    """Which network, and how large."""

    name: str = "gru"  # a key of cpbkit.models.zoo.MODELS, or module:name of what makes your own of (task, model)
    width: int = 128  # hidden units (recurrent) or model dimension (attention)
    layers: int = 2  # stacked layers, of the encoder and of the decoder, where the source leaves them open
    heads: int = 4  # attention heads
    dropout: float = 0.3  # between layers, in training only
    stacked: bool = False  # whether your own runs as one by torch.func; zoo.try_out says if that pays

    def __post_init__(self):
        is_own(self.name)  # it must be a name
        if self.width < 1 or self.layers < 1 or self.heads < 1:
            raise CpbkitError(f"width, layers and heads must be at least 1; got {self}")
        if not 0 <= self.dropout < 1:
            raise CpbkitError(f"dropout must be in [0, 1); got {self.dropout!r}")


SEARCHED = ("learning_rate", "weight_decay", "clip_norm")  # what rows of one stack may differ in


def series_of(piece: str) -> str:
    """Return the series that a fold of it, `BTCUSDT_1h~0`, is of."""
    return piece.partition("~")[0]


@dataclass(frozen=True)
class Training:
    """How it is trained."""

    epochs: int = 100  # at most
    steps: int = 0  # optimiser steps an epoch; 0 takes what the longest series of the run needs to be seen once
    batch: int = 64  # windows a step and model
    optimizer: str = "adamw"  # adamw | adam (weight decay as an L2 term)
    learning_rate: float = 1e-3  # at the first epoch
    weight_decay: float = 0.0  # of the optimiser
    schedule: str = "constant"  # constant | cosine | step | plateau, per model
    schedule_factor: float = 0.5  # of step and plateau
    schedule_epochs: int = 8  # period of step, patience of plateau, in epochs
    schedule_delta: float = 0.0  # by how much a validation loss must be lower to count as better for plateau
    min_learning_rate: float = 0.0  # what plateau and cosine do not go below
    patience: int = 15  # epochs without a better validation loss before a model leaves
    clip_norm: float = 1.0  # of each model's gradient; 0 switches it off
    clip_value: float = 0.0  # of each gradient entry, before the norm; 0 switches it off
    teacher_forcing: float = 0.0  # chance that a decoder step sees the truth, in training only
    forcing_draw: str = "step"  # step | batch: what one draw of that chance decides for
    precision: str = "float32"  # float32 | tf32 | float16 | bfloat16 | float64 | auto: what the plan times as fastest
    folds: int = 1  # test periods, one after another, each with a model of its own that is trained up to it
    pooled: bool = False  # one model for all series, trained on the windows of each of them, scaled by itself
    seed: int = 0  # of weights, order, dropout and teacher forcing
    deterministic: bool = False  # bit-equal reruns on a GPU, at a cost in speed
    parent: str = ""  # of a refit: the fingerprint of the models of the run before it
    warm_start: bool = False  # of a refit: whether it begins from their weights, and not from drawn ones
    search: tuple[tuple[str, tuple[float, ...]], ...] = ()  # settings tried side by side; validation chooses per series

    def __post_init__(self):
        check_name("optimizer", self.optimizer, ("adamw", "adam"))
        check_name("schedule", self.schedule, ("constant", "cosine", "step", "plateau"))
        check_name("forcing_draw", self.forcing_draw, ("step", "batch"))
        check_name("precision", self.precision, ("float32", "tf32", "float16", "bfloat16", "float64", "auto"))
        for name in ("epochs", "batch", "patience", "schedule_epochs", "folds"):
            if getattr(self, name) < 1:
                raise CpbkitError(f"{name} must be at least 1; got {getattr(self, name)!r}")
        if self.learning_rate <= 0:
            raise CpbkitError(f"learning_rate must be positive; got {self.learning_rate!r}")
        if not 0 <= self.teacher_forcing <= 1:
            raise CpbkitError(f"teacher_forcing must be in [0, 1]; got {self.teacher_forcing!r}")
        for name, values in self.search:
            check_name("setting to search", name, SEARCHED)
            if len(set(values)) < 2 or min(values) < 0 or (name == "clip_norm" and min(values) == 0):
                raise CpbkitError(f"a search needs two values of {name} or more, none below 0; got {values!r}")
            # Each must be a setting that can be. Not the whole grid: of a stranger's file it could take hours to make.
            lowest: dict[str, Any] = {"search": (), name: min(values)}
            replace(self, **lowest)

    @functools.cached_property
    def trials(self) -> list["Training"]:
        """Return the settings that are tried side by side: the grid of `search`, or just these."""
        names = [name for name, _ in self.search]
        grid = itertools.product(*(values for _, values in self.search))
        points: list[dict[str, Any]] = [dict(zip(names, point, strict=True)) for point in grid]
        return [replace(self, search=(), **point) for point in points] if names else [self]

    def pieces(self, series: str) -> list[str]:
        """Name what is trained on of a series: `BTCUSDT_1h`, or `BTCUSDT_1h~0`, ... up to each of several folds."""
        return [f"{series}~{i}" for i in range(self.folds)] if self.folds > 1 else [series]

    def rows(self, series: str) -> list[str]:
        """Name the rows of a series, or of a piece of it, in a stack: itself, or `BTCUSDT_1h@0`, ... of a search."""
        return [f"{series}@{i}" for i in range(len(self.trials))] if self.search else [series]

    def of_row(self, row: str) -> tuple[str, "Training"]:
        """Return the series, or the piece of it, and the settings of a row."""
        if not self.search:
            return row, self
        series, _, trial = row.rpartition("@")
        return series, self.trials[int(trial)]

    def count_steps(self, windows: int) -> int:
        """Return the steps of an epoch: as stated, else what so many train windows need to be seen once."""
        return self.steps or -(-windows // self.batch)


@dataclass(frozen=True)
class Experiment:
    """A run, whole: with the code and the bars it says everything that decides the result."""

    preset: str = "gru"  # a key of cpbkit.config.presets.PRESETS
    data: Data = field(default_factory=Data)
    task: Task = field(default_factory=Task)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)

    def __post_init__(self):
        task, folds = self.task, self.training.folds
        test = 1 - task.train - task.validation
        if folds > 1 and task.train - (folds - 1) * test < task.validation:
            most = 1 + int((task.train - task.validation) / test)
            raise CpbkitError(
                f"{folds} folds of {test:.0%} of the bars leave the first too little to train on; at most {most}, or "
                f"give the test a smaller share than train {task.train:g} and validation {task.validation:g} leave"
            )

    @property
    def series(self) -> tuple[str, ...]:
        """The names of the run's series, `BTCUSDT_15m`, symbol by symbol."""
        data = self.data
        return data.series or tuple(f"{symbol}_{interval}" for symbol in data.symbols for interval in data.intervals)

    @property
    def own_parts(self) -> tuple[str, ...]:
        """The names of a person's own parts in it: code that is found and run where the experiment is used."""
        names = (self.model.name, self.task.loss, *self.task.features, *self.task.targets)
        return tuple(dict.fromkeys(filter(is_own, names)))

    @property
    def pretrained(self) -> str:
        """The place of the foundation model that forecasts in it; empty where a network is trained."""
        return self.task.zero_shot if self.model.name == "chronos" else ""

    def to_file(self, path: str | os.PathLike) -> None:
        """Write it as JSON, whole or not at all; `sweep` and `--preset` take the file. Errors: OSError."""
        atomic.write_bytes(Path(path), to_json(self).encode())

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Experiment":
        """Read an own preset, or the `experiment.json` of a run: JSON or TOML; what is left out has its default.

        Errors: CpbkitError for a file that is no experiment, and for TOML before Python 3.11; OSError.
        """
        if not Path(path).exists():
            raise CpbkitError(f"no file {path}, which was to be an experiment")
        with open(path, "rb") as file:
            content = file.read(FILE_SIZE + 1)
        try:
            if len(content) > FILE_SIZE:
                raise foreign.Damaged(f"it has more than {FILE_SIZE:,} bytes")
            if Path(path).suffix == ".toml":
                if sys.version_info < (3, 11):
                    raise CpbkitError(
                        f"{path}: Python 3.10 reads no TOML; write the same as JSON, or take a newer Python"
                    )
                import tomllib

                content = json.dumps(tomllib.loads(content.decode()), default=str).encode()
            return from_json(content.decode())
        except UnknownName as error:
            raise UnknownName(f"{path}: {error}") from None
        except (foreign.Damaged, ValueError, RecursionError) as error:
            raise CpbkitError(
                f"{path} must be an experiment as JSON or TOML, such as the experiment.json of a run; {error}"
            ) from None


FILE_SIZE = 1 << 20  # bytes of an own preset
PARTS = {"data": Data, "task": Task, "model": Model, "training": Training}


def with_quote(symbols: Iterable[str]) -> list[str]:
    """Return symbols in capitals, coins of the kit with their USDT."""
    return [f"{name}USDT" if name in COINS else name for name in map(str.upper, symbols)]


def to_json(experiment: Experiment) -> str:
    """Write an experiment as JSON text, readable and complete."""
    return json.dumps(dataclasses.asdict(experiment), indent=2) + "\n"


def from_json(text: str) -> Experiment:
    """Read what `to_json` wrote; a setting this version does not know is an error, not a guess.

    A part or setting that is left out has its default, so that an own preset can be a short file.
    """
    return from_dict(foreign.parse(text, dict))


def from_dict(raw: dict) -> Experiment:
    """Build an experiment from the plain types that `dataclasses.asdict` and JSON make of one."""
    owner = {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls)}
    for key in raw:
        if key in owner:
            raise UnknownName(f"{key} is a setting of {owner[key]}, and stands inside of it")
        check_name("part of an experiment", key, ("preset", *PARTS))
    parts = {}
    foreign.check(raw, {"preset?": str, **{f"{name}?": dict for name in PARTS}})
    if "folder" in raw.get("data", {}):  # what `files` was called in the first runs
        data = {"files" if key == "folder" else key: value for key, value in raw["data"].items()}
        raw = raw | {"data": data}
    for name, cls in PARTS.items():
        known = {f.name: f.type for f in dataclasses.fields(cls)}
        for key, value in raw.get(name, {}).items():
            if key not in known and key in owner:
                raise UnknownName(f"{key} is a setting of {owner[key]}, not of {name}")
            check_name(f"setting of {name}", key, known)
            foreign.check(value, foreign.form_of(known[key]), key)
        parts[name] = cls(**{key: _tuples(value) for key, value in raw.get(name, {}).items()})
    return Experiment(preset=raw.get("preset", "own"), **parts)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def difference(old: Experiment, new: Experiment) -> list[str]:
    """List the settings that differ, one line each: `training.batch: 64 -> 32`."""
    lines = [] if old.preset == new.preset else [f"preset: {old.preset} -> {new.preset}"]
    for part, cls in PARTS.items():
        for f in dataclasses.fields(cls):
            a, b = getattr(getattr(old, part), f.name), getattr(getattr(new, part), f.name)
            if a != b:
                lines.append(f"{part}.{f.name}: {a} -> {b}")
    return lines


def vary(experiment: Experiment, **settings) -> Experiment:
    """Return the experiment with settings changed by their flat name: `vary(e, epochs=3, symbols=("BTCUSDT",))`.

    A class or a function gets a name, as `name_parts` gives it. Errors: as there and of the settings.
    """
    owner = {f.name: part for part, cls in PARTS.items() for f in dataclasses.fields(cls) if f.name != "seed"}
    owner["seed"] = "training"
    kinds = {f.name: f.type for cls in PARTS.values() for f in dataclasses.fields(cls)}
    changes: dict[str, dict] = {}
    for name, value in settings.items():
        check_name("setting", name, owner)
        if isinstance(value, str) and isinstance(getattr(getattr(experiment, owner[name]), name), int | float):
            raise CpbkitError(f"{name} must be a number; got {value!r}")
        if kinds[name] is int and isinstance(value, float):
            if not value.is_integer():
                raise CpbkitError(f"{name} must be a whole number; got {value!r}")
            value = int(value)
        changes.setdefault(owner[name], {})[name] = name_parts(value)
    return replace(experiment, **{part: replace(getattr(experiment, part), **c) for part, c in changes.items()})


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

"""Named experiments: one table, each with its source; docs/presets.md says number by number what differs and why."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpbkit.config.experiment import OHLC, OHLC_RETURNS, Data, Experiment, Model, Task, Training, vary
from cpbkit.errors import UnknownName, check_name

# The columns of the sources by name, prices relative to the close. Columns that came twice, or as four times another,
# come once; of two that were mislabelled ("bb params" was a band and its width) the meant ones are taken.
V7_FEATURES = OHLC_RETURNS + tuple(
    "rsi macd_rel macd_signal_rel bb_upper_rel bb_lower_rel bb_width volatility true_range_mean_rel".split()
)
V8_FEATURES = OHLC_RETURNS + tuple(
    "rsi macd_rel macd_signal_rel roc bb_upper_rel bb_lower_rel bb_width bb_position volatility true_range_mean_rel"
    " volume_norm".split()
)
# A network trace, a row every 200 ms: ms, share, bit/s, bit/s, ms, bit/s.
NETWORK = ("delay", "loss_ratio", "receiving_rate", "prev_bandwidth", "delay_gradient", "throughput")
NETWORK_RANGES = (
    ("delay", 0.0, 10_000.0),
    ("loss_ratio", 0.0, 1.0),
    ("delay_gradient", -2_000.0, 2_000.0),
    *((rate, 0.0, 10e6) for rate in ("receiving_rate", "prev_bandwidth", "throughput", "bandwidth")),
)
LOSSES = (0.2, 0.1, 0.05, 0.01)  # of the next row, above which a window is repeated


def repeat_losses(*times: int) -> tuple[tuple[str, float, int], ...]:
    """Return how often windows are repeated before heavy losses, and before lighter ones."""
    return tuple(("loss_ratio", bound, count) for bound, count in zip(LOSSES, times, strict=True))


ALL_OHLC: dict[str, Any] = {"targets": OHLC, "target_weights": (1.0,) * 4}
# Keras lowers the rate at the 8th epoch that is not better by 1e-4, torch after the 8th.
KERAS_PLATEAU: dict[str, Any] = {"schedule": "plateau", "schedule_epochs": 7, "schedule_delta": 1e-4, "patience": 20}
KERAS_PLATEAU |= {"optimizer": "adam", "clip_norm": 0.0}
V4: dict[str, Any] = {"optimizer": "adam", "teacher_forcing": 0.5, "forcing_draw": "batch"}
V4_TASK = Task(context=30, horizon=10, **ALL_OHLC)
GRU_TRAINING = Training(epochs=100, batch=64, patience=15, **V4)
V4_LSTM = Training(epochs=200, batch=32, weight_decay=1e-5, schedule="step", schedule_epochs=30, patience=20, **V4)
EVERY_EPOCH: dict[str, Any] = {"optimizer": "adam", "schedule": "step", "schedule_epochs": 1, "clip_norm": 0.0}
# Zeng et al. 2023, github.com/cure-lab/LTSF-Linear
LTSF = Training(epochs=10, batch=32, learning_rate=5e-3, patience=3, **EVERY_EPOCH)
LTSF_SLOW = replace(LTSF, learning_rate=5e-4)  # theirs for exchange rates, which wander as prices do
LINEAR_TASK = Task(context=336, horizon=10, features=("log_close",), target_scale="standard")

# What all presets of the sources share with each other and not with the sources: inputs are log ratios scaled by train
# rows alone (not by candle, nor by the whole series), targets are log changes from the last close, splits have a purge
# gap and a test part, train windows are shuffled, validation runs free. ABOUT names each source.
PRESETS: dict[str, Experiment] = {
    "quick": Experiment(
        task=Task(context=32, horizon=4),
        model=Model(name="gru", width=16, layers=1, heads=1, dropout=0.0),
        training=Training(epochs=12, batch=64, learning_rate=3e-3, weight_decay=1e-4, schedule="cosine", patience=5),
    ),
    # Weight decay is what torch's AdamW takes unasked.
    "transformer": Experiment(
        task=V4_TASK,
        model=Model(name="transformer", width=128, layers=2, heads=8, dropout=0.1),
        training=Training(epochs=50, batch=128, weight_decay=0.01, schedule="cosine", patience=10, teacher_forcing=0.5),
    ),
    "gru": Experiment(task=V4_TASK, model=Model(name="gru", width=128, layers=2, dropout=0.3), training=GRU_TRAINING),
    # The encoder of `gru` with one linear layer for all steps, as unit8co/darts and Nixtla/neuralforecast have it.
    "gru_dense": Experiment(
        task=V4_TASK,
        model=Model(name="gru_dense", width=128, layers=2, dropout=0.3),
        training=replace(GRU_TRAINING, teacher_forcing=0.0),
    ),
    "seq2seq_lstm": Experiment(
        task=V4_TASK, model=Model(name="lstm", width=256, layers=2, heads=4, dropout=0.3), training=V4_LSTM
    ),
    # Trained as v4_train_cuda_v2.py does.
    "forced_lstm": Experiment(
        task=V4_TASK, model=Model(name="forced_lstm", width=256, layers=2, heads=4, dropout=0.3), training=V4_LSTM
    ),
    # A weight of the source is one of a whole head, and shared by its targets.
    "v7_classic": Experiment(
        task=Task(
            context=60,
            horizon=10,
            features=V7_FEATURES,
            targets=(*OHLC, "bb_upper", "bb_lower", "volatility"),
            target_weights=(0.25, 0.25, 0.25, 0.25, 0.4, 0.4, 0.3),
        ),
        model=Model(name="bilstm", width=128, dropout=0.3),
        training=Training(epochs=100, batch=16, learning_rate=5e-4, min_learning_rate=1e-6, **KERAS_PLATEAU),
    ),
    # Weight decay is its L2 of 1e-5, whose gradient is twice that; its L1 is left out.
    "v7_seed": Experiment(
        task=Task(context=120, horizon=1, features=V8_FEATURES, **ALL_OHLC),
        model=Model(name="bilstm_dense", width=256, dropout=0.3),
        training=Training(
            epochs=200,
            batch=16,
            learning_rate=5e-4,
            weight_decay=2e-5,
            clip_value=1.0,
            min_learning_rate=1e-7,
            **KERAS_PLATEAU,
        ),
    ),
    "v8_stable": Experiment(
        task=Task(context=120, horizon=1, features=V8_FEATURES, **ALL_OHLC),
        model=Model(name="bilstm_dense", width=256, dropout=0.3),
        training=Training(epochs=150, batch=32, clip_value=1.0, min_learning_rate=1e-7, **KERAS_PLATEAU),
    ),
    # bcgcc, the settings that its FIX_SUMMARY.md names; for network traces, not for bars. It repeated four files, those
    # with losses, the one with the most of them most often, in validation and test too. A trace of yours has none of
    # these names: the windows are repeated whose next row loses so much, in train alone.
    "bandwidth": Experiment(
        data=Data(market="network", symbols=("trace",), intervals=("200ms",)),
        task=Task(
            context=10,
            horizon=1,
            features=NETWORK,
            targets=("bandwidth",),
            train=0.8,
            validation=0.1,
            target_scale="range",
            ranges=NETWORK_RANGES,
            weights=(("loss_ratio", 0.01, 10.0), ("delay", 300.0, 5.0)),
            repeats=repeat_losses(10, 5, 5, 5),
        ),
        model=Model(name="lstm_dense", width=128, layers=2, dropout=0.2),
        training=Training(
            epochs=100,
            steps=300,  # theirs has 4,827, of 1.2 million windows
            batch=256,
            optimizer="adam",
            learning_rate=1e-4,
            weight_decay=1e-5,
            schedule="plateau",
            schedule_epochs=5,
            min_learning_rate=1e-6,
            patience=10,
        ),
    ),
    "nlinear": Experiment(task=LINEAR_TASK, model=Model(name="nlinear"), training=LTSF_SLOW),
    "dlinear": Experiment(task=LINEAR_TASK, model=Model(name="dlinear"), training=LTSF_SLOW),
    # The baseline of that name over all columns of a bar and all targets, as a model: solved in one step, not trained.
    "ridge_ar": Experiment(
        task=Task(context=48, horizon=10, **ALL_OHLC),
        model=Model(name="ridge_ar"),
        training=Training(epochs=1, steps=1),
    ),
    # Ansari et al. 2024; the log price goes in, scaled as what comes out.
    "chronos": Experiment(
        task=replace(LINEAR_TASK, context=512, input_clip=1e9, zero_shot="amazon/chronos-bolt-tiny"),
        model=Model(name="chronos"),
        training=Training(epochs=1, steps=1),
    ),
    # Lin et al. 2023, github.com/lss-1138/SegRNN, scripts/SegRNN/Lookback_96/etth1.sh. Theirs go on for 30 epochs at a
    # rate that falls by a fifth each, the first six of which do most of it.
    "segrnn": Experiment(
        task=Task(context=96, horizon=24, features=("log_close",), target_scale="standard"),
        model=Model(name="segrnn", width=512, dropout=0.5),
        training=Training(epochs=6, batch=256, schedule_factor=0.8, **EVERY_EPOCH),
    ),
}
# trainer V8_ALIGNED_WITH_V7.py is V7_CLASSIC.py with another folder for its output.
PRESETS["v8_aligned"] = PRESETS["v7_classic"]
PRESETS = {name: replace(one, preset=name) for name, one in PRESETS.items()}
TRAINED = tuple(name for name, preset in PRESETS.items() if not preset.pretrained)  # here; what others trained is not

# What each is, in a few words, and where it comes from.
ABOUT = {
    "quick": ("the net of gru, small, for two CPU cores", "the kit's own"),
    "transformer": ("encoder and decoder with attention", "cpbv2 v4_train_transformer.py"),
    "gru": ("GRU encoder and decoder, context pooled once", "cpbv2 v4_train_fast_gru.py"),
    "gru_dense": ("GRU encoder, all bars at once", "darts BlockRNNModel, neuralforecast GRU"),
    "seq2seq_lstm": ("LSTM encoder and decoder with attention", "cpbv2 v4_train_unified.py"),
    "forced_lstm": ("the same, gate by gate: a slow specimen", "cpbv2 v4_model_cuda_forced_v2.py"),
    "v7_classic": ("two-way LSTMs, prices, bands, volatility", "trainer V7_CLASSIC.py"),
    "v7_seed": ("four LSTM layers and dense ones, one bar", "trainer V8_FULL_V7_ALIGNED.py"),
    "v8_stable": ("v7_seed without a penalty on its weights", "trainer V8_STABLE.py"),
    "bandwidth": ("LSTM for network traces, not for bars", "bcgcc FIX_SUMMARY.md"),
    "nlinear": ("one linear map, less the last value", "Zeng et al. 2023"),
    "dlinear": ("two linear maps, of trend and rest", "Zeng et al. 2023"),
    "ridge_ar": ("ridge regression, solved at once", "the kit's own"),
    "chronos": ("a foundation model, trained elsewhere", "Ansari et al. 2024; cpbkit[zeroshot]"),
    "segrnn": ("GRU over segments of a day", "Lin et al. 2023"),
    "v8_aligned": ("v7_classic under another name", "trainer V8_ALIGNED_WITH_V7.py"),
}

# The eight changes of bcgcc's FIX_SUMMARY.md, all made at once, and what they changed. The last has nothing to act on
# here, where no process loads anything: windows are gathered by index.
BANDWIDTH_CHANGES: dict[str, dict[str, Any]] = {
    "a wider range of the delay": {"ranges": (("delay", 0.0, 5_000.0), *NETWORK_RANGES[1:])},
    "inputs clipped to their range": {"clip_ranges": False, "input_clip": 1e9},
    "a lower learning rate": {"learning_rate": 1e-3},
    "smaller weights": {"weights": (("loss_ratio", 0.01, 50.0), ("delay", 300.0, 10.0))},
    "fewer repeats": {"repeats": repeat_losses(50, 30, 30, 20)},
    "a smaller batch": {"batch": 512},
    "a scaled target": {"target_scale": "none"},
    "fewer loaders": {},
}


def one_change_each(after: Experiment, changes: Mapping[str, Mapping]) -> dict[str, Experiment]:
    """Return the experiment before all changes, with each of them alone, after all but each of them, and after all.

    changes: by name, the settings as they were before.
    """

    def undo(names) -> Experiment:
        return vary(after, **{setting: value for name in names for setting, value in changes[name].items()})

    alone = {f"{name} alone": undo(other for other in changes if other != name) for name in changes}
    return {"none": undo(changes), **alone, **{f"all but {name}": undo([name]) for name in changes}, "all": after}


def find_preset(name: str | os.PathLike) -> Experiment:
    """Return the experiment of a preset, or of an own one in a JSON or TOML file.

    Errors: UnknownName with the nearest names; CpbkitError for a file that is no experiment, OSError.
    """
    if str(name).endswith((".json", ".toml")):
        return Experiment.from_file(name)
    family = [known for known in PRESETS if known.startswith(f"{name}_")]
    if name not in PRESETS and family:
        raise UnknownName(f"preset {name!r} may mean {' or '.join(family)}; `cpbkit presets` says what each is")
    return PRESETS[check_name("preset", str(name), PRESETS)]

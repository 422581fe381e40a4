"""Time the training steps of another library; run as a script, in that library's own environment, by peers.py.

Standard input holds a JSON object: library, model, a npz file with `values` (N, C), context, horizon, width, layers,
batch, learning_rate, steps and threads (counts to try). The last line of standard output is JSON.
"""

import json
import logging
import statistics
import sys
import time
import warnings
from itertools import pairwise


def main() -> None:
    """Fit once for each number of threads; a step is the median time from the end of one to the end of the next."""
    spec = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import numpy as np
    import torch
    from pytorch_lightning.callbacks import Callback

    ends: list[float] = []

    class Clock(Callback):
        """Notes when each step ends, outside of itself: neuralforecast trains a copy of what it is given."""

        def on_train_batch_end(self, *_):
            ends.append(time.perf_counter())

    fit = {"neuralforecast": fit_neuralforecast, "darts": fit_darts}[spec["library"]]
    values = np.load(spec["values"])["values"].astype(np.float32)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = {"max_steps": spec["steps"], "accelerator": "auto", "callbacks": [Clock()], **quiet}
    best = None
    for threads in spec["threads"]:
        torch.set_num_threads(threads)
        ends.clear()
        begun = time.perf_counter()
        fit(spec, values, trainer)
        whole = time.perf_counter() - begun
        step = statistics.median(after - before for before, after in pairwise(ends))
        if best is None or step < best["seconds_a_step"]:
            rest = whole - spec["steps"] * step
            best = {"seconds_a_step": step, "seconds_besides": rest, "timed": len(ends) - 1, "threads": threads}
    print(json.dumps(best))


def fit_neuralforecast(spec: dict, values, trainer: dict) -> None:
    """Fit one model to one series: the last column from all columns. trainer: settings of Lightning's."""
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    names = [f"past{i}" for i in range(values.shape[1] - 1)]
    frame = pd.DataFrame(values, columns=[*names, "y"])
    frame["unique_id"] = "a"
    frame["ds"] = pd.date_range("2025-01-01", periods=len(frame), freq="15min")
    kind = {"gru": models.GRU, "lstm": models.LSTM, "nlinear": models.NLinear, "dlinear": models.DLinear}[spec["model"]]
    shape = {}
    if spec["model"] in ("gru", "lstm"):
        shape = {"encoder_hidden_size": spec["width"], "encoder_n_layers": spec["layers"]}
        shape |= {"hist_exog_list": names} if names else {}
    model = kind(
        h=spec["horizon"],
        input_size=spec["context"],
        batch_size=1,
        windows_batch_size=spec["batch"],
        learning_rate=spec["learning_rate"],
        scaler_type="identity",
        **trainer,
        **shape,
    )
    NeuralForecast(models=[model], freq="15min").fit(frame)


def fit_darts(spec: dict, values, trainer: dict) -> None:
    """Fit one model to one series: the last column from all columns."""
    from darts import TimeSeries
    from darts.models import BlockRNNModel, DLinearModel, NLinearModel

    target = TimeSeries.from_values(values[:, -1:])
    past = TimeSeries.from_values(values[:, :-1]) if values.shape[1] > 1 else None
    shared = {
        "input_chunk_length": spec["context"],
        "output_chunk_length": spec["horizon"],
        "batch_size": spec["batch"],
        "n_epochs": 10**6,
        "optimizer_kwargs": {"lr": spec["learning_rate"]},
        "pl_trainer_kwargs": trainer,
    }
    if spec["model"] in ("gru", "lstm"):
        shape = {"model": spec["model"].upper(), "hidden_dim": spec["width"], "n_rnn_layers": spec["layers"]}
        model = BlockRNNModel(**shape, **shared)
    else:
        model = {"nlinear": NLinearModel, "dlinear": DLinearModel}[spec["model"]](**shared)
    model.fit(target, past_covariates=past)


if __name__ == "__main__":
    main()

"""The audit: is there a leak, and do the verdicts say what they should?"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpbkit.cli.command import (
    Command,
    add_features,
    as_json,
    experiment_of,
    merge_settings,
    name_bars,
    show,
    status_line,
    trust_code,
    vary_as_told,
    which_bars,
    which_rows,
    which_settings,
    which_source,
)
from cpbkit.config.experiment import Experiment
from cpbkit.config.own import require_consent
from cpbkit.config.presets import find_preset

if TYPE_CHECKING:  # pandas takes its time to load
    import pandas as pd

    from cpbkit.data.klines import Klines
    from cpbkit.data.traces import Trace
    from cpbkit.runs.folder import RunFolder
    from cpbkit.windows.series import Table


@click.command(
    cls=Command,
    examples=(
        "cpbkit audit runs/first --symbols BTC --epochs 3",
        "cpbkit audit --source synthetic --start 2025-01-01 --end 2025-03-31 --epochs 3 --placebos 5",
        "cpbkit audit --table load.csv --set targets=load --set context=96 --epochs 3",
        "cpbkit audit --calibration",
        "cpbkit audit --inject",
    ),
)
@click.argument("folder", metavar="[RUN]", required=False, type=click.Path(file_okay=False))
@which_settings
@which_source
@which_bars
@click.option("--table", metavar="FILE", type=click.Path(dir_okay=False), help="A table of your own, any columns.")
@which_rows
@click.option("--placebos", type=click.IntRange(1), default=20, show_default=True, help="Series with nothing to find.")
@click.option("--calibration", is_flag=True, help="Only judge series whose answer is known: size, coverage, power.")
@click.option("--inject", is_flag=True, help="Plant known leaks and sicknesses, and say whether they are caught.")
@trust_code
@as_json
def audit(
    folder, table, time, drop_missing, slide_over_gaps, placebos, calibration, inject, trust_code, as_json, **given
):
    """Look for leaks: does anything on the way of the data know the future?

    The whole way from bars to verdicts is run with futures replaced by garbage, on series without anything to find,
    and on series where everything can be found. Trains a model anew each time, so take few epochs. Settings and bars
    are those of the RUN, if one is named, and else of the preset; of the series the first is taken, unless some are
    named. A RUN on a table needs it again, --table. Exit code 0 only when nothing failed.
    """
    import pandas as pd

    from cpbkit.cli.runs import open_own
    from cpbkit.data.load import load_klines
    from cpbkit.data.tables import read_table
    from cpbkit.evaluation.backtest import refit
    from cpbkit.evaluation.calibration import calibrate
    from cpbkit.evaluation.leakage import audit, check_calibration, check_overfit, check_promises
    from cpbkit.runs.folder import RunFolder
    from cpbkit.windows.series import to_series

    if bool(folder or table) + calibration + inject > 1:
        raise click.UsageError("--calibration and --inject bring series of their own; give one of them, and no run")
    found = {}
    if calibration:
        with status_line() as say:
            say("judging 40 random walks and 40 series that can be forecast")
            found["calibration"] = check_calibration()
            cells = []
            for cell in calibrate():
                say(f"judging runs of 40: {cell.market}, {cell.horizon} bars ahead, {cell.windows} windows")
                cells.append(cell)
            found["size, coverage and power"] = check_promises(cells)
    elif inject:
        from cpbkit.runs.planted import plant_leaks, plant_sicknesses

        with status_line() as say:
            say("planting leaks")
            found["planted leaks"] = plant_leaks()
            say("planting sicknesses")
            found["planted sicknesses"] = plant_sicknesses()
    else:
        data: Mapping[str, Klines | Trace | Table]
        if table:
            frame = read_table(table, time)
            frame = frame.dropna() if drop_missing else frame
            frame = frame.reset_index(drop=True) if slide_over_gaps else frame
            experiment, own = _of_table(folder, trust_code, Path(table).name.partition(".")[0], frame, **given)
            data = {own.name: own}
        with status_line() as say:
            if not table:
                experiment, bars = open_own(_experiment(folder, trust_code, **given))
                data = (bars or load_klines)(experiment, say)
            wanted = list(data) if given["symbols"] or given["intervals"] else list(data)[:1]
            for name in wanted:
                one = data[name]
                say(f"auditing {name}: {placebos + 6} trainings")
                one_batch = check_overfit(experiment, to_series(one, experiment.task))
                leaks = audit(one, experiment.task, refit(experiment), model=experiment.model.name, placebos=placebos)
                found[name] = [*leaks, one_batch]
    document = {name: [dataclasses.asdict(finding) for finding in findings] for name, findings in found.items()}
    if folder:
        RunFolder(folder).keep_audit(document)

    def text() -> str:
        tables = {name: pd.DataFrame(findings).to_string(index=False) for name, findings in found.items()}
        return "\n\n".join(f"{name}\n{table}" for name, table in tables.items())

    show(document, as_json, text)
    if any(finding.verdict == "FAIL" for findings in found.values() for finding in findings):
        raise click.exceptions.Exit(1)


def _open_run(folder: str, trust_code: bool) -> "RunFolder":
    from cpbkit.runs.folder import RunFolder

    source = click.get_current_context().get_parameter_source("preset")
    if source is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError(f"the settings are those of {folder}; leave out --preset, or the run")
    run = RunFolder(folder)
    require_consent(run.experiment.own_parts, trust_code, folder, run.experiment.pretrained)
    return run


def _of_table(
    folder: str | None,
    trust_code: bool,
    name: str,
    frame: "pd.DataFrame",
    preset: str,
    settings: dict,
    features: tuple[str, ...] | None = None,
    epochs: int | None = None,
    search: tuple | None = None,
    **bars,
) -> "tuple[Experiment, Table]":
    """Return the experiment on a table, and the table; of a run with one series that must be it, whatever its name."""
    from cpbkit.runs.table import check_table, suit_rate, suit_tables
    from cpbkit.windows.series import Table

    if wrong := [option for option, value in bars.items() if value is not None]:
        raise click.UsageError(f"--table brings all rows there are; leave out --{wrong[0]}")
    told = merge_settings(settings, epochs=epochs, search=search)
    if folder is None:
        experiment = vary_as_told(suit_rate(find_preset(preset), told), suit_tables({name: frame}, told))
    else:
        run = _open_run(folder, trust_code)
        name = run.experiment.series[0] if len(run.experiment.series) == 1 else name
        check_table(run, Table(name, frame))
        experiment = vary_as_told(run.experiment, {"series": (name,), "symbols": (name,)} | told)
    return add_features(experiment, features), Table(name, frame)


def _experiment(
    folder: str | None, trust_code: bool, preset: str, settings: dict, features: tuple[str, ...] | None = None, **given
) -> Experiment:
    first: dict[str, tuple[str, ...]]
    if folder is None:
        first = {"symbols": ("BTCUSDT",), "intervals": ("1h",)}
        return experiment_of(preset, first | merge_settings(settings, **name_bars(**given)), features)
    run = _open_run(folder, trust_code).experiment
    first = {"symbols": run.data.symbols[:1], "intervals": run.data.intervals[:1]}
    return add_features(vary_as_told(run, first | merge_settings(settings, **name_bars(**given))), features)

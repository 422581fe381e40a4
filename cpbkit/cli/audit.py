"""The audit: is there a leak, and do the verdicts say what they should?"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpbkit.cli.command import add_features, make_command, merge_settings, settle_as_told, show, status_line
from cpbkit.cli.options import as_json, trust_code, which_bars, which_rows, which_settings, which_source
from cpbkit.config.experiment import vary
from cpbkit.config.own import require_consent
from cpbkit.config.presets import find_preset

if TYPE_CHECKING:  # pandas takes its time to load
    import pandas as pd

    from cpbkit.api import Retraining


@make_command(
    "cpbkit audit runs/first --symbols BTC --epochs 3",
    "cpbkit audit --source synthetic --start 2025-01-01 --end 2025-03-31 --epochs 3 --placebos 5",
    "cpbkit audit --table load.csv --set targets=load --set context=96 --epochs 3",
    "cpbkit audit --calibration",
    "cpbkit audit --inject",
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
    from cpbkit.data.tables import read_table
    from cpbkit.evaluation.poison import Findings
    from cpbkit.runs.folder import RunFolder

    if bool(folder or table) + calibration + inject > 1:
        raise click.UsageError("--calibration and --inject bring series of their own; give one of them, and no run")
    found: dict[str, Findings] = {}
    if calibration:
        from cpbkit.evaluation.calibration import calibrate
        from cpbkit.evaluation.leakage import check_calibration, check_promises

        with status_line() as say:
            say("judging 40 random walks and 40 series that can be forecast")
            found["calibration"] = Findings(check_calibration())
            cells = []
            for cell in calibrate():
                say(f"judging runs of 40: {cell.market}, {cell.horizon} bars ahead, {cell.windows} windows")
                cells.append(cell)
            found["size, coverage and power"] = Findings(check_promises(cells))
    elif inject:
        from cpbkit.runs.planted import plant_leaks, plant_sicknesses

        with status_line() as say:
            say("planting leaks")
            found["planted leaks"] = Findings(plant_leaks())
            say("planting sicknesses")
            found["planted sicknesses"] = Findings(plant_sicknesses())
    else:
        if not table and (time or drop_missing or slide_over_gaps):
            raise click.UsageError("--time, --drop-missing and --slide-over-gaps are of a table; name it: --table FILE")
        frame = read_table(table, time) if table else None
        if frame is not None:
            frame = frame.dropna() if drop_missing else frame
            frame = frame.reset_index(drop=True) if slide_over_gaps else frame
        retrainings = _choose(folder, trust_code, Path(table or "").name.partition(".")[0], frame, **given)
        with status_line() as say:
            for one in retrainings:
                found[one.series] = one.audit(placebos, say)
    document = {name: findings.to_dict(orient="records") for name, findings in found.items()}
    if folder:
        RunFolder(folder).keep_audit(document)
    failed = any(finding["verdict"] == "FAIL" for findings in document.values() for finding in findings)
    told = (f"{name}\n{findings}" for name, findings in found.items())
    show(document, as_json, lambda: "\n\n".join(told), failed)


def _choose(
    folder: str | None,
    trust_code: bool,
    name: str,
    frame: "pd.DataFrame | None",
    preset: str,
    settings: dict,
    features: tuple[str, ...] | None,
    epochs: int | None,
    search: tuple | None,
    **bars,
) -> "list[Retraining]":
    """Return what is to be audited: a table, or the bars of the series that are named, or of the first."""
    from cpbkit.api import Retraining, open_run

    if frame is not None and (wrong := [option for option, value in bars.items() if value is not None]):
        raise click.UsageError(f"--table brings all rows there are; leave out --{wrong[0]}")
    told = {"epochs": epochs, "search": search}
    base = find_preset(preset)
    first: dict[str, tuple[str, ...]] = {"symbols": ("BTCUSDT",), "intervals": ("1h",)}
    if folder:
        source = click.get_current_context().get_parameter_source("preset")
        if source is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"the settings are those of {folder}; leave out --preset, or the run")
        run = open_run(folder, trust_code)
        base = run.experiment
        first = {"symbols": base.data.symbols[:1], "intervals": base.data.intervals[:1]}
        require_consent(base.own_parts, trust_code, folder, base.pretrained)
        if frame is not None:
            name = run.series[0] if len(run.series) == 1 else name
            one = run.retrain(name, data={name: frame}, **merge_settings(settings, **told))
            return [dataclasses.replace(one, experiment=add_features(one.experiment, features))]
    if frame is None:
        base = vary(base, **first)
    settled = settle_as_told(base, settings, features, None if frame is None else {name: frame}, **told, **bars)
    with status_line() as say:
        found = settled.bars(settled.experiment, say)
    wanted = list(found) if bars["symbols"] or bars["intervals"] else list(found)[:1]
    return [Retraining(name, settled.experiment, found[name]) for name in wanted]

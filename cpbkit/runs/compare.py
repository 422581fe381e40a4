"""Several runs side by side: which is better, which only seems so, and whose model to take for each series."""

import dataclasses
from collections.abc import Mapping, Sequence

import pandas as pd

from cpbkit.config.experiment import difference
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.pooled import compare_pairs, compare_runs, gather
from cpbkit.evaluation.results import MADE_UP, ResultLine, is_synthetic
from cpbkit.evaluation.verdicts import judgements, seed_spread, verdict_table
from cpbkit.runs.folder import RunFolder

# What decides a validation loss besides the model: where one differs, losses of two runs do not compare.
VALIDATED = ("horizon", "targets", "target_weights", "target_scale", "loss", "train", "validation")

# What decides which windows a model is judged on, and what of them.
JUDGED = {f"task.{name}" for name in ("horizon", "targets", "train", "validation", "purge", "context")}
JUDGED |= {"training.folds", *(f"data.{name}" for name in ("source", "market", "files", "start", "end", "venue"))}


def compare(runs: Mapping[str, RunFolder]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame, tuple]:
    """Return what is told of runs by name: runs, pairs, the best of each series, the luck of seeds, and notes.

    Errors: CpbkitError for runs that are the same, or were not judged on the same windows.
    """
    if len(runs) < 2:
        raise CpbkitError("a comparison takes two runs or more")
    results = {name: [line for line in run.results() if line.status == "done"] for name, run in runs.items()}
    if empty := [name for name, lines in results.items() if not lines]:
        raise CpbkitError(f"{empty[0]} has no finished series yet, of {len(runs[empty[0]].experiment.series)}")
    first, *others = runs.values()
    changes = [difference(first.settled, run.settled) for run in others]
    if not all(changes):
        raise CpbkitError(f"runs to compare must differ in a setting; got {', '.join(runs)} with the same ones")
    changed = {line.partition(":")[0] for lines in changes for line in lines}
    only_seeds, notes = changed == {"training.seed"}, []
    losses = {name: gather([line.series for line in results[name]], run.losses)[0] for name, run in runs.items()}
    heads = [head for head in losses[next(iter(runs))] if all(head in found for found in losses.values())]
    if not heads and not only_seeds:
        raise CpbkitError("runs to compare must have kept the losses of a head that they share; these have not")
    by_head = {head: {name: found[head] for name, found in losses.items()} for head in heads}
    try:
        tables = [
            [each(parts).assign(head=head) for head, parts in by_head.items()] for each in (compare_runs, compare_pairs)
        ]
    except CpbkitError as error:
        lines = dict.fromkeys(line for each in changes for line in each if line.partition(":")[0] in JUDGED)
        if not lines:
            raise
        then = "Sweep one anew with these as the other has them"
        raise CpbkitError(f"{error}. The runs differ in {'; '.join(lines)}. {then}") from None
    table, pairs = (pd.concat(one, ignore_index=True) if one else pd.DataFrame() for one in tables)
    if odd := sorted({f"task.{name}" for name in VALIDATED} & changed):
        notes.append(f"No best model of each series: the runs were validated otherwise ({', '.join(odd)})")
    notes += [MADE_UP] * any(map(is_synthetic, results.values()))
    best = pd.DataFrame() if odd else _best(results)
    seeds = seed_spread(map(judgements, results.values())) if only_seeds else pd.DataFrame()
    return table, pairs, best, seeds, tuple(notes)


def _best(results: Mapping[str, Sequence[ResultLine]]) -> pd.DataFrame:
    """Return for each series the run that validation chooses, and what its model then did in test: its verdict.

    Validation losses are in units of persistence's, which differ in scale from run to run.
    """
    chosen: dict[str, tuple[float, str, ResultLine]] = {}
    for name, lines in results.items():
        for line in lines:
            losses = [loss for loss in line.curve.get("validation", ()) if loss is not None]
            if losses and (naive := line.persistence.get("validation", 0.0)) > 0:
                loss = min(losses) / naive
                if line.series not in chosen or loss < chosen[line.series][0]:
                    chosen[line.series] = loss, name, dataclasses.replace(line, before={})
    if not chosen:
        return pd.DataFrame()
    table = verdict_table(judgements(line for _, _, line in chosen.values()))
    table.insert(1, "run", table["series"].map({series: name for series, (_, name, _) in chosen.items()}))
    table.insert(2, "validation", table["series"].map({series: loss for series, (loss, _, _) in chosen.items()}))
    return table

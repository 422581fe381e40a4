"""A run as a repository of the Hub: models one file each, what they are, and what may be said of them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData, SpaceCardData
from huggingface_hub.utils import yaml_dump

from cpbkit import __version__, atomic, foreign
from cpbkit.config.experiment import from_dict, to_json, vary
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.verdicts import CORRECTED, judgements, say_table, verdict_table
from cpbkit.hub.client import HubError, ask, connect, read
from cpbkit.models import zero_shot
from cpbkit.quantities import counted
from cpbkit.runs.folder import AUDIT, RunFolder
from cpbkit.runs.settle import Bars
from cpbkit.runs.sweep import fingerprint
from cpbkit.runs.trained import TrainedModel
from cpbkit.training import checkpoint
from cpbkit.views.report import OWN, SKILL, say_source, sentences
from cpbkit.views.verdict import verdict_figure

INDEX, FORMAT, MAX_INDEX = "cpbkit.json", 1, 1_000_000  # bytes
LIMITS = """Prices are close to a random walk: a model that ties a naive forecast has no edge, and one that beat it in
its test split may not do so again. This is research, no advice, and nothing here was tested by trading: no costs, no
slippage. The forecasts hold for the venue, the coins and the bar lengths named here alone."""
LIMITS_OF_TABLES = """A model that ties a naive forecast has no edge, and one that beat it in its test split may not do
so again. The forecasts hold for the table that it was trained on, and for rows that go on as they did."""


@dataclasses.dataclass(frozen=True)
class Published:
    """Where a run was published."""

    repo: str  # user/name
    url: str
    commit: str

    def __str__(self) -> str:
        return self.url


def write_repository(folder: str | os.PathLike, repo: str, out: str | os.PathLike) -> Path:
    """Write what is published of a run into a new folder, and return it: never bars, only models and their figures.

    Errors: HubError for synthetic data, a run without a model, own code, or a folder that is there.
    """
    run, out = RunFolder(folder), Path(out)
    experiment, results = run.experiment, publishable(run, out)
    models, audit = run.models(), run.audit()
    if lost := [line.series for line in results if line.series not in models]:
        raise HubError(f"the model of {lost[0]} is lost; the command that swept {run.folder} trains it anew")
    paths: dict[str, str] = {}  # never one of this machine
    if experiment.data.files:
        paths["files"] = Path(experiment.data.files).name or "bars"
    if experiment.task.zero_shot and zero_shot.is_local(experiment.task.zero_shot):
        paths["zero_shot"] = zero_shot.name_of(experiment.task.zero_shot)
    experiment = vary(experiment, **paths)
    (out / "models").mkdir(parents=True, exist_ok=True)
    names = [line.series for line in results]
    sizes = {}
    for name in names:
        content = models[name]
        if paths:
            weights, about = checkpoint.load(content)
            own = vary(from_dict(about["experiment"]), **paths)
            about["experiment"] = dataclasses.asdict(own)
            content = checkpoint.save(weights, about)
        atomic.write_bytes(out / "models" / f"{name}.safetensors", content)
        sizes[name] = hashlib.sha256(content).hexdigest()
    kept = [dataclasses.replace(line, curve={}, mode="", seconds=0.0).to_json() for line in results]
    atomic.write_bytes(out / "results.jsonl", "".join(f"{line}\n" for line in kept).encode())
    atomic.write_bytes(out / "experiment.json", to_json(experiment).encode())
    index = {"format": FORMAT, "cpbkit": __version__, "run": run_id(folder), "models": sizes}
    if audit:
        text = json.dumps(audit, indent=2).encode()
        atomic.write_bytes(out / AUDIT, text)
        index["audit"] = hashlib.sha256(text).hexdigest()
    (out / ".eval_results").mkdir()
    atomic.write_bytes(out / ".eval_results" / "cpbkit.yaml", yaml_dump(_entries(repo, experiment, results)).encode())
    atomic.write_bytes(out / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    atomic.write_bytes(out / "verdicts.png", verdict_figure(results).png())
    atomic.write_bytes(out / "README.md", str(_card(repo, experiment, results, audit, _say(run, results))).encode())
    return out


def _say(run: RunFolder, results: list[ResultLine]) -> str:
    """List what may be said of all models."""
    by_head = sentences(run, results, judgements(results))
    return "\n".join(f"- {line}" for lines in by_head.values() for line in lines)


def publishable(run: RunFolder, out: Path) -> list[ResultLine]:
    """Return the lines of the finished models of a run. Errors: HubError where they or the folder may not be used."""
    results = [dataclasses.replace(line, before={}) for line in run.results() if line.status == "done"]
    if not results:
        raise HubError(f"{run.folder} has no finished model to publish")
    if made_up := [line.series for line in results if line.synthetic]:
        raise HubError(f"synthetic data cannot be published; {run.folder} has {len(made_up)} such series")
    if run.experiment.own_parts:
        raise HubError(f"own code cannot be published with a model: {', '.join(run.experiment.own_parts)}")
    if (place := run.experiment.pretrained) and zero_shot.is_local(place):
        raise HubError(
            f"others cannot load a foundation model of this machine, {place}; take one of the Hub by its name"
        )
    if failed := run.failed_checks():
        raise HubError(f"a run whose audit failed cannot be published; {run.folder / AUDIT} says why ({failed[0]})")
    if out.exists() and any(out.iterdir()):
        raise HubError(f"{out} must be a new or an empty folder")
    return results


def write_space(
    folder: str | os.PathLike,
    models: Iterable[TrainedModel],
    repo: str,
    out: str | Path,
    bars: Mapping[str, Bars] | None,
) -> Path:
    """Write the page of a run as a static Space into a new folder, and return it: forecasts and errors, never bars.

    bars: by series, to forecast from; None fetches the newest. Errors: HubError as of `write_repository`.
    """
    from cpbkit.views.site import write_page

    run, out = RunFolder(folder), Path(out)
    said = _say(run, publishable(run, out))
    write_page(folder, models, out, bars, public=True)
    index = {"format": FORMAT, "cpbkit": __version__, "run": run_id(folder)}
    atomic.write_bytes(out / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    name = repo.rpartition("/")[2]
    data = SpaceCardData(title=name, sdk="static", app_file="index.html", license="mit", tags=["cpbkit"])
    text = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{said}\n\n{LIMITS}\n"
    atomic.write_bytes(out / "README.md", text.encode())
    return out


def run_id(folder: str | os.PathLike) -> str:
    """Return what tells a run from others: a fingerprint of its settings."""
    return hashlib.sha256(to_json(RunFolder(folder).experiment).encode()).hexdigest()[:16]


def _entries(repo: str, experiment, results: list[ResultLine]) -> list[dict]:
    """Return the results in the Hub's format for benchmarks, whose data set here is the run's own record."""
    dates = {line.series: line.dates["test"] for line in results}
    return [
        {
            "dataset": {"id": f"{repo}-record", "task_id": f"{row['series']}-{row['head']}"},
            "value": round(row["skill %"], 4),
            "notes": f"skill in %, {row['verdict']} {row['best baseline']}; the test split of "
            f"{say_source(experiment.data)}, {' to '.join(dates[row['series']])}",
        }
        for row in verdict_table(judgements(results)).to_dict("records")
    ]


def _card(repo: str, experiment, results: list[ResultLine], audit: dict, said: str) -> ModelCard:
    table, test = verdict_table(judgements(results)), {line.series: line.dates["test"] for line in results}
    is_table = experiment.data.source == "table"
    data = ModelCardData(
        license="mit",
        library_name="cpbkit",
        pipeline_tag="time-series-forecasting",
        tags=["time-series-forecasting", *["cryptocurrency"] * (not is_table), experiment.preset],
        model_name=repo.rpartition("/")[2],
        eval_results=[_eval_result(experiment, row, test[row["series"]]) for row in table.to_dict("records")],
    )
    columns = ["series", "head", "verdict", "skill %", "95 % interval", "p", "against", "RMSE", "windows"]
    cells = [columns, ["---"] * len(columns), *say_table(table)[columns].to_numpy().tolist()]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    dates, task = results[0].dates, experiment.task
    audited = "No audit for leaks of this run is known."
    if audit:
        checks = counted(sum(map(len, audit.values())), "check")
        audited = f"An audit for leaks of {', '.join(audit)} made {checks}, of which none failed (`{AUDIT}`)."
    text = f"""# {repo.rpartition("/")[2]}

{said}

![Skill of each model against the best naive forecast, with its 95 % interval](verdicts.png)

```python
import cpbkit as cpb

print(cpb.load("{repo}")["{results[0].series}"].forecast({"frame" if is_table else ""}))
```

{counted(len(results), "model")} of preset `{experiment.preset}`: {task.context} bars in, {task.horizon} out, trained on
{dates["train"][0]} to {dates["train"][1]} and tested on {dates["test"][0]} to {dates["test"][1]} (UTC), of
{say_source(experiment.data)}. Each is held against the best naive forecast on its test split. {audited}

## Use and limits

{LIMITS_OF_TABLES if is_table else LIMITS}

## Verdicts

{chr(10).join(rows)}

{SKILL} So a model whose RMSE is above that of the naive forecast may have a skill above 0.

{CORRECTED}. A head is a target, or a group of targets, that is judged together.

`results.jsonl` has all figures, and for each series its Passport: the files its bars came from, with their SHA-256.
Made with cpbkit {__version__}.
"""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _eval_result(experiment, row: dict, test: list[str]) -> EvalResult:
    data, unit = experiment.data, f", {row['unit']}" if row["unit"] else ""
    return EvalResult(
        task_type="time-series-forecasting",
        dataset_type=data.source if data.source in OWN else f"{data.source}-{data.market}",
        dataset_name=row["series"],
        dataset_config=row["series"],  # what differs here is an entry of its own; the name alone is not looked at
        dataset_split="test",
        dataset_args={"start": test[0], "end": test[1]},
        metric_type="rmse",
        metric_name=f"RMSE of the {row['head']}{unit} ({row['verdict']} {row['best baseline']})",
        metric_value=round(float(row["rmse"]), 6),
    )


def publish(
    folder: str | os.PathLike,
    repo: str,
    content: str | Path,
    public: bool = False,
    kind: Literal["model", "space"] = "model",
    collection: str = "",
) -> Published:
    """Upload what `write_repository` or `write_space` wrote, as one commit: nothing is ever seen half published.

    The repository is made private unless `public`. A refit may follow the run before it. collection: the title of one,
    which is made where it is not there, for the repositories of several presets.
    Errors: HubError with the remedy; for a repository of another run.
    """
    api, what = connect(repo, write=True), f"publishing to {repo}"
    is_new = not ask(what, lambda: api.repo_exists(repo, repo_type=kind))
    sdk = "static" if kind == "space" else None
    ask(what, lambda: api.create_repo(repo, private=not public, exist_ok=True, repo_type=kind, space_sdk=sdk))
    there = ask(what, lambda: api.list_repo_files(repo, repo_type=kind))
    if INDEX in there:
        index = foreign.parse(read(api, repo, INDEX, "main", MAX_INDEX, kind), {"run?": str, "models?": {"*": str}})
        parent = RunFolder(folder).experiment.training.parent
        follows = parent and fingerprint(index.get("models", {})) == parent
        if index.get("run") != run_id(folder) and not follows:
            raise HubError(f"{repo} holds another run; publish to a new name, or delete it on the Hub first")
    elif not is_new and set(there) - {".gitattributes"}:  # the Hub itself puts a greeting into a new Space
        raise HubError(f"{repo} holds other files than a run of cpbkit; publish to a new name")
    message = f"Publish with cpbkit {__version__}"
    info = ask(
        what, lambda: api.upload_folder(repo_id=repo, folder_path=content, commit_message=message, repo_type=kind)
    )
    if collection:
        what, owner = f"adding {repo} to the collection {collection!r}", repo.partition("/")[0]
        made = ask(what, lambda: api.create_collection(collection, namespace=owner, private=not public, exists_ok=True))
        ask(what, lambda: api.add_collection_item(made.slug, repo, kind, exists_ok=True))
    return Published(repo, f"{api.endpoint}/{'spaces/' * (kind == 'space')}{repo}", info.oid)

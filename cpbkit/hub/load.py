"""Models of a repository on the Hub: each is downloaded when it is asked for, checked, and never executed."""

import functools
import hashlib
import re
from collections.abc import Iterator

from cpbkit import foreign
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.verdicts import meanings
from cpbkit.foreign import Damaged
from cpbkit.hub.client import HubError, ask, connect, read
from cpbkit.hub.publish import FORMAT, INDEX, MAX_INDEX
from cpbkit.runs.trained import TrainedModel

MAX_LEDGER, MAX_MODEL = 100_000_000, 500_000_000  # bytes of a file that are read


class Repository:
    """The models of a published run, by series name."""

    def __init__(self, repo: str, revision: str | None = None, trust_code: bool = False):
        self.repo, self._api, self._trust_code = repo, connect(repo), trust_code
        # One commit for all files: another that comes between two downloads does not mix with it.
        found = ask(f"loading {repo}", lambda: self._api.model_info(repo, revision=revision))
        self.revision = str(found.sha)
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise HubError(f"loading {repo}: a commit has 40 hexadecimal digits; got {self.revision[:60]!r}")
        if INDEX not in {file.rfilename for file in found.siblings or ()}:
            raise HubError(f"{repo} holds no run of cpbkit; name one that `cpbkit publish` has made")
        try:
            index = foreign.parse(self._get(INDEX, MAX_INDEX), limit=MAX_INDEX)
        except Damaged as error:
            raise HubError(f"{INDEX} of {repo} cannot be read: {error}") from None
        if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("models"), dict):
            raise HubError(f"{repo} holds no models that this version of cpbkit reads (format {FORMAT})")
        self._sha256 = index["models"]
        if wrong := [name for name in self._sha256 if not re.fullmatch(r"\w{1,60}", name)]:
            raise HubError(f"{repo} names a series {wrong[0][:60]!r}, which is no name of one")

    def __repr__(self) -> str:
        return f"Repository({self.repo!r}, {self.revision[:8]}): {len(self._sha256)} models"

    def __iter__(self) -> Iterator[str]:
        return iter(self._sha256)

    def __getitem__(self, series: str) -> TrainedModel:
        """Return the trained model of a series, downloaded alone. Errors: HubError, RunError."""
        if series not in self._sha256:
            raise HubError(f"{self.repo} has no model of {series}; it has {', '.join(list(self._sha256)[:40])}")
        content = self._get(f"models/{series}.safetensors", MAX_MODEL)
        if hashlib.sha256(content).hexdigest() != self._sha256[series]:
            raise HubError(f"the model of {series} in {self.repo} is not the one that was published")
        model = TrainedModel.read(content, self._meanings.get(series, ""), self._trust_code)
        if model.series != series:
            raise HubError(f"{self.repo} calls a model of {model.series} one of {series}")
        return model

    @functools.cached_property
    def _meanings(self) -> dict[str, str]:
        text = self._get("results.jsonl", MAX_LEDGER).decode(errors="replace")
        try:
            return meanings(map(ResultLine.from_json, text.splitlines()))
        except CpbkitError as error:
            raise HubError(f"results.jsonl of {self.repo} cannot be read: {error}") from None

    def _get(self, name: str, limit: int) -> bytes:
        return read(self._api, self.repo, name, self.revision, limit)


def load(repo: str, revision: str | None = None, trust_code: bool = False) -> Repository:
    """Open a published run: `load("user/name")["BTCUSDT_1h"].forecast()`.

    revision: a commit or tag; None takes the newest. Nothing that is downloaded is executed. trust_code: whether its
    models may run the own parts they name, from the current folder, and load the foundation model they name.
    Errors: HubError for a repository that is not there or holds no models.
    """
    return Repository(repo, revision, trust_code)

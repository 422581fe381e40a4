"""The Hub, spoken to through huggingface_hub: one token, one way to fail, and tries again where a try may help."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from cpbkit.errors import CpbkitError

TRIES = 5
PAUSE = 1.0  # s before the second try; doubled after each
BUSY = (408, 429, 500, 502, 503, 504)  # answers after which the same call may succeed
REMEDY = (
    "make one with the right to write at https://huggingface.co/settings/tokens, then `hf auth login`, or set HF_TOKEN "
    "(in Colab and Kaggle as a secret of that name)"
)
NETWORK = ("requests", "httpx")  # what the client speaks with: another library in each of its major versions
log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class HubError(CpbkitError):
    """The Hub, or a repository on it, that cannot be used as asked."""


class Missing(HubError):
    """A repository that is not there, or that the token may not see."""


class Conflict(HubError):
    """Another commit came first; what was to be written must be looked at again."""


def connect(repo: str, write: bool = False) -> HfApi:
    """Return the client with the token of the Hub's store, of the environment, of Colab's or Kaggle's secrets.

    Errors: HubError for what is no name of a repository, and where writing needs a token and there is none.
    """
    if not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", repo):
        raise HubError(f"a repository is named user/name; got {repo[:60]!r}")
    token = get_token() or _kaggle_secret()
    if write and not token:
        raise HubError(f"writing to {repo} needs a token: {REMEDY}")
    return HfApi(token=token)


def _kaggle_secret() -> str | None:
    """Return the secret HF_TOKEN of a Kaggle notebook, which the Hub's own client does not look for."""
    if "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        return None
    try:
        from kaggle_secrets import UserSecretsClient

        return UserSecretsClient().get_secret("HF_TOKEN")
    except Exception as error:  # its own exceptions have no common class; none is a reason to stop a download
        log.info("no Kaggle secret HF_TOKEN (%s)", type(error).__name__)
        return None


def ask(what: str, call: Callable[[], Answer]) -> Answer:
    """Return call(), tried again while the Hub is busy or out of reach.

    what: for the sentence, such as "publishing to me/forty". Errors: HubError with the remedy.
    """
    for attempt in range(1, TRIES + 1):
        try:
            with _without_bars():
                return call()
        except HFValidationError as error:
            raise HubError(f"{what}: a repository is named user/name; {error}") from None
        except (RepositoryNotFoundError, EntryNotFoundError) as error:
            if isinstance(error, LocalEntryNotFoundError):  # the Hub did not answer, and the cache has it not
                reason = "the Hub does not answer"
            else:
                kind = Missing if isinstance(error, RepositoryNotFoundError) else HubError
                raise kind(
                    f"{what}: it is not there, or it is private and the token may not see it; check the name, and who "
                    "is logged in (`hf auth whoami`)"
                ) from None
        except HfHubHTTPError as error:
            code = error.response.status_code if error.response is not None else 0
            if code in (401, 403):
                raise HubError(f"{what}: the token may not do this (HTTP {code}): {REMEDY}") from None
            if code == 412:
                raise Conflict(f"{what}: another commit came first") from None
            if code not in BUSY:
                raise HubError(f"{what}: the Hub answered HTTP {code}") from None
            reason = f"the Hub answered HTTP {code}"
        except Exception as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) else error  # of a file of an upload
            code = getattr(getattr(cause, "response", None), "status_code", 0)
            if not (isinstance(cause, OSError) or type(cause).__module__.startswith(NETWORK)) or code not in (0, *BUSY):
                if isinstance(error, ValueError | TypeError | KeyError | RecursionError):  # of what the answer holds
                    raise HubError(f"{what}: the Hub's answer cannot be read ({str(error)[:200]})") from None
                raise
            reason = f"the Hub answered HTTP {code}" if code else f"no connection to the Hub ({type(cause).__name__})"
        if attempt < TRIES:
            log.info("%s: %s; try %d of %d", what, reason, attempt, TRIES)
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise HubError(f"{what}: {reason}, {TRIES} times. What was there is as it was; the same call goes on")


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Let the client draw no bar per file: they are widgets, of which a saved notebook keeps the 0 % they began at."""
    wanted = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if wanted:
            enable_progress_bars()


def read(api: HfApi, repo: str, name: str, revision: str, limit: int, kind: str = "model") -> bytes:
    """Download one file of a commit. Errors: HubError for one that is not there, or larger than the limit in bytes."""
    what = f"loading {name} of {repo}"
    found = ask(what, lambda: api.get_paths_info(repo, [name], revision=revision, repo_type=kind))
    if not found:
        raise HubError(f"{what}: it is not there")
    if (size := getattr(found[0], "size", limit + 1)) > limit:
        raise HubError(f"{what}: it has {size:,} bytes, more than the {limit:,} that one may have")
    return Path(ask(what, lambda: api.hf_hub_download(repo, name, revision=revision, repo_type=kind))).read_bytes()

#!/bin/sh
# Set the project up and print the Python to use, the only line on stdout:  $(sh setup.sh) -m cpbkit demo
#
#   sh setup.sh          what the package needs
#   sh setup.sh dev      and what its tests need
#
# In Colab, in Kaggle and in an active environment that Python is used; elsewhere .venv here. A torch that is there is
# kept. Without one, CPBKIT_TORCH (anything pip installs) names what to take; else a machine without an NVIDIA driver
# gets the CPU build: PyTorch's own, or behind a mirror the newest that is marked +cpu there; where there is none, the
# default build, its size said first. Done once: a second call compares a stamp in .python and returns.
set -eu
cd "$(dirname "$0")"
extra=${1:-base}
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }
modern() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
has_torch() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }
# pip's own words are shown where it fails; it warns of much that is no concern of who reads this.
pip_or() { wrong=$1; shift; "$python" -m pip "$@" >"$log" 2>&1 || { cat "$log" >&2; fail "$wrong"; }; }
first_modern() { for p in "$@"; do if modern "$p"; then command -v "$p"; return; fi; done; }

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}${COLAB_RELEASE_TAG:-}${KAGGLE_KERNEL_RUN_TYPE:-}" ]; then
  own=""
  python=$(first_modern python python3)
  [ -n "$python" ] || fail "Python 3.10 or newer is needed; the active environment has none."
else
  own=yes
  python=$PWD/.venv/bin/python
fi

stamp=$(cat setup.sh setup.cfg requirements.txt pyproject.toml | cksum | tr ' ' -)
if modern "$python" && grep -qxF "$python $extra $stamp" .python 2>/dev/null; then
  echo "$python"
  exit
fi

start=$(date +%s)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$scratch/log

# The versions of torch for this Python and machine, the newest first, one per line; options go to pip.
list_torch() {
  "$python" -m pip index versions torch "$@" 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' | tr , '\n'
}

# pip with PyTorch's CPU index and no other place: options beside --index-url would only add to those of pip's
# configuration, whose certificates and proxy are kept.
cpu_only() (
  mkdir -p "$scratch/nothing"
  export PIP_EXTRA_INDEX_URL="$cpu_index" PIP_FIND_LINKS="$scratch/nothing"
  "$@" --index-url "$cpu_index"
)

# What pip would fetch for a requirement. Asked inside pip, so that the mirror's credentials hold; pip's own dry run
# fetches the files. fast-deps reads what a wheel needs without fetching it all.
ask_size() {
  "$python" - "$1" 2>/dev/null <<'EOF'
import contextlib, io, sys
from pip._internal.cli.main import main
from pip._internal.operations.prepare import RequirementPreparer

RequirementPreparer.prepare_linked_requirements_more  # another pip: stop here rather than fetch it all
sizes = []

def measure(self, requirements, *_, **__):
    links = {r.link.url_without_fragment for r in requirements if r.link and not r.satisfied_by}
    answers = [self._session.head(link, timeout=15, allow_redirects=True) for link in links]
    sizes.extend([int(a.headers["Content-Length"]) for a in answers if not a.raise_for_status()])  # all or none
    raise SystemExit

RequirementPreparer.prepare_linked_requirements_more = measure
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["install", "-q", "--no-input", "--use-feature=fast-deps", sys.argv[1]])
if sizes:
    print(f"{sum(sizes) / 1e6:,.0f} MB in {len(sizes)} files")
EOF
}

if [ "$own" ] && ! { modern "$python" && "$python" -m pip --version >/dev/null 2>&1; }; then
  base=$(first_modern python3 python3.14 python3.13 python3.12 python3.11 python3.10)
  [ -n "$base" ] || fail "Python 3.10 or newer is needed; none was found (Debian: apt-get install -y python3-venv)."
  site=""
  if has_torch "$base"; then site=--system-site-packages; fi
  say "making .venv with $("$base" --version)${site:+, which keeps the torch that is there}"
  "$base" -m venv --clear $site .venv >&2 || fail "no virtual environment could be made (Debian: apt-get install -y python3-venv)."
fi

if has_torch "$python"; then
  say "using the torch that is there"
elif [ -n "${CPBKIT_TORCH:-}" ]; then
  say "installing $CPBKIT_TORCH"
  # shellcheck disable=SC2086  # several words are allowed: a requirement and pip's options
  pip_or "CPBKIT_TORCH=$CPBKIT_TORCH could not be installed." install -q $CPBKIT_TORCH
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
  need=$(sed -n 's/^\(torch>=[0-9.]*\).*/\1/p' requirements.txt)
  # One try, as a blocked host answers at once. --no-deps: the rest comes from the ordinary index with the last step.
  if cpu=$(cpu_only list_torch --retries 0 --timeout 15 | head -1) && [ "$cpu" ]; then
    say "no NVIDIA driver: installing PyTorch's CPU build, torch $cpu"
    cpu_only pip_or "PyTorch's CPU index broke off; try again." install -q --no-deps "torch==$cpu" "$need"
  elif cpu=$(list_torch | grep '+cpu$' | head -1) && printf '%s\n' "${need#*>=}" "$cpu" | sort -VC; then
    say "no NVIDIA driver, and PyTorch's CPU index gave no torch: installing the CPU build that pip's index has, torch $cpu"
    pip_or "pip's index broke off; try again." install -q --no-deps "torch==$cpu"
  else
    say "no NVIDIA driver, but PyTorch's CPU index gave no torch, and pip's index has no CPU build for this Python"
    size=$(ask_size "$need" || true)
    say "installing torch's default build, ${size:-a size that could not be asked (several GB with CUDA)} to fetch;" \
      "CPBKIT_TORCH=/path/to/torch.whl names another"
  fi
else
  say "installing torch's default build"
fi

say "installing the requirements ($extra)"
target=.
[ "$extra" = base ] || target=".[$extra]"
pip_or "pip could not install them; its message is above." install -q -e "$target"
others=$(grep -vF "$python $extra " .python 2>/dev/null || true)
printf '%s\n' "$others" "$python $extra $stamp" >.python
say "done in $(($(date +%s) - start)) s"
echo "$python"

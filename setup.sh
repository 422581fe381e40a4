#!/bin/sh
# Set the project up and print the Python to use, the only line on stdout:  $(sh setup.sh) -m cpbkit demo
#
#   sh setup.sh          what the package needs
#   sh setup.sh dev      and what its tests need
#
# In Colab, in Kaggle and in an active environment that Python is used; elsewhere .venv here. A torch that is there is
# kept. Without one, CPBKIT_TORCH (anything pip installs) names what to take; else a machine without an NVIDIA driver
# gets the CPU build. Done once: a second call compares a stamp in .python and returns.
set -eu
cd "$(dirname "$0")"
extra=${1:-base}
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }
modern() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
has_torch() { "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }
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

if [ "$own" ] && ! { modern "$python" && "$python" -m pip --version >/dev/null 2>&1; }; then
  base=$(first_modern python3 python3.13 python3.12 python3.11 python3.10)
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
  "$python" -m pip install -q $CPBKIT_TORCH >&2 || fail "CPBKIT_TORCH=$CPBKIT_TORCH could not be installed."
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
  say "no NVIDIA driver: installing the CPU build of torch"
  # --no-deps: the rest comes from the ordinary index with the next step. One try: a blocked host answers at once.
  "$python" -m pip install -q --no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu \
    "$(sed -n 's/^\(torch>=[0-9.]*\).*/\1/p' requirements.txt)" >&2 ||
    fail "PyTorch's CPU index gave no torch. Name one, then try again: CPBKIT_TORCH=/path/to/torch.whl," \
      "or CPBKIT_TORCH=torch for the default build (on Linux several GB with CUDA)."
else
  say "installing torch's default build"
fi

say "installing the requirements ($extra)"
target=.
[ "$extra" = base ] || target=".[$extra]"
"$python" -m pip install -q -e "$target" >&2 || fail "pip could not install them; its message is above."
others=$(grep -vF "$python $extra " .python 2>/dev/null || true)
printf '%s\n' "$others" "$python $extra $stamp" >.python
say "done"
echo "$python"

"""What is installed, and how the set-up decides."""

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import make_market

SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")
SMALL_MARKET = ["BTCUSDT", "ETHUSDT"], ["1h"], "2025-03-01", "2025-03-31"
ADDRESS = SETTINGS["metadata"]["url"]
REQUIREMENTS = [
    line.partition("#")[::2] for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
]


def copy_of_the_project(folder):
    """Copy what a clone would hold; builds leave their litter there and not here."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_requirements_are_lower_bounds_with_a_reason():
    for requirement, reason in REQUIREMENTS:
        if requirement.strip():
            assert re.fullmatch(r"[A-Za-z0-9_-]+>=[0-9.]+", requirement.strip()), requirement
            assert reason.strip(), f"why {requirement.strip()}?"


def test_extras_have_no_ceiling_but_the_formatter():
    for name, text in SETTINGS["options.extras_require"].items():
        for requirement in text.split("\n"):
            assert not re.search(r"==|<|~=", requirement) or (name, requirement[:4]) == ("dev", "ruff")


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    project = copy_of_the_project(tmp_path / "project")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        project,
    ]
    subprocess.run(build, check=True, capture_output=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    assert names == {path.relative_to(project).as_posix() for path in (project / "cpbkit").rglob("*") if path.is_file()}
    needed = {name for name in fields.get_all("Requires-Dist") if "extra ==" not in name}
    assert needed == {requirement.strip() for requirement, _ in REQUIREMENTS if requirement.strip()}
    assert fields["Home-page"] == ADDRESS or any(ADDRESS in url for url in fields.get_all("Project-URL") or ())


@pytest.mark.slow
def test_installing_replaces_nothing_that_is_there(tmp_path):
    project = copy_of_the_project(tmp_path / "project")
    ask = [
        "install",
        "-q",
        "--dry-run",
        "--no-build-isolation",
        "--no-index",
        "--report",
        "-",
        f"cpbkit @ file://{project}",
    ]
    done = subprocess.run([sys.executable, "-m", "pip", *ask], check=True, capture_output=True, text=True)
    assert [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]] == ["cpbkit"]


def test_the_address_stands_in_one_place():
    """README and notebooks may repeat the repository's address, but only as setup.cfg has it."""
    path = ADDRESS.removeprefix("https://github.com/")
    for file in [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]:
        text = file.read_text(encoding="utf-8")
        for owner in re.findall(
            r"(?:github\.com|colab\.research\.google\.com/github|githubusercontent\.com)/([\w.-]+/[\w.-]+)",
            text,
        ):
            assert owner.removesuffix(".git").split("@")[0] == path, file.name
    for file in [*(ROOT / "cpbkit").rglob("*.py"), ROOT / "setup.sh", ROOT / "Makefile"]:
        assert ADDRESS not in file.read_text(encoding="utf-8"), f"{file.name}: read it from the metadata instead"


def test_every_path_of_the_readme_is_there():
    _, _, text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where things are")
    found = re.findall(r"^( {4,6})((?:[\w/]+(?:/|\.py) )+)", text, flags=re.MULTILINE)
    named = [("cpbkit/" if len(indent) > 4 else "") + path for indent, paths in found for path in paths.split()]
    assert {"notebooks/", "tests/", "cpbkit/errors.py", "cpbkit/indicators.py", "cpbkit/data/"} < set(named)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert len(named) == len(set(named))


@pytest.mark.slow
def test_the_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for a shorter preset, and the seeded market in place of the archive."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert lines.count("\n") - lines.count("\n\n") <= 10
    small = vary(PRESETS["quick"], symbols=("BTCUSDT", "ETHUSDT"), epochs=1, steps=5)
    monkeypatch.setitem(PRESETS, "quick", small)
    monkeypatch.setattr("cpbkit.runs.sweep.load_klines", lambda e, _: make_market(*SMALL_MARKET))
    monkeypatch.setattr(
        "cpbkit.runs.plan.count_cores", lambda: 1
    )  # a process of its own would not see the small preset
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert "BTCUSDT_1h" in capsys.readouterr().out and (tmp_path / "runs/first/report.html").exists()


@pytest.fixture
def machine(tmp_path):
    """A machine of shell stubs: `python3` makes environments whose pip writes down what it is asked for."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("setup.sh", "setup.cfg", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    stub = tmp_path / "stub"
    stub.mkdir()
    log = tmp_path / "pip.log"
    python = stub / "python3"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *find_spec*) [ -e {tmp_path}/torch ] ;;
  "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "$*" >>{log} ;;
  *--version*) echo "Python 3.12.0" ;;
  "-m pip"*) echo "$*" >>{log}; case "$*" in *--index-url*) exit ${{INDEX_ANSWERS:-0}} ;; esac ;;
esac
"""
    )
    python.chmod(0o755)
    (stub / "nvidia-smi").write_text("#!/bin/sh\nexit ${NO_DRIVER:-0}\n")
    (stub / "nvidia-smi").chmod(0o755)

    def set_up(*arguments, **environment):
        log.write_text("")
        done = subprocess.run(
            ["sh", "setup.sh", *arguments],
            cwd=project,
            capture_output=True,
            text=True,
            env={"PATH": f"{stub}:/usr/bin:/bin", "HOME": str(tmp_path), **environment},
        )
        return done, log.read_text()

    set_up.folder = tmp_path
    return set_up


def test_set_up_keeps_the_torch_that_is_there(machine):
    (machine.folder / "torch").touch()
    done, asked = machine(NO_DRIVER="1")
    assert done.returncode == 0 and "--system-site-packages" in asked
    assert "index-url" not in asked and "torch" not in asked


def test_set_up_takes_the_cpu_build_without_a_driver(machine):
    done, asked = machine(NO_DRIVER="1")
    assert done.returncode == 0
    assert re.search(r"install .*--retries 0 --index-url \S+/whl/cpu torch>=2", asked)


def test_set_up_takes_the_default_build_with_a_driver(machine):
    done, asked = machine()
    assert done.returncode == 0 and "index-url" not in asked and "install -q -e ." in asked


def test_set_up_takes_the_torch_that_is_named(machine):
    done, asked = machine(NO_DRIVER="1", CPBKIT_TORCH="torch==2.13.0 --no-cache-dir")
    assert done.returncode == 0 and "install -q torch==2.13.0 --no-cache-dir" in asked and "index-url" not in asked


def test_set_up_never_falls_back_to_cuda(machine):
    done, asked = machine(NO_DRIVER="1", INDEX_ANSWERS="1")
    assert done.returncode == 1 and done.stdout == ""
    assert "CPBKIT_TORCH" in done.stderr and "-e ." not in asked


def test_set_up_is_done_once(machine):
    first, _ = machine("dev")
    again, asked = machine("dev")
    assert again.stdout == first.stdout and asked == "" and again.stderr == ""
    more, asked = machine()
    assert "-e ." in asked and more.stdout == first.stdout


def test_set_up_uses_the_active_environment(machine):
    done, asked = machine(NO_DRIVER="1", VIRTUAL_ENV="/somewhere")
    assert done.stdout.strip() == str(machine.folder / "stub" / "python3") and "venv" not in asked


def test_set_up_says_when_python_is_too_old(machine):
    (machine.folder / "stub" / "python3").write_text("#!/bin/sh\nexit 1\n")
    for name in ("python", "python3.10", "python3.11", "python3.12", "python3.13"):
        shutil.copy(machine.folder / "stub" / "python3", machine.folder / "stub" / name)
    done, _ = machine()
    assert done.returncode == 1 and "Python 3.10 or newer" in done.stderr

"""What is installed, and how the set-up decides."""

import configparser
import email
import functools
import http.server
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from pathlib import Path

import pip
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


def test_extras_are_lower_bounds_with_a_reason():
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8").partition("[options.extras_require]")[2]
    for before, line in itertools.pairwise(text.partition("\ndev =")[0].splitlines()):
        if ">=" in line:
            assert before.strip().startswith("# "), f"why {line.strip()}?"


def test_extras_have_no_ceiling_but_what_the_gate_runs():
    for name, text in SETTINGS["options.extras_require"].items():
        for requirement in text.split("\n"):
            assert not re.search(r"==|<|~=", requirement) or (name == "dev" and requirement[:4] in ("ruff", "mypy"))


@pytest.mark.slow
def test_setup_looks_for_the_pythons_that_are_declared():
    declared = re.findall(r"Python :: (3\.\d+)", SETTINGS["metadata"]["classifiers"])
    looked_for = re.findall(
        r"python(3\.\d+)", (ROOT / "setup.sh").read_text(encoding="utf-8").partition("first_modern python3 ")[2]
    )
    assert sorted(looked_for[: len(declared)]) == sorted(declared)
    assert SETTINGS["options"]["python_requires"] == f">={min(declared, key=lambda name: int(name[2:]))}"


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
    """README and notebooks may link to the repository, but only to where setup.cfg has it."""
    path = ADDRESS.removeprefix("https://github.com/")
    for file in [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]:
        text = file.read_text(encoding="utf-8")
        for owner in re.findall(
            r"https://(?:github\.com|colab\.research\.google\.com/github|raw\.githubusercontent\.com)/([\w.-]+/[\w.-]+)",
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
def test_the_readme_in_chinese_has_the_same_commands():
    """Comments are translated, and what is not code."""

    def code(name):
        text, _, _ = (ROOT / name).read_text(encoding="utf-8").partition("## Where things are")
        blocks = re.findall(r"```python\n([\s\S]*?)```|((?:^    .*\n)+)", text, flags=re.MULTILINE)
        return [re.sub(r"\s+# .*", "", line) for block in blocks for line in "".join(block).splitlines()]

    english, chinese = code("README.md"), code("README.zh-TW.md")
    assert len(english) > 30 and chinese == english
    links = re.findall(r"\]\(([\w./-]+)(?:#[a-z-]+)?\)", (ROOT / "README.zh-TW.md").read_text(encoding="utf-8"))
    assert links and all((ROOT / link).exists() for link in links)


def test_the_lines_of_the_readme_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for a shorter preset, and the seeded market in place of the archive."""
    lines, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert lines.count("\n") - lines.count("\n\n") <= 10
    small = vary(PRESETS["quick"], symbols=("BTCUSDT", "ETHUSDT"), epochs=1, steps=5)
    monkeypatch.setitem(PRESETS, "quick", small)
    monkeypatch.setattr("cpbkit.runs.settle.load_klines", lambda *_: make_market(*SMALL_MARKET))
    monkeypatch.setattr("cpbkit.runs.plan.count_cores", lambda: 1)  # another process would not see the small preset
    monkeypatch.setattr("cpbkit.runs.trained.newest_bars", lambda *_: make_market(*SMALL_MARKET))
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    shown = capsys.readouterr().out
    assert "of 2 beat" in shown and "90 % interval" in shown and (tmp_path / "runs/first/report.html").exists()


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
  "-m pip index"*) echo "Available versions: 2.9.0+cpu, 2.8.0+cpu" ;;
  "-m pip"*) echo "$*" >>{log}; echo "WARNING: pip's own words"; exit ${{PIP_FAILS:-0}} ;;
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
    assert re.search(r"install -q --no-deps torch==2.9.0\+cpu torch>=\S+ --index-url https://\S+/whl/cpu\n", asked)


def test_set_up_takes_the_default_build_with_a_driver(machine):
    done, asked = machine()
    assert done.returncode == 0 and "index-url" not in asked and "install -q -e ." in asked


def test_set_up_takes_the_torch_that_is_named(machine):
    done, asked = machine(NO_DRIVER="1", CPBKIT_TORCH="torch==2.13.0 --no-cache-dir")
    assert done.returncode == 0 and "install -q torch==2.13.0 --no-cache-dir" in asked and "index-url" not in asked


def test_set_up_speaks_for_itself(machine):
    done, _ = machine()
    lines = done.stderr.splitlines()
    assert all(line.startswith("setup: ") for line in lines)
    assert re.fullmatch(r"setup: done in \d+ s", lines[-1])


def test_set_up_shows_what_pip_said_when_it_failed(machine):
    done, asked = machine(NO_DRIVER="1", PIP_FAILS="1")
    assert done.returncode == 1 and done.stdout == "" and "-e ." not in asked
    assert "WARNING: pip's own words\nsetup: PyTorch's CPU index broke off" in done.stderr


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
    for name in ("python", *(f"python3.{minor}" for minor in range(10, 20))):
        shutil.copy(machine.folder / "stub" / "python3", machine.folder / "stub" / name)
    done, _ = machine()
    assert done.returncode == 1 and "Python 3.10 or newer" in done.stderr


@pytest.fixture
def mirror(tmp_path):
    """A real pip whose configuration names a package registry, served here as PyTorch's CPU index is; no GPU."""
    web, asked = tmp_path / "web", []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form, *values):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=web))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"

    project = copy_of_the_project(tmp_path / "project")
    script = (project / "setup.sh").read_text()
    (project / "setup.sh").write_text(re.sub(r"(?m)^cpu_index=.*", f"cpu_index={here}/cpu", script))
    places = (
        f"index-url = {here}/registry",
        f"extra-index-url = {here}/registry",
        f"find-links = {here}/registry/torch",
    )
    (tmp_path / "pip.conf").write_text("\n".join(("[global]", *places)))
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (stub / "python").write_text(  # what the package itself needs is not fetched here
        f'#!/bin/sh\ncase "$*" in *" -e "*) ;; *) exec {tmp_path}/venv/bin/python "$@" ;; esac\n'
    )
    for file in stub.iterdir():
        file.chmod(0o755)

    def offer(index, name, version, needs="", size=0):
        """Put a wheel into an index; returns its bytes."""
        wheel = web / index / name.replace("_", "-") / f"{name}-{version}-py3-none-any.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        about = f"{name}-{version}.dist-info"
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/__init__.py", "#" * size)
            archive.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
            )
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        return wheel.stat().st_size

    def set_up():
        """Run it; return its lines, what of torch is installed then, and the paths that pip asked for."""
        asked.clear()
        done = subprocess.run(
            ["sh", "setup.sh"],
            cwd=project,
            capture_output=True,
            text=True,
            env={
                "PATH": f"{stub}:/usr/bin:/bin",
                "HOME": str(tmp_path),
                "VIRTUAL_ENV": str(tmp_path / "venv"),
                "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
                "PIP_NO_CACHE_DIR": "1",
            },
        )
        assert done.returncode == 0, done.stderr
        return done.stderr, [path.name for path in site.glob("*.dist-info")], list(asked)

    set_up.offer = offer
    yield set_up
    server.shutdown()
    server.server_close()


def test_set_up_asks_the_cpu_index_alone(mirror):
    mirror.offer("cpu", "torch", "2.8.0+cpu")
    mirror.offer("registry", "torch", "2.9.0", needs="nvidia_cuda")
    said, installed, asked = mirror()
    assert installed == ["torch-2.8.0+cpu.dist-info"]
    assert "PyTorch's CPU build, torch 2.8.0+cpu\n" in said
    assert not any(path.startswith("/registry") for path in asked)


def test_set_up_behind_a_mirror_takes_the_newest_cpu_build_there(mirror):
    for version in ("2.6.0+cpu", "2.7.0+cpu", "2.7.0+cu126", "2.9.0"):
        mirror.offer("registry", "torch", version, needs="" if "+cpu" in version else "nvidia_cuda")
    said, installed, asked = mirror()
    assert installed == ["torch-2.7.0+cpu.dist-info"]
    assert "CPU index gave no torch: installing the CPU build that pip's index has, torch 2.7.0+cpu\n" in said
    assert not any("nvidia" in path for path in asked)


def test_set_up_says_how_large_the_default_build_is_before_it_takes_it(mirror):
    mirror.offer("registry", "torch", "2.3.0+cpu")  # older than what the package needs
    size = mirror.offer("registry", "torch", "2.9.0", needs="nvidia_cuda")
    size += mirror.offer("registry", "nvidia_cuda", "12.6", size=7_000_000)
    said, installed, _ = mirror()
    assert installed == []  # the step after brings it, with all else
    assert "has no CPU build" in said and size == pytest.approx(7e6, rel=1e-3)
    assert f"torch's default build, {size / 1e6:.0f} MB in 2 files to fetch; CPBKIT_TORCH" in said
    assert said.index("MB in") < said.index("installing the requirements")

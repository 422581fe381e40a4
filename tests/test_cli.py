"""The command line: what it prints, how it fails, and its exit codes."""

import errno
import json
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from cpbkit.cli import cpbkit
from cpbkit.command import Commands
from cpbkit.errors import DataError


def run(*arguments, cli=cpbkit):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def failing(error):
    """A command line whose only command raises."""

    @click.group(cls=Commands)
    def cli():
        pass

    @cli.command(examples=("cli work",))
    def work():
        raise error

    return cli


def leaves(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


def test_help_lists_every_command():
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(f"\n  {name} " in shown.output for name in cpbkit.commands)


@pytest.mark.parametrize(("path", "command"), list(leaves(cpbkit)))
def test_help_of_a_command_shows_an_example_that_parses(path, command):
    shown = run(*path, "--help")
    assert shown.exit_code == 0 and "Example" in shown.output and "--debug" in shown.output
    start = f"cpbkit {' '.join(path)}"
    examples = [line.strip() for line in shown.output.splitlines() if line.startswith(f"  {start}")]
    assert examples
    for example in examples:
        command.make_context(path[-1], shlex.split(example.removeprefix(start)))


def test_a_failure_is_one_line_and_exit_code_1():
    shown = run("work", cli=failing(DataError("the bars are gone; fetch them again")))
    assert shown.exit_code == 1 and shown.output == "Error: the bars are gone; fetch them again\n"


def test_a_full_disk_is_one_line():
    shown = run("work", cli=failing(OSError(errno.ENOSPC, "No space left on device", "runs/x")))
    assert shown.exit_code == 1 and shown.output == "Error: No space left on device: runs/x\n"


def test_debug_keeps_the_traceback():
    error = DataError("the bars are gone")
    assert run("work", "--debug", cli=failing(error)).exception is error


def test_a_fault_of_the_program_is_not_hidden():
    assert isinstance(run("work", cli=failing(ZeroDivisionError())).exception, ZeroDivisionError)


def test_ctrl_c_says_how_to_go_on():
    shown = run("work", cli=failing(KeyboardInterrupt()))
    assert shown.exit_code == 1 and "the same command goes on" in shown.output and "Traceback" not in shown.output


@pytest.mark.parametrize("arguments", [["sweeep"], ["doctor", "--nothing"]])
def test_wrong_usage_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


def test_doctor_speaks_to_people_and_machines():
    shown, told = run("doctor"), json.loads(run("doctor", "--json").output)
    assert told["facts"]["torch"] in shown.output.splitlines()[0]
    assert all(finding["text"] in shown.output for finding in told["findings"])


def test_python_m_is_the_same():
    done = subprocess.run([sys.executable, "-m", "cpbkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cpbkit, version ")

"""Faults injected for real on this machine, and the claims."""

import json
import time

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from cpbkit.cli.machine import doctor
from cpbkit.gpu_check.claims import Case, Ruling, all_claims, copy_weights, judge_claim, judge_claims, rule
from cpbkit.gpu_check.faults import FAULTS, WrittenLSTM, count_confusions, inject, make_toy, render_faults
from cpbkit.gpu_check.step import Step
from cpbkit.gpu_check.trials import Gain

HERE = "cuda" if torch.cuda.is_available() else "cpu"
# Verdicts of these rest on counts, flags and devices, not on the clock of a shared machine.
TIMELESS = {"SYNC_BOUND", "DEBUG_MODE_ON", "MODEL_OR_DATA_ON_CPU", "MEMORY_GROWTH"}


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.needs_gpu], ids=lambda f: f.name)
def test_each_fault_gets_its_verdict_on_a_cpu(fault):
    row = inject(fault, "cpu", seconds=1.5)
    if row["found"] != fault.expected and fault.expected not in TIMELESS:
        row = inject(fault, "cpu", seconds=4)  # another process may have had the core
    assert row["found"] == fault.expected, row


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_each_fault_gets_its_verdict_on_a_gpu(fault):
    assert inject(fault, "cuda", seconds=6)["found"] == fault.expected


def test_faults_that_need_a_gpu_come_with_the_reason():
    row = inject(next(f for f in FAULTS if f.needs_gpu), "cpu")
    assert row["found"] == "" and row["note"] == "not injected: needs an NVIDIA GPU"


def test_the_toy_of_the_faults_takes_no_preset():
    done = CliRunner().invoke(doctor, ["--inject", "--preset", "quick"])
    assert done.exit_code == 2 and "a toy of its own" in done.output


def test_the_matrix_and_the_text_count_what_was_tried():
    rows = [
        {"fault": "a", "expected": "HOST_BOUND", "found": "HOST_BOUND", "note": ""},
        {"fault": "b", "expected": "HOST_BOUND", "found": "DEVICE_BOUND", "note": ""},
        {"fault": "c", "expected": "COPY_BOUND", "found": "", "note": "not injected: no GPU"},
    ]
    matrix = count_confusions(rows)
    assert matrix.loc["HOST_BOUND"].to_dict() == {"DEVICE_BOUND": 1, "HOST_BOUND": 1}
    text = render_faults(rows)
    assert "1 of 2 right on this machine; 1 not injected" in text
    assert sum("<- wrong" in line for line in text.splitlines()) == 1


def test_the_written_cell_is_the_library_layer():
    torch.manual_seed(0)
    layer, written = nn.LSTM(8, 5, batch_first=True).double(), WrittenLSTM(8, 5).double()
    copy_weights(written, layer)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(written(x)[0], layer(x)[0])


# Claims.


@pytest.mark.parametrize(
    ("gain", "least", "verdict"),
    [
        (Gain("", 2.0, 1.8, 2.2), 1.0, "TRUE"),
        (Gain("", 2.0, 1.8, 2.2), 10.0, "FALSE"),
        (Gain("", 1.02, 0.95, 1.1), 1.0, "NO EFFECT"),
        (Gain("", 0.5, 0.4, 0.6), 1.0, "FALSE"),
    ],
)
def test_rulings_on_gains(gain, least, verdict):
    assert rule(gain, "x", least).verdict == verdict


# What is true on any machine; the rest depends on the chip.
CERTAIN = {
    "C2": "FALSE", "C3": "FALSE", "C6": "FALSE", "C7": "FALSE", "C8": "FALSE", "C11": "FALSE", "C13": "FALSE",
    "C17": "FALSE", "C19": "FALSE", "C20": "FALSE", "C22": "NOT MEASURABLE HERE",
}  # fmt: skip


def test_claims_that_are_settled_everywhere():
    case = Case(make_toy(HERE), seconds=0.5)
    claims, random = all_claims(case), torch.get_rng_state()
    rulings = {key: judge_claim(case, claims[key][1]) for key in CERTAIN}
    assert torch.equal(random, torch.get_rng_state())
    assert {key: ruling.verdict for key, ruling in rulings.items()} == CERTAIN
    assert "150 minutes" in rulings["C20"].text


def test_anomaly_detection_costs_or_the_machine_is_too_noisy_to_tell():
    case = Case(make_toy(HERE), seconds=2)
    ruling = judge_claim(case, all_claims(case)["F11"][1])
    assert ruling.verdict == "FALSE" or ruling.text.startswith("too noisy")


@pytest.mark.slow
def test_every_claim_gets_a_ruling_with_a_reason():
    step = make_toy(HERE, hidden=8)
    before, random = [p.clone() for p in step.model.parameters()], torch.get_rng_state()
    rows = list(judge_claims(step, seconds=0.1))
    assert torch.equal(random, torch.get_rng_state())
    assert [row["key"] for row in rows] == [*(f"C{i}" for i in range(1, 23)), *(f"F{i}" for i in range(1, 15))]
    for row in rows:
        assert row["verdict"] in ("TRUE", "FALSE", "NO EFFECT", "NOT MEASURABLE HERE") and row["text"]
        assert row["numbers"] or row["verdict"] != "TRUE" or row["key"] in ("C15", "F5")
    if HERE == "cpu":
        assert next(r for r in rows if r["key"] == "C1")["text"] == "needs an NVIDIA GPU"
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    json.dumps(rows)


def test_a_fix_that_the_step_brings_along_is_the_one_that_is_measured():
    step = Step(lambda _: time.sleep(2e-3), device="cpu", variants={"float16": Step(lambda _: None, device="cpu")})
    assert Case(step, seconds=0.2).try_fix("float16", "halved").verdict == "TRUE"


def test_no_setting_of_torch_is_measured_on_a_graph_that_was_captured_without_it():
    case = Case(Step(lambda _: None, device="cuda", graph=True), seconds=0.1)
    ruling = case.race_setting(torch.autograd.set_detect_anomaly, False, True, "anomaly detection")
    assert ruling.verdict == "NOT MEASURABLE HERE" and "CUDA graph" in ruling.text


def test_whatever_a_claim_raises_is_its_ruling():
    class Refused(Exception):
        """As NVMLError, no RuntimeError."""

    def ask():
        raise Refused("Not Supported")

    ruling = judge_claim(Case(make_toy("cpu"), 0.1), ask)
    assert ruling.verdict == "NOT MEASURABLE HERE" and ruling.text.endswith("Not Supported")


def test_a_ruling_is_data():
    assert Ruling("TRUE", {"gain": 2.0}, "why").numbers["gain"] == 2.0

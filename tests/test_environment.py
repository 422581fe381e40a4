"""The verdicts on the machine, from facts that are handed in."""

import json
import types

import pytest

from cpbkit.gpu_check.findings import check_environment, judge, runs_on
from cpbkit.hardware import environment
from cpbkit.hardware.chips import find_chip
from cpbkit.hardware.environment import Device, Facts

T4 = Device("Tesla T4", (7, 5), 15_800_000_000)
P100 = Device("Tesla P100-PCIE-16GB", (6, 0), 16_000_000_000)
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
FINE = Facts(
    torch="2.11.0", cuda="12.8", cudnn=91002, architectures=CU128, devices=(T4,), driver="580.65",
    driver_cuda=(13, 0), nvidia_present=True, smoke="", cores=8, disk_free=50 * 10**9,
)  # fmt: skip


def vary(facts=FINE, **changes):
    return environment.dataclasses.replace(facts, **changes)


def without_gpu(**changes):
    return vary(devices=(), driver="", driver_cuda=None, smoke=None, architectures=(), **changes)


@pytest.mark.parametrize(
    ("facts", "code", "word"),
    [
        (without_gpu(nvidia_present=False), "NO_GPU_RUNTIME", "no GPU"),
        (
            without_gpu(nvidia_present=False, variables={"COLAB_RELEASE_TAG": "x"}),
            "NO_GPU_RUNTIME",
            "Change runtime",
        ),
        (
            without_gpu(nvidia_present=False, variables={"KAGGLE_KERNEL_RUN_TYPE": "x"}),
            "NO_GPU_RUNTIME",
            "T4 x2",
        ),
        (without_gpu(variables={"CUDA_VISIBLE_DEVICES": ""}), "NO_GPU_RUNTIME", "CUDA_VISIBLE_DEVICES"),
        (without_gpu(variables={"CUDA_VISIBLE_DEVICES": "3"}), "NO_GPU_RUNTIME", "CUDA_VISIBLE_DEVICES='3'"),
        (without_gpu(cuda=None), "CPU_ONLY_WHEEL", "CPU-only wheel"),
        (without_gpu(), "ARCH_OR_DRIVER_MISMATCH", "driver"),
        (without_gpu(tpu=True, nvidia_present=False), "WRONG_ACCELERATOR", "TPU"),
        (
            vary(devices=(P100,), smoke="no kernel image is available"),
            "ARCH_OR_DRIVER_MISMATCH",
            "no kernels for Tesla P100",
        ),
        (
            vary(
                without_gpu(variables={"CUDA_VISIBLE_DEVICES": "0"}), cuda="13.0", driver="550.54", driver_cuda=(12, 4)
            ),
            "ARCH_OR_DRIVER_MISMATCH",
            "driver 550.54, which runs CUDA up to 12.4",
        ),
        (vary(smoke="no kernel image is available"), "ARCH_OR_DRIVER_MISMATCH", "no kernel image"),
        (vary(variables={"CUDA_LAUNCH_BLOCKING": "1"}), "DEBUG_MODE_ON", "CUDA_LAUNCH_BLOCKING=1"),
        (vary(anomaly=True), "DEBUG_MODE_ON", "anomaly"),
        (vary(sync_debug=True), "DEBUG_MODE_ON", "sync debug"),
        (vary(cudnn_enabled=False), "DEBUG_MODE_ON", "cuDNN is off"),
        (vary(others=((12, 700_000_000),)), "THROTTLED_OR_SHARED", "0.7 GB"),
    ],
)
def test_each_fault_gets_its_verdict(facts, code, word):
    finding = judge(facts).findings[0]
    found = [f for f in judge(facts).findings if f.code]
    assert [f.code for f in found] == [code] and (found[0].level in ("WARN", "FAIL") or word == "no GPU")
    assert word in found[0].text
    assert finding.level != "ok" or code in ("DEBUG_MODE_ON", "THROTTLED_OR_SHARED")


def test_a_fine_machine_gets_no_code_and_every_line_is_ok_or_a_note():
    report = judge(FINE)
    assert report.codes == ()
    assert {f.level for f in report.findings} == {"ok", "note"}
    assert "Tesla T4 · compute 7.5 · 15.8 GB · driver 580.65 · CUDA 12.8 · cuDNN 91002 · torch 2.11.0" in report.title


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (vary(bf16_claimed=True), "bf16 is emulated"),
        (FINE, "no TF32"),
        (vary(devices=(T4, T4)), "2 GPUs"),
        (vary(cores=2), "2 CPU cores: workers"),
        (vary(deterministic=True), "deterministic"),
        (vary(variables={"COLAB_RELEASE_TAG": "x"}), "/content"),
        (vary(variables={"KAGGLE_KERNEL_RUN_TYPE": "x"}), "/kaggle/working"),
        (vary(disk_free=10**9, clearable=(("/h/.triton/cache", 2 * 10**8),)), "/h/.triton/cache (0.20 GB)"),
        (
            vary(disk_free=10**11, clearable=(("/h/.triton/cache", 2 * 10**8),)),
            "100 GB of disk free; safe to delete, costs only compiling again: /h/.triton/cache (0.20 GB)",
        ),
        (
            vary(used=3 * 10**9, own=10**9, others=((812, 15 * 10**8),)),
            "device in use: this process 1.0 GB, process 812 1.5 GB, contexts and what cannot be told apart 0.5 GB",
        ),
        (
            vary(smoke="no kernel image", devices=(Device("Tesla K80", (3, 7), 12 * 10**9),)),
            "No current wheel has any for a chip this old: take another runtime",
        ),
        (vary(unseen=("driver: gone",)), "not seen: driver: gone"),
    ],
)
def test_what_is_worth_a_line(facts, sentence):
    assert sentence in "\n".join(judge(facts).lines())


def test_a_kernel_that_ran_is_stronger_than_any_version():
    # NVIDIA's forward compatibility runs a newer CUDA on an older driver.
    assert judge(vary(cuda="13.0", driver_cuda=(12, 4), architectures=CU130)).codes == ()


def test_bf16_of_an_a100_is_real():
    a100 = Device("NVIDIA A100-SXM4-40GB", (8, 0), 40 * 10**9)
    text = "\n".join(judge(vary(devices=(a100,), bf16_claimed=True)).lines())
    assert "emulated" not in text and "TF32" not in text


def test_wheels_and_chips():
    # cu126 begins at 5.0, cu128 at 7.0, cu130 at 7.5: the tables of the PyTorch release notes.
    table = {(6, 0): (True, False, False), (7, 0): (True, True, False), (7, 5): (True, True, True)}
    for capability, expected in table.items():
        assert tuple(runs_on(wheel, capability) for wheel in (CU126, CU128, CU130)) == expected
    assert runs_on(CU128, (8, 9))  # a binary for 8.6 runs on 8.9
    assert not runs_on(("sm_90",), (10, 0)) and runs_on(("compute_90",), (10, 0))
    assert runs_on(("sm_90a",), (9, 0))


def test_banner_is_the_format_people_post():
    lines = judge(FINE).banner().splitlines()
    assert lines == [
        "GPU Configuration",
        "  GPU: Tesla T4",
        "  CUDA: 12.8",
        "  cuDNN: 91002",
        "  Total Memory: 15.80GB",
        "  Compute Capability: 7.5",
        "  Max Threads Per Block: 1024",
    ]


def test_this_machine_is_observed_and_goes_to_json():
    report = check_environment()
    assert report.facts.cores >= 1 and report.facts.memory > 0 and report.facts.disk_free > 0
    assert bool(report.facts.driver) or any("NVML" in text for text in report.facts.unseen)
    assert json.loads(json.dumps(report.to_dict()))["facts"]["torch"] == report.facts.torch


class Refused(Exception):
    pass


def fake_nvml(**answers):
    def refuse(*_):
        raise Refused("Not Supported")

    names = ("SystemGetDriverVersion", "SystemGetCudaDriverVersion", "DeviceGetCount", "DeviceGetHandleByIndex",
             "DeviceGetComputeRunningProcesses")  # fmt: skip
    calls = {f"nvml{n}": (lambda *_, value=answers[n]: value) if n in answers else refuse for n in names}
    return types.SimpleNamespace(NVMLError=Refused, **calls)


def test_nvml_answers_and_refusals():
    other = types.SimpleNamespace(pid=1, usedGpuMemory=600_000_000)
    own = types.SimpleNamespace(pid=environment.os.getpid(), usedGpuMemory=None)
    unseen = []
    seen = environment.ask_nvml(
        fake_nvml(
            SystemGetDriverVersion="580.65",
            SystemGetCudaDriverVersion=12080,
            DeviceGetCount=1,
            DeviceGetHandleByIndex=object(),
            DeviceGetComputeRunningProcesses=[own, other],
        ),
        unseen,
    )
    assert seen["driver"] == "580.65" and seen["driver_cuda"] == (12, 8)
    assert seen["others"] == ((1, 600_000_000),)
    assert unseen == []
    seen = environment.ask_nvml(fake_nvml(), unseen)
    assert seen == {"driver": "", "driver_cuda": None} and len(unseen) == 3


def test_other_processes_are_those_of_the_device_that_is_used(monkeypatch):
    nvml, own = fake_nvml(DeviceGetCount=2), types.SimpleNamespace(pid=environment.os.getpid(), usedGpuMemory=0)
    nvml.nvmlDeviceGetHandleByIndex = lambda i: i
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda i: [types.SimpleNamespace(pid=i + 1, usedGpuMemory=10**9), own]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment.ask_nvml(nvml, [])["others"] == ((2, 10**9),)


def test_in_a_container_this_process_is_not_called_another():
    outside, unseen = types.SimpleNamespace(pid=3_999_999_999, usedGpuMemory=2 * 10**9), []
    nvml = fake_nvml(DeviceGetCount=1, DeviceGetHandleByIndex=0, DeviceGetComputeRunningProcesses=[outside])
    seen = environment.ask_nvml(nvml, unseen)
    assert "others" not in seen and "outside the container" in unseen[-1]
    lines = judge(vary(unseen=tuple(unseen))).lines()
    assert not any("old notebook" in line or "no other process" in line for line in lines)


def test_only_recomputable_things_are_called_clearable(tmp_path):
    keep = [
        tmp_path / "home" / ".cache" / "huggingface" / "m.bin",
        tmp_path / "home" / "runs" / "results.jsonl",
    ]
    spare = [tmp_path / "home" / ".triton" / "cache" / "k", tmp_path / "tmp" / "torchinductor_me" / "k"]
    for path in keep + spare:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"0" * 2_000_000)
    found = environment.find_clearable(tmp_path / "home", tmp_path / "tmp")
    assert {name for name, _ in found} == {str(path.parent) for path in spare}
    assert all(size == 2_000_000 for _, size in found) and all(path.exists() for path in keep + spare)


def test_a_variable_that_does_nothing_without_a_gpu_hides_no_verdict():
    report = judge(without_gpu(nvidia_present=False, variables={"CUDA_LAUNCH_BLOCKING": "1"}))
    assert "DEBUG_MODE_ON" not in dict(report.codes)
    assert any("CUDA_LAUNCH_BLOCKING=1" in finding.text for finding in report.findings)


def test_chips_are_found_by_a_whole_word():
    assert find_chip("Tesla T4").name == "T4"
    assert find_chip("NVIDIA A100-SXM4-40GB").name == "A100"
    assert find_chip("NVIDIA L40S") is None and find_chip("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert find_chip("NVIDIA H100 80GB HBM3").name == "H100"
    assert find_chip("NVIDIA RTX PRO 6000 Blackwell Server Edition").name == "RTX PRO 6000"
    assert find_chip("NVIDIA RTX 6000 Ada Generation") is None


GB = 10**9


def write_group(folder, limit, used, cached, names, stat="inactive_file"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{stat} {cached}\n")


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def test_the_limits_of_a_container_count_of_both_versions_and_all_levels(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory,cpu:/docker/ab\n1:pids:/x\n0::/job/step\n")
    top = tmp_path / "sys/fs/cgroup"
    write_group(top / "job/step", "max", GB, 0, V2)
    write_group(top / "job", 2 * GB, GB, GB // 2, V2)
    # Inside a container of version 1 the path of outside is not there, and its own group is the top.
    write_group(top / "memory", 900_000_000, 400_000_000, 100_000_000, V1, "total_inactive_file")
    assert sorted(environment.container_memory(tmp_path)) == [
        (900_000_000, 600_000_000),
        (2 * GB, 3 * GB // 2),
    ]
    assert environment.container_memory(tmp_path / "elsewhere") == []


def test_free_memory_is_that_of_the_container_where_it_is_less(monkeypatch):
    host = environment.psutil.virtual_memory()  # held still: what other programs take between two looks is none of this
    monkeypatch.setattr(environment.psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(environment, "container_memory", lambda: [(10**18, 10**18)])
    assert environment.free_memory() == host.available and environment.host_memory() == host.total
    monkeypatch.setattr(environment, "container_memory", lambda: [(900_000_000, 6000), (10**18, 10**18)])
    assert environment.free_memory() == 6000 and environment.host_memory() == 900_000_000

"""What machine is this, and what is wrong with it: facts first, then one verdict a line."""

import contextlib
import dataclasses
import itertools
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEBUG_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the device",
    "TORCH_USE_CUDA_DSA": "kernels carry assertions",
}
TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_NAME")
WATCHED = (*("CUDA_VISIBLE_DEVICES", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"), *DEBUG_VARIABLES, *TPU_VARIABLES)
NO_GPU_CURE = {
    "Colab": "Runtime > Change runtime type > T4 GPU (a refusal is the quota, not a fault)",
    "Kaggle": "Settings > Accelerator > GPU T4 x2",
}
KEEPING = {
    "Colab": "Colab: what lies under /content goes with the runtime; keep the run folder on Drive or the Hub",
    "Kaggle": "Kaggle: only /kaggle/working is kept, and the hours of the GPU are counted",
}
LOW_DISK = 5e9  # bytes; a run of forty models and its report need less than one tenth of it
FOREIGN = 500e6  # bytes of device memory held by others that deserve a word


@dataclass(frozen=True)
class Device:
    """One CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes in all
    multiprocessors: int = 0


@dataclass(frozen=True)
class Facts:
    """What was seen. Nothing here is judged; `unseen` says what could not be seen, and why."""

    torch: str = ""
    cuda: str | None = None  # of the wheel; None in a CPU-only wheel
    cudnn: int | None = None
    architectures: tuple[str, ...] = ()  # that the wheel carries, "sm_75"
    devices: tuple[Device, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None  # newest CUDA the driver can run
    nvidia_present: bool = False  # a device node, or nvidia-smi
    smoke: str | None = None  # "" a kernel and its backward ran; a message: they did not; None: not tried
    bf16_claimed: bool = False  # what torch.cuda.is_bf16_supported() says
    cudnn_enabled: bool = True
    anomaly: bool = False
    sync_debug: bool = False
    deterministic: bool = False
    tpu: bool = False
    others: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of other processes on the first device
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of WATCHED, those that are set
    system: str = ""
    python: str = ""
    cores: int = 1  # CPU cores this process may use
    memory: int = 0  # bytes of host memory
    disk_free: int = 0  # bytes
    clearable: tuple[tuple[str, int], ...] = ()  # (folder, bytes) that only costs computing to have again
    unseen: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        if "COLAB_RELEASE_TAG" in self.variables:
            return "Colab"
        return "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in self.variables else self.system


@dataclass(frozen=True)
class Finding:
    """One verdict."""

    level: str  # ok | note | WARN | FAIL
    code: str  # of the decision tree, or ""
    text: str  # a sentence, with the cure


@dataclass(frozen=True)
class Report:
    """The facts with their verdicts."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        f, device = self.facts, "no GPU in use"
        if f.devices:
            d = f.devices[0]
            device = f"{d.name} · compute {d.capability[0]}.{d.capability[1]} · {d.memory / 1e9:.1f} GB"
            device += f" · driver {f.driver or 'not known'} · CUDA {f.cuda} · cuDNN {f.cudnn}"
        return f"{device} · torch {f.torch} · {f.place}, {f.cores} CPU core{'s' * (f.cores != 1)}"

    @property
    def codes(self) -> tuple[tuple[str, str], ...]:
        """The (code, sentence) pairs that stop or distort a measurement, for `diagnosis.decide`."""
        return tuple((f.code, f.text) for f in self.findings if f.code and f.level in ("WARN", "FAIL"))

    def lines(self) -> list[str]:
        """One line a verdict, the title first."""
        return [self.title, *(f"  {f.level:5} {f.text}" for f in self.findings)]

    def banner(self) -> str:
        """The block `GPU Configuration`, as people post it when they ask for help."""
        f = self.facts
        if not f.devices:
            return "GPU Configuration\n  GPU: none in use"
        d = f.devices[0]
        return "\n".join(
            (
                "GPU Configuration",
                f"  GPU: {d.name}",
                f"  CUDA: {f.cuda}",
                f"  cuDNN: {f.cudnn}",
                f"  Total Memory: {d.memory / 1e9:.2f}GB",
                f"  Compute Capability: {d.capability[0]}.{d.capability[1]}",
                "  Max Threads Per Block: 1024",  # of every capability that torch supports
            )
        )

    def to_dict(self) -> dict:
        """JSON-safe: facts and findings."""
        return {"facts": dataclasses.asdict(self.facts), "findings": [dataclasses.asdict(f) for f in self.findings]}


def run_smoke_test(device: str) -> str:
    """Run a kernel and its backward; return "" or the error.

    `is_available()` is no proof: it is true on a chip the wheel has no kernels for.
    """
    import torch

    try:
        x = torch.ones(2, 2, device=device, requires_grad=True)
        (x @ x).tanh().sum().backward()
        value = float(x.grad.sum())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if value == value else "the gradient of a 2 x 2 product is not a number"


def count_cores() -> int:
    """Return the CPU cores this process may use: affinity, and the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def host_memory() -> int:
    """Return the bytes of host memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def find_clearable(home: Path, temporary: Path) -> tuple[tuple[str, int], ...]:
    """Size what compilers left behind. Never a result, nor a download, nor what another program is using."""
    folders = [home / ".nv" / "ComputeCache", home / ".triton" / "cache", home / ".cache" / "torch" / "kernels"]
    folders += sorted(temporary.glob("torchinductor_*"))
    sizes = {str(f): sum(p.stat().st_size for p in f.rglob("*") if p.is_file()) for f in folders if f.is_dir()}
    return tuple((name, size) for name, size in sizes.items() if size > 1e6)


def load_nvml():
    """Return the module pynvml, initialised, and "", or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "NVML was not asked: the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML was not asked: {error}"
    return pynvml, ""


def observe() -> Facts:
    """Look at this machine."""
    import torch

    seen: dict = {}
    available = torch.cuda.is_available()
    if available:
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        seen["devices"] = tuple(
            Device(p.name, (p.major, p.minor), p.total_memory, p.multi_processor_count) for p in properties
        )
        seen["smoke"] = run_smoke_test("cuda")
        seen["bf16_claimed"] = torch.cuda.is_bf16_supported()
        seen["sync_debug"] = torch.cuda.get_sync_debug_mode() != 0
    nvml, problem = load_nvml()
    unseen = [f"driver, other processes and clocks. {problem}"] if problem else []
    if nvml:
        seen |= ask_nvml(nvml, unseen)
    version = Path("/proc/driver/nvidia/version")
    if not seen.get("driver") and version.exists():
        match = re.search(r"Kernel Module\D*([\d.]+)", version.read_text())
        seen["driver"] = match.group(1) if match else ""
    return Facts(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        nvidia_present=Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None,
        cudnn_enabled=torch.backends.cudnn.enabled,
        anomaly=torch.is_anomaly_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tpu=Path("/dev/accel0").exists() or any(name in os.environ for name in TPU_VARIABLES),
        variables={name: os.environ[name] for name in WATCHED if name in os.environ},
        system=platform.system(),
        python=platform.python_version(),
        cores=count_cores(),
        memory=host_memory(),
        disk_free=shutil.disk_usage(".").free,
        clearable=find_clearable(Path.home(), Path(tempfile.gettempdir())),
        unseen=tuple(unseen),
        **seen,
    )


def ask_nvml(nvml, unseen: list[str]) -> dict:
    """Return the facts NVML has; what it refuses goes to `unseen`. nvml: a module like pynvml, initialised."""

    def ask(what: str, call):
        try:
            return call()
        except (nvml.NVMLError, AttributeError) as error:
            unseen.append(f"{what}: {error}")
            return None

    driver = ask("driver", nvml.nvmlSystemGetDriverVersion)
    number = ask("CUDA of the driver", nvml.nvmlSystemGetCudaDriverVersion)
    seen = {"driver": driver or "", "driver_cuda": (number // 1000, number % 1000 // 10) if number else None}
    handle = ask("devices", lambda: nvml.nvmlDeviceGetHandleByIndex(0))
    if handle is not None:
        processes = ask("other processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
        seen["others"] = tuple((p.pid, int(p.usedGpuMemory or 0)) for p in processes if p.pid != os.getpid())
    return seen


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Say whether a wheel has code for a chip: binaries of its major version, or PTX; none newer."""
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if match:
            carried = int(match[2]), int(match[3])
            same_major = match[1] == "compute" or carried[0] == capability[0]
            if same_major and carried <= capability:
                return True
    return False


def judge(facts: Facts) -> Report:
    """Turn facts into verdicts, the gravest cause first; pure."""
    chain = itertools.chain(_presence(facts), _device(facts), _modes(facts), _host(facts))
    unseen = (Finding("note", "", f"not seen: {text}") for text in facts.unseen)
    return Report(facts, (*chain, *unseen))


def _presence(f: Facts) -> Iterator[Finding]:
    hidden = f.variables.get("CUDA_VISIBLE_DEVICES")
    if f.devices:
        return
    if f.tpu:
        text = "this is a TPU runtime, and torch speaks CUDA: choose a GPU runtime"
        yield Finding("FAIL", "WRONG_ACCELERATOR", text)
    elif f.cuda is None and f.nvidia_present:
        text = f"torch {f.torch} is a CPU-only wheel on a machine with a GPU: get the platform's own torch back"
        yield Finding("FAIL", "CPU_ONLY_WHEEL", f"{text} (Colab: disconnect and delete the runtime)")
    elif hidden is not None and (hidden.strip() in ("", "-1") or f.nvidia_present):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPU: remove it and restart the runtime"
        yield Finding("FAIL", "NO_GPU_RUNTIME", text)
    elif f.nvidia_present:
        text = f"torch for CUDA {f.cuda} cannot start the GPU with driver {f.driver or 'unknown'}"
        cure = "take a torch built for the driver's CUDA, or update the driver"
        yield Finding("FAIL", "ARCH_OR_DRIVER_MISMATCH", f"{text}: {cure}")
    elif f.place in NO_GPU_CURE:
        yield Finding("FAIL", "NO_GPU_RUNTIME", f"no GPU in this runtime: {NO_GPU_CURE[f.place]}")
    else:
        yield Finding("note", "NO_GPU_RUNTIME", "no GPU on this machine: everything here runs on the CPU")


def _device(f: Facts) -> Iterator[Finding]:
    if not f.devices:
        return
    device, newest = f.devices[0], f.driver_cuda
    chip = f"{device.name} (sm_{device.capability[0]}{device.capability[1]})"
    trouble = ""
    if f.architectures and not runs_on(f.architectures, device.capability):
        trouble = f"torch {f.torch} has no kernels for {chip}, only {' '.join(f.architectures)}: each operation "
        trouble += "fails although is_available() is true. Choose a T4 or L4, or a torch wheel for CUDA 12.6"
    elif newest and int((f.cuda or "0").split(".")[0]) > newest[0]:
        trouble = f"the driver runs CUDA up to {newest[0]}.{newest[1]} and torch is built for {f.cuda}: "
        trouble += "update the driver, or take an older wheel"
    elif f.smoke:
        trouble = f"a small kernel failed on {chip}: {f.smoke}"
    if trouble:
        yield Finding("FAIL", "ARCH_OR_DRIVER_MISMATCH", trouble)
    elif f.smoke == "":
        yield Finding("ok", "", "a kernel and its backward ran on the device")
    foreign = sum(size for _, size in f.others)
    if foreign > FOREIGN:
        pids = ", ".join(str(pid) for pid, _ in f.others[:4])
        text = f"other processes ({pids}) hold {foreign / 1e9:.1f} GB of the device, timings will waver: "
        yield Finding("WARN", "THROTTLED_OR_SHARED", text + "an old notebook of yours? Shut it down there")
    elif f.driver and not any("other processes" in text for text in f.unseen):
        yield Finding("ok", "", "no other process holds memory of the device that matters")
    if len(f.devices) > 1:
        text = f"{len(f.devices)} GPUs, and a run uses the first: give the next its own process and series"
        yield Finding("note", "", f"{text} (CUDA_VISIBLE_DEVICES=1)")
    if f.bf16_claimed and device.capability < (8, 0):
        yield Finding("note", "", "bf16 is emulated on this chip, whatever is_bf16_supported() says: use float16")
    if device.capability < (8, 0):
        yield Finding("note", "", "no TF32 on this chip: the float32 matmul precision changes nothing here")
    if not f.cudnn_enabled or f.cudnn is None:
        text = "cuDNN is off, so LSTM and GRU are many small kernels: torch.backends.cudnn.enabled = True"
        yield Finding("WARN", "DEBUG_MODE_ON", text)


def _modes(f: Facts) -> Iterator[Finding]:
    for name, cost in DEBUG_VARIABLES.items():
        if f.variables.get(name, "0") not in ("", "0"):
            text = f"{name}={f.variables[name]} is set: {cost}. Remove it and restart the runtime"
            yield Finding("WARN", "DEBUG_MODE_ON", text)
    if f.anomaly:
        text = "anomaly detection is on: torch.autograd.set_detect_anomaly(False)"
        yield Finding("WARN", "DEBUG_MODE_ON", text)
    if f.sync_debug:
        yield Finding("WARN", "DEBUG_MODE_ON", "sync debug mode is on: torch.cuda.set_sync_debug_mode(0)")
    if f.deterministic:
        yield Finding("note", "", "deterministic algorithms are on: bit-equal reruns, at a cost in speed")


def _host(f: Facts) -> Iterator[Finding]:
    if f.cores <= 2:
        text = f"{f.cores} CPU core(s): workers of a DataLoader would take them from the training loop"
        yield Finding("note", "", text)
    if f.disk_free < LOW_DISK:
        tell = "; ".join(f"{name} ({size / 1e9:.2f} GB)" for name, size in f.clearable)
        cure = f"safe to delete, costs only compiling again: {tell}" if tell else "found nothing safe to delete"
        yield Finding("WARN", "", f"{f.disk_free / 1e9:.1f} GB of disk left; {cure}")
    else:
        yield Finding("ok", "", f"{f.disk_free / 1e9:.0f} GB of disk free")
    if f.place in KEEPING:
        yield Finding("note", "", KEEPING[f.place])


def check_environment() -> Report:
    """Observe this machine and judge it."""
    return judge(observe())

"""What machine is this: what can be seen of it, unjudged, and what could not be seen."""

import contextlib
import dataclasses
import functools
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cpbkit.hardware.nvml import Ask, load_nvml, nvml_handles

# Read at run time. TORCH_USE_CUDA_DSA, often seen beside it, is one of torch's own build.
DEBUG_VARIABLES = {"CUDA_LAUNCH_BLOCKING": "every launch waits for the device"}
TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_NAME")
WATCHED = (*("CUDA_VISIBLE_DEVICES", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"), *DEBUG_VARIABLES, *TPU_VARIABLES)


@dataclass(frozen=True)
class Device:
    """One CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes in all


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
    used: int | None = None  # bytes in use on the first device, by everybody
    own: int = 0  # of these, bytes that this process's allocator holds
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


def run_smoke_test() -> str:
    """Run a kernel and its backward on the GPU; return "" or the error.

    `is_available()` is no proof: it is true on a chip the wheel has no kernels for.
    """
    import torch

    try:
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad((x @ x).tanh().sum(), x)
        value = float(gradient.sum())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "" if value == value else "the gradient of a 2 x 2 product is not a number"


def in_notebook() -> bool:
    """Say whether this is a kernel with a page, such as Jupyter, Colab or Kaggle."""
    ipython = sys.modules.get("IPython")  # a kernel has loaded it; nobody else need
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


def count_cores() -> int:
    """Return the CPU cores this process may use: affinity, and the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def host_memory() -> int:
    """Return the bytes of host memory that this process may use, those of its container."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in container_memory())])


def container_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (bytes allowed, bytes still free) of each control group around this process that has a limit.

    Both versions of Linux's cgroups; pages that only cache files count as free, since the kernel takes them back.
    """
    found = []
    for folder, names in _memory_groups(root):
        with contextlib.suppress(OSError, ValueError):  # the outermost has no such files, "max" is no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            found.append((limit, max(0, limit - used + (int(cached.group(1)) if cached else 0))))
    return found


@functools.lru_cache(maxsize=4)  # asked for twice a second by the monitor
def _memory_groups(root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """Return the folders of the groups around this process, the innermost first, and their limit's and use's files."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return []
    for line in lines:
        _, kinds, inside = line.split(":", 2)
        if kinds == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be that outside of it, while its own group is mounted as the top.
        inner = Path(inside.lstrip("/"))
        found += [(top / part, names) for part in (inner, *inner.parents) if (top / part / names[0]).exists()]
    return found


def free_memory(device: str = "cpu") -> int:
    """Return the bytes of a device that programs may still take."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *(left for _, left in container_memory())])


def find_clearable(home: Path, temporary: Path) -> tuple[tuple[str, int], ...]:
    """Size what compilers left behind. Never a result, nor a download, nor what another program is using."""
    folders = [home / ".nv" / "ComputeCache", home / ".triton" / "cache", home / ".cache" / "torch" / "kernels"]
    folders += sorted(temporary.glob("torchinductor_*"))
    sizes = {str(f): sum(p.stat().st_size for p in f.rglob("*") if p.is_file()) for f in folders if f.is_dir()}
    return tuple((name, size) for name, size in sizes.items() if size > 1e6)


def observe() -> Facts:
    """Look at this machine."""
    import torch

    seen: dict = {}
    available = torch.cuda.is_available()
    if available:
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        seen["devices"] = tuple(Device(p.name, (p.major, p.minor), p.total_memory) for p in properties)
        seen["smoke"] = run_smoke_test()
        seen["bf16_claimed"] = torch.cuda.is_bf16_supported()
        free, whole = torch.cuda.mem_get_info(0)
        seen |= {"used": whole - free, "own": torch.cuda.memory_reserved(0)}
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
    ask = Ask(nvml, unseen)
    number = ask("CUDA of the driver", nvml.nvmlSystemGetCudaDriverVersion)
    seen = {
        "driver": ask("driver", nvml.nvmlSystemGetDriverVersion) or "",
        "driver_cuda": (number // 1000, number % 1000 // 10) if number else None,
    }
    handles = ask("devices", lambda: nvml_handles(nvml))
    if handles:
        processes = ask("other processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handles[0])) or []
        if processes and all(p.pid != os.getpid() for p in processes):
            # NVML does not translate to the process namespace of a container, where this one has another number.
            unseen.append("other processes: NVML numbers them as outside the container, and this one may be among them")
        else:
            seen["others"] = tuple((p.pid, int(p.usedGpuMemory or 0)) for p in processes if p.pid != os.getpid())
    return seen

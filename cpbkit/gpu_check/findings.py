"""What is wrong with this machine: one verdict a line, each with its cure."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from cpbkit.hardware.environment import DEBUG_VARIABLES, Facts, observe

NO_GPU_CURE = {
    "Colab": "Runtime > Change runtime type > T4 GPU (a refusal is the quota, not a fault)",
    "Kaggle": "Settings > Accelerator > GPU T4 x2",
}
KEEPING = {
    "Colab": "Colab: what lies under /content goes with the runtime; keep the run folder on Drive or the Hub",
    "Kaggle": "Kaggle: only /kaggle/working is kept, and the hours of the GPU are counted",
}
OLDEST = (5, 0)  # compute capability that a current wheel has code for
LOW_DISK = 5e9  # bytes; a run of forty models and its report need less than one tenth of it
FOREIGN = 500e6  # bytes of device memory held by others that deserve a word


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
        rows = {
            "GPU": d.name,
            "CUDA": f.cuda,
            "cuDNN": f.cudnn,
            "Total Memory": f"{d.memory / 1e9:.2f}GB",
            "Compute Capability": f"{d.capability[0]}.{d.capability[1]}",
            "Max Threads Per Block": 1024,  # of every capability that torch supports
        }
        return "\n  ".join(["GPU Configuration", *(f"{name}: {value}" for name, value in rows.items())])

    def to_dict(self) -> dict:
        """JSON-safe: facts and findings."""
        return dataclasses.asdict(self)


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


def check_environment() -> Report:
    """Observe this machine and judge it."""
    return judge(observe())


def judge(facts: Facts) -> Report:
    """Turn facts into verdicts, the gravest cause first; pure."""
    parts = (_missing, _device, _modes, _host)
    unseen = (Finding("note", "", f"not seen: {text}") for text in facts.unseen)
    return Report(facts, (*itertools.chain.from_iterable(part(facts) for part in parts), *unseen))


def _missing(f: Facts) -> Iterator[Finding]:
    """Say why torch has no device."""
    hidden = f.variables.get("CUDA_VISIBLE_DEVICES")
    if f.devices:
        return
    level, code = "FAIL", "NO_GPU_RUNTIME"
    too_old = f.cuda and f.driver_cuda and int(f.cuda.split(".")[0]) > f.driver_cuda[0]
    if f.tpu:
        code, text = "WRONG_ACCELERATOR", "this is a TPU runtime, and torch speaks CUDA: choose a GPU runtime"
    elif f.cuda is None and f.nvidia_present:
        text = f"torch {f.torch} is a CPU-only wheel on a machine with a GPU: get the platform's own torch back"
        code, text = "CPU_ONLY_WHEEL", f"{text} (Colab: disconnect and delete the runtime)"
    elif hidden is not None and not too_old and (hidden.strip() in ("", "-1") or f.nvidia_present):
        text = f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPU: remove it and restart the runtime"
    elif f.nvidia_present:
        newest = f", which runs CUDA up to {f.driver_cuda[0]}.{f.driver_cuda[1]}" if f.driver_cuda else ""
        text = f"torch for CUDA {f.cuda} cannot start the GPU with driver {f.driver or 'unknown'}{newest}: "
        code, text = "ARCH_OR_DRIVER_MISMATCH", f"{text}take a torch built for the driver's CUDA, or update the driver"
    elif f.place in NO_GPU_CURE:
        text = f"no GPU in this runtime: {NO_GPU_CURE[f.place]}"
    else:
        level, text = "note", "no GPU on this machine: everything here runs on the CPU"
    yield Finding(level, code, text)


def _device(f: Facts) -> Iterator[Finding]:
    """Judge whether the first device can compute, and is ours alone."""
    if not f.devices:
        return
    device = f.devices[0]
    chip = f"{device.name} (sm_{device.capability[0]}{device.capability[1]})"
    if f.smoke == "":  # whatever lists and versions say: wheel, driver and chip fit
        yield Finding("ok", "", "a kernel and its backward ran on the device")
    elif f.smoke:
        text = f"a small kernel failed on {chip}: {f.smoke}"
        if f.architectures and not runs_on(f.architectures, device.capability):
            text = f"torch {f.torch} has no kernels for {chip}, only {' '.join(f.architectures)}: each operation "
            text += "fails although is_available() is true. "
            if device.capability < OLDEST:  # such as a K80
                text += "No current wheel has any for a chip this old: take another runtime, such as one with a T4"
            else:
                text += "Choose a T4 or L4, or a torch wheel for CUDA 12.6"
        yield Finding("FAIL", "ARCH_OR_DRIVER_MISMATCH", text)
    if f.used is not None:
        holders = [
            f"this process {f.own / 1e9:.1f} GB",
            *(f"process {pid} {size / 1e9:.1f} GB" for pid, size in f.others),
        ]
        text = f"{f.used / 1e9:.1f} of {device.memory / 1e9:.1f} GB of the device in use: {', '.join(holders)}"
        rest = f.used - f.own - sum(size for _, size in f.others)
        yield Finding(
            "ok", "", text + (f", contexts and what cannot be told apart {rest / 1e9:.1f} GB" if rest > 0 else "")
        )
    foreign = sum(size for _, size in f.others)
    if foreign > FOREIGN:
        pids = ", ".join(str(pid) for pid, _ in f.others[:4])
        text = f"other processes ({pids}) hold {foreign / 1e9:.1f} GB of the device, timings will waver: "
        yield Finding("WARN", "THROTTLED_OR_SHARED", text + "an old notebook of yours? Shut it down there")
    elif f.driver and not any("other processes" in text for text in f.unseen):
        yield Finding("ok", "", "no other process holds memory of the device that matters")
    if len(f.devices) > 1:
        text = f"{len(f.devices)} GPUs, and one process uses the first: a sweep gives each its own"
        yield Finding("note", "", text)
    if f.bf16_claimed and device.capability < (8, 0):
        yield Finding("note", "", "bf16 is emulated on this chip, whatever is_bf16_supported() says: use float16")
    if device.capability < (8, 0):
        yield Finding("note", "", "no TF32 on this chip: the float32 matmul precision changes nothing here")
    if not f.cudnn_enabled or f.cudnn is None:
        text = "cuDNN is off, so LSTM and GRU are many small kernels: torch.backends.cudnn.enabled = True"
        yield Finding("WARN", "DEBUG_MODE_ON", text)


def _modes(f: Facts) -> Iterator[Finding]:
    """Judge what was switched on to debug, and costs time."""
    for name, cost in DEBUG_VARIABLES.items():
        if f.variables.get(name, "0") not in ("", "0"):
            text = f"{name}={f.variables[name]} is set: {cost}. Remove it and restart the runtime"
            # Where there is no device it does nothing, and must not stand before what does.
            yield Finding("WARN", "DEBUG_MODE_ON", text) if f.devices else Finding("note", "", text)
    if f.anomaly:
        yield Finding("WARN", "DEBUG_MODE_ON", "anomaly detection is on: torch.autograd.set_detect_anomaly(False)")
    if f.sync_debug:
        yield Finding("WARN", "DEBUG_MODE_ON", "sync debug mode is on: torch.cuda.set_sync_debug_mode(0)")
    if f.deterministic:
        yield Finding("note", "", "deterministic algorithms are on: bit-equal reruns, at a cost in speed")


def _host(f: Facts) -> Iterator[Finding]:
    """Judge cores and disk."""
    if f.cores <= 2:
        text = f"{f.cores} CPU core{'s' * (f.cores > 1)}: workers of a DataLoader would compete with the training loop"
        yield Finding("note", "", text)
    clearable = "; ".join(f"{name} ({size / 1e9:.2f} GB)" for name, size in f.clearable)
    cure = f"; safe to delete, costs only compiling again: {clearable}" if clearable else ""
    if f.disk_free < LOW_DISK:
        text = f"{f.disk_free / 1e9:.1f} GB of disk left{cure or '; found nothing safe to delete'}"
        yield Finding("WARN", "", text)
    else:
        yield Finding("ok", "", f"{f.disk_free / 1e9:.0f} GB of disk free{cure}")
    if f.place in KEEPING:
        yield Finding("note", "", KEEPING[f.place])

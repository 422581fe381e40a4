"""NVML, the library behind nvidia-smi: loaded where it is, and asked so that a refusal is told and stops nothing."""

import os


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


def nvml_handles(nvml) -> list:
    """Return the NVML handles of the devices this process may see, in the order CUDA numbers equal chips."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name == "-1":  # CUDA stops reading at the first number that is none of its devices
            break
        handles.append(
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        )
    return handles


class Ask:
    """Calls to NVML; what it refuses is noted in `problems`, each once."""

    def __init__(self, nvml, problems: list[str]):
        self.nvml, self.problems = nvml, problems

    def __call__(self, what: str, call, otherwise=None):
        """Return the answer, or `otherwise`."""
        try:
            return call()
        except (self.nvml.NVMLError, AttributeError, ValueError) as error:
            problem = f"{what}: {error}"
            if problem not in self.problems:
                self.problems.append(problem)
            return otherwise

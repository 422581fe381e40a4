"""Train forty small crypto-price models at once, and tell the truth about them and about the GPU.

import cpbkit as cpb
run = cpb.sweep("quick", intervals=["1h"], start="2025-03-01", end="2025-06-30")
run.verdicts()
run["BTCUSDT_1h"].forecast()
"""

__version__ = "0.1.0"

_DOOR = {  # what stands at the door, and where it lives; loaded when first asked for
    "Experiment": "config.experiment",
    "Ray": "runs.executors",
    "Run": "api",
    "TrainedModel": "runs.trained",
    "audit": "api",
    "compare": "api",
    "diagnose": "gpu_check.doctor",
    "feature": "indicators",
    "fetch": "api",
    "find_run": "api",
    "load": "hub.load",
    "map": "api",
    "open_run": "api",
    "presets": "api",
    "score": "hub.score",
    "sweep": "api",
    "watch": "gpu_check.watch",
    "window": "api",
    "workspace": "runs.workspace",
}
__all__ = [*_DOOR]


def __getattr__(name: str):
    if name not in _DOOR:
        raise AttributeError(f"module 'cpbkit' has no attribute {name!r}; at the door stand {', '.join(_DOOR)}")
    import importlib

    value = getattr(importlib.import_module(f"cpbkit.{_DOOR[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_DOOR])

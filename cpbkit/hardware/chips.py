"""Stated constants of named GPUs: what the maker's data sheet promises, never what was measured here."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One GPU model. Rates are peaks; a sustained load reaches less, most of all on a card of few watts."""

    name: str  # as it occurs in torch's device name
    capability: tuple[int, int]  # compute capability
    bandwidth: float  # bytes a second of device memory
    float32: float  # FLOP a second, plain cores
    float16: float  # FLOP a second: tensor cores, without sparsity, where the chip has them
    source: str  # the maker's document

    def peak(self, precision: str) -> float:
        """Return the FLOP a second in a precision: as torch names it, or tf32; NaN for float64, which is not stated.

        Tensor cores take TF32 at half the rate of float16, from compute capability 8.0 on (data sheets of A100, L4 and
        H100, without sparsity). bfloat16 is as fast as float16 there, and emulated in float32 before.
        """
        new = self.capability >= (8, 0)
        rates = {"float16": self.float16, "bfloat16": self.float16 if new else self.float32, "float32": self.float32}
        return (rates | {"tf32": self.float16 / 2 if new else self.float32}).get(precision, math.nan)


CHIPS = {
    "T4": Chip("T4", (7, 5), 320e9, 8.1e12, 65e12, "NVIDIA T4 data sheet"),
    "P100": Chip("P100", (6, 0), 732e9, 9.3e12, 18.7e12, "NVIDIA Tesla P100 PCIe data sheet"),
    "V100": Chip("V100", (7, 0), 900e9, 14e12, 112e12, "NVIDIA V100 PCIe data sheet"),
    "L4": Chip("L4", (8, 9), 300e9, 30.3e12, 121e12, "NVIDIA L4 data sheet"),
    "A100": Chip("A100", (8, 0), 1555e9, 19.5e12, 312e12, "NVIDIA A100 40GB PCIe data sheet"),
    # Colab's G4. Its float16 rate is an eighth of the sparse FP4 rate that the sheet states.
    "RTX PRO 6000": Chip(
        "RTX PRO 6000", (12, 0), 1597e9, 120e12, 500e12, "NVIDIA RTX PRO 6000 Blackwell Server data sheet"
    ),
    "H200": Chip("H200", (9, 0), 4800e9, 67e12, 989e12, "NVIDIA H200 SXM data sheet"),
    "H100": Chip("H100", (9, 0), 3350e9, 67e12, 989e12, "NVIDIA H100 SXM data sheet"),
}


def find_chip(device_name: str) -> Chip | None:
    """Return the chip whose name is a word of a device name such as `Tesla T4` or `NVIDIA A100-SXM4-40GB`.

    None for a MIG instance, which is a part of a chip, as for a chip that is not in the table.
    """
    words = f" {' '.join(device_name.replace('-', ' ').split())} "
    return next((chip for name, chip in CHIPS.items() if f" {name} " in words and " MIG " not in words), None)

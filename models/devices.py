"""What a device can do at most: peak FLOP/s, bytes/s, memory.  From data sheets, or measured where none is to be had.

What must hold: the figures are ceilings (dense peak, not what a benchmark reached), so that floors made of them are
lower bounds.  The CPU of this machine has no honest data sheet (cores, clock and memory are a cloud's affair): it is
measured by ``models.cpu_device``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from models.errors import UserError, did_you_mean

#: Launching one captured graph and handing its tokens to the host.  An assumption, on the low side: a null kernel
#: takes 2 to 3 us from launch to end on these cards, and a step is at least one launch and one copy back.
GPU_STEP_NS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Device:
    """flops: peak FLOP/s, dense, bf16/fp16 on GPUs.  bandwidth: bytes/s of memory.  memory: bytes.

    fixed_ns: least time of a step with nothing to do.  source: where the figures are from.
    """

    name: str
    title: str
    flops: float
    bandwidth: float
    memory: float
    fixed_ns: int
    source: str

    @property
    def balance(self) -> float:
        """FLOPs per byte above which a step is bound by compute."""
        return self.flops / self.bandwidth


CPU: Final = "cpu"

#: Peaks are dense: data sheets that print "with sparsity" count twice as much.  Memory in units of 10^9 bytes, as
#: printed, which is a little less than the cards have.
DEVICES: Final = {
    device.name: device
    for device in (
        # NVIDIA A100 data sheet (June 2021), A100 80GB SXM: 312 TFLOPS BF16/FP16, 2,039 GB/s.
        Device("A100", "NVIDIA A100 80GB SXM", 312e12, 2039e9, 80e9, GPU_STEP_NS, "NVIDIA A100 data sheet, 2021"),
        # NVIDIA H100 data sheet, H100 SXM: 1,979 TFLOPS BF16/FP16 with sparsity, half of it dense; 3.35 TB/s, 80 GB.
        Device("H100", "NVIDIA H100 SXM", 989.5e12, 3350e9, 80e9, GPU_STEP_NS, "NVIDIA H100 data sheet, 2023"),
        # NVIDIA H200 data sheet, H200 SXM: compute as H100; 4.8 TB/s, 141 GB.
        Device("H200", "NVIDIA H200 SXM", 989.5e12, 4800e9, 141e9, GPU_STEP_NS, "NVIDIA H200 data sheet, 2024"),
        # NVIDIA L4 data sheet: 242 TFLOPS BF16/FP16 with sparsity, half of it dense; 300 GB/s, 24 GB.
        Device("L4", "NVIDIA L4", 121e12, 300e9, 24e9, GPU_STEP_NS, "NVIDIA L4 data sheet, 2023"),
    )
}


def find_device(name: str, *, remeasure: bool = False) -> Device:
    """A device by its name in any case; ``cpu`` is this machine, measured once.  Raises UserError."""
    if name.lower() == CPU:
        from models.cpu_device import this_cpu

        return this_cpu(remeasure=remeasure)
    known = DEVICES.get(name.upper())
    if known is not None:
        return known
    raise UserError(
        f"no device is known as {name!r}",
        where="--device",
        remedy=did_you_mean(name, DEVICES) + f"one of {', '.join(DEVICES)}, {CPU} (this machine)",
    )

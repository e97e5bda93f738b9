"""Where it runs: a device's capability, name and multiprocessors, as plain facts.

The one place that asks for the GPU, CUDA or an installed package. torch is imported only where a real device is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from mla_backends.errors import InvalidInput

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "installed_version", "is_capturing", "torch_device"]


@dataclass(frozen=True)
class Device:
    """A device as dispatch sees it. Prints as sm90, sm103, cpu.

    Args:
        capability: CUDA compute capability, (9, 0) for an H200; None is a CPU.
        name: what the driver calls it; of no consequence for dispatch.
        sm_count: multiprocessors; 0 where it is not known.
    """

    capability: tuple[int, int] | None = None
    name: str = ""
    sm_count: int = 0

    def __str__(self) -> str:
        return "cpu" if self.capability is None else "sm{}{}".format(*self.capability)

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> Device:
        """The facts of a device of this machine; by default the current GPU, or the CPU where torch sees none.

        Raises:
            InvalidInput: for a device that is neither "cpu" nor "cuda", or that this machine lacks.
        """
        import torch

        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch_device(device)
        if device.type == "cpu":
            return cls(None, "cpu")
        if device.type != "cuda":
            raise InvalidInput(f"device is {device}, it takes cpu or cuda")
        properties = torch.cuda.get_device_properties(device)
        return cls((properties.major, properties.minor), properties.name, properties.multi_processor_count)

    @classmethod
    def named(cls, capability: tuple[int, int] | str | Device) -> Device:
        """A device from (9, 0), "sm90", "sm_103a", "cpu", or a Device.

        Raises:
            InvalidInput: for anything else.
        """
        if isinstance(capability, Device):
            return capability
        if capability == "cpu":
            return cls(None, "cpu")
        if isinstance(capability, str):
            match = re.fullmatch(r"sm_?(\d+)(\d)[af]?", capability.strip().lower())
            if match:
                return cls((int(match[1]), int(match[2])))
        elif isinstance(capability, tuple) and len(capability) == 2 and all(type(n) is int for n in capability):
            return cls((capability[0], capability[1]))
        raise InvalidInput(f'capability is {capability!r}, it takes (9, 0), "sm90", "cpu" or a Device')


def torch_device(device: torch.device | str) -> torch.device:
    """torch's own device, "cpu", "cuda" or "meta".

    Raises:
        InvalidInput: for anything else, and for a GPU that this machine lacks.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f'device is {device!r}, it takes "cpu", "cuda" or "cuda:<index>"') from error
    if found.type not in ("cpu", "cuda", "meta"):
        raise InvalidInput(f"device is {found}, it takes cpu or cuda")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 or (found.index or 0) >= count:
            raise InvalidInput(f"device is {found}, but torch {torch.__version__} sees {count} CUDA devices here")
    return found


def is_capturing(where: torch.device) -> bool:
    """Whether a CUDA graph is being captured on that device's current stream."""
    import torch

    if where.type != "cuda":
        return False
    if torch.cuda.current_device() == where.index:  # a guard costs the host as much as a launch
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(where):
        return torch.cuda.is_current_stream_capturing()


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

"""Chooses the Triton kernel and the config of a call."""

from __future__ import annotations

import torch

from ..call import Call
from ..device import Device
from . import configs, tune
from . import forward as portable

try:
    from . import hopper
except (ImportError, AttributeError) as error:  # Gluon is experimental: another Triton may use other names
    hopper = None  # type: ignore[assignment]
    hopper_unavailable = f"this Triton's Gluon can't build it: {error}"
else:
    hopper_unavailable = ""


def unsupported_arch(call: Call, device: Device) -> str | None:
    """The reason why the Hopper kernel can't run a call, or None if it can."""
    if device.emulated or device.arch // 10 != 9:
        return f"the Hopper kernel needs sm_90; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    if hopper is None:
        return hopper_unavailable
    return configs.unsupported_arch(call)


def choose(call: Call, device: Device) -> configs.Config:
    """The config for `call` on `device`: from the table of measured configs, else by rule."""
    hopper_runs = unsupported_arch(call, device) is None
    if tune.wanted() and not device.emulated and not tune.known(call, device):
        tune.tune(call, device, forward)
    config = tune.measured(call, device)
    if config is not None and (hopper_runs or isinstance(config, configs.PortableConfig)):
        return config
    return configs.hopper_config(call, device) if hopper_runs else configs.portable_config(call, device)


def forward(call: Call, device: Device, config: configs.Config | None = None, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernel of `config`, or of the config that `choose` gives.

    Args:
        warmup: compile only.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), empty unless call.return_lse.
    """
    config = choose(call, device) if config is None else config
    kernel = hopper if isinstance(config, configs.HopperConfig) else portable
    return kernel.run(call, config, device, warmup=warmup)

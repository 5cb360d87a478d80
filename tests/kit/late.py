"""Attention whose keys and values arrive while it runs, by whoever the test lets bring them."""

from __future__ import annotations

import torch

from fp8attn.call import Call
from fp8attn.cuda import run
from fp8attn.cuda.configs import HopperConfig
from fp8attn.device import Device


class Launch:
    """A launch that begins with heads whose keys and values are there.

    Attributes:
        ready: int32 (key/value heads,), 0 at first: how many have written to a head.
    """

    def __init__(self, call: Call, config: HopperConfig, device: Device) -> None:
        self.config, self.library = config, run.library_of(config, device)
        self.arguments, scratch = run.launch_of(call, device, config, self.library, run.splits_of(call, config, device))
        self.memory = run.memory_of(scratch._replace(counters=1), call.q)
        self.ready = call.q.new_zeros(call.k.shape[0] * call.k.shape[1], dtype=torch.int32)

    def attend(self, call: Call, out: torch.Tensor, lse: torch.Tensor, writers: int) -> None:
        """Attends to a head once `writers` have added 1 to its word of `ready`. out, lse: (B, Hq, Sq, Dv) and (B, Hq, Sq), which are written."""
        counter, parts, flags = self.memory
        self.library.operators.forward.default(
            *self.arguments, call.q, None, call.k, call.k_scale, call.v, call.v_scale, call.v_mean, None, None, out, lse, call.lse_mean, counter,
            parts, flags, call.window_offsets[0] if self.config.window else 0, call.softcap, call.sinks, None, None, self.ready, writers,
        )  # fmt: skip

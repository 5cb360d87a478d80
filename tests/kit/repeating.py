"""Which calls are repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8attn import eager


class Repeats:
    """Whether calls were repeated, one after the other, by what an earlier call had recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits: list[bool] = []
        self._repeat, self._record = eager.repeat, eager.record
        self._now = False
        monkeypatch.setattr(eager, "repeat", self._note)
        monkeypatch.setattr(eager, "record", self._recorded)

    def _note(self, *arguments: Any) -> list[torch.Tensor] | None:
        self._now = False
        out = self._repeat(*arguments)
        self.hits.append(out is not None and not self._now)
        return out

    def _recorded(self, *arguments: Any) -> list[torch.Tensor] | None:
        out = self._record(*arguments)
        self._now = out is not None
        return out

    def last(self) -> bool:
        return self.hits[-1]

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
        self._repeat, self._recorded = eager.repeat, eager._recorded
        self._now = False
        monkeypatch.setattr(eager, "repeat", self._note)
        monkeypatch.setattr(eager, "_recorded", self._record)

    def _note(self, *arguments: Any) -> list[torch.Tensor] | None:
        self._now = False
        out = self._repeat(*arguments)
        if len(arguments) == 3 or arguments[0][0] not in ("sdpa", "varlen_sdpa"):  # these ask twice
            self.hits.append(out is not None and not self._now)
        return out

    def _record(self, *arguments: Any) -> list[torch.Tensor] | None:
        out = self._recorded(*arguments)
        self._now = out is not None
        return out

    def last(self) -> bool:
        return self.hits[-1]

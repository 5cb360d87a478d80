"""What tests of transformers' models share: special tokens and a prompt."""

from __future__ import annotations

import torch

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def prompt(length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences of `length` tokens; the first has `padding` fewer, on the left."""
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padding] = mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}

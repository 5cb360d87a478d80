"""The benchmark of transformers' engine: a row of each implementation, and the error of those that the machine lacks."""

from __future__ import annotations

import json

import pytest
from conftest import GPU

from bench import engine
from models import with_continuous_batching

transformers = pytest.fixture(with_continuous_batching, name="transformers")


@pytest.mark.skipif(GPU, reason="the engine takes a GPU if there is one")
@pytest.mark.usefixtures("transformers")
def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tiny", "--sequences", "2", "--length", "40", "--new", "3"]
    engine.main([*sizes, "--implementations", "fp8attn_flash2", "fp8attn_e4m3_flash2", "flash_attention_9"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["implementation"] for row in rows] == ["fp8attn_flash2", "fp8attn_e4m3_flash2", "flash_attention_9"]
    for row in rows[:2]:
        assert row["prompt_tokens_per_s"] > 0 and row["new_tokens_per_s"] > 0 and row["sequences"] == 2 and row["length"] == 40
    assert "flash_attention_9" in rows[2]["error"] and "prefill_s" not in rows[2]

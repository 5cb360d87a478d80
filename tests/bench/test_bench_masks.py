"""python -m bench masks: what every kind of mask shows, how much of it, attention with it, and the table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from bench import __main__ as command
from bench import masks, report
from bench.cases import Case, square
from bench.errors import Errors
from bench.gates import Gates
from bench.masks import MASKS, WITHOUT, MaskedCase, Result
from bench.peers import KERNEL, OWN, PYTORCH, Attention, Peer, Problem, answer
from bench.timing import Protocol, Timing

CPU = torch.device("cpu")
SMALL = square("small", 2, 2, 136, 64)
FEW_QUERIES = Case("few queries", 3, 2, 1, 40, 200, 32, 32, causal=False)
WIDE = square("wide", 1, 1, 1100, 32)
SHORT = Protocol(rounds=1, milliseconds=1.0, lead_in=1.0)
BAD = Gates.load().bad


def with_mask(case: Case, mask: torch.Tensor | None) -> MaskedCase:
    return MaskedCase(**dataclasses.asdict(case), attn_mask=mask)


def rows_of(mask: torch.Tensor) -> list[list[int]]:
    """Of a bool mask (Sq, Sk): each row's keys."""
    return [row.nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize("case", (SMALL, FEW_QUERIES, WIDE), ids=lambda case: case.name)
def test_documents(case: Case) -> None:
    """A row sees its document up to itself; documents are where the draw puts them."""
    ends = [float(share) * case.kv_length for share in torch.rand(7, generator=torch.Generator().manual_seed(masks.SEED))]
    document = [sum(end < position for end in ends) for position in range(case.kv_length)]
    expected = [[key for key in range(row + 1) if document[key] == document[row]] for row in range(case.q_length)]
    mask = masks.documents(case, CPU)
    assert mask.shape == (case.q_length, case.kv_length) and rows_of(mask) == expected
    assert all(row in keys for row, keys in enumerate(expected)) and len(set(document)) == 8
    assert torch.equal(mask, masks.documents(case, CPU))


def test_a_window_is_of_the_last_1024_keys() -> None:
    keys = rows_of(masks.window(WIDE, CPU))
    assert keys == [list(range(max(0, row - 1023), row + 1)) for row in range(1100)] and len(keys[1099]) == 1024


@pytest.mark.parametrize("batch, lengths", [(1, [100]), (2, [100, 200]), (3, [100, 150, 200])])
def test_padding_is_of_each_sequence(batch: int, lengths: list[int]) -> None:
    mask = masks.padding(dataclasses.replace(FEW_QUERIES, batch=batch), CPU)
    assert mask.shape == (batch, 1, 1, 200) and rows_of(mask[:, 0, 0]) == [list(range(length)) for length in lengths]


def test_anywhere_is_everywhere_the_same_share() -> None:
    case = square("large", 1, 1, 512, 32)
    mask = masks.anywhere(case, CPU)
    assert mask.shape == (512, 512) and mask.dtype == torch.bool and torch.equal(mask, masks.anywhere(case, CPU))
    assert abs(float(mask.float().mean()) - 0.7) < 0.005
    for dim in (0, 1):
        shares = mask.float().mean(dim)
        assert 0.6 < float(shares.min()) < 0.68 and 0.72 < float(shares.max()) < 0.8


def test_what_is_added_shows_the_same() -> None:
    assert masks.added(torch.tensor([[True, False], [False, True]])).tolist() == [[0.0, -torch.inf], [-torch.inf, 0.0]]
    mask, shown = MASKS["documents, added"](SMALL, CPU), masks.documents(SMALL, CPU)
    assert mask.dtype == torch.bfloat16 and torch.equal(mask == 0, shown) and torch.equal(mask == -torch.inf, ~shown)


@pytest.mark.parametrize("heads, slopes", [(8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]), (2, [1 / 16, 1 / 256])])
def test_distances_are_those_of_alibi(heads: int, slopes: list[float]) -> None:
    """Slopes are of the paper's section 3; up to 256 bfloat16 has every distance."""
    mask = masks.distances(square("x", 2, heads, 200, 32), CPU)
    expected = [[[-abs(row - key) * slope for key in range(200)] for row in range(200)] for slope in slopes]
    assert mask.dtype == torch.bfloat16 and torch.equal(mask.double(), torch.tensor([expected], dtype=torch.float64))
    assert torch.equal(mask, mask.transpose(-2, -1))


@pytest.mark.parametrize("case", (SMALL, FEW_QUERIES), ids=lambda case: case.name)
@pytest.mark.parametrize("kind", MASKS)
def test_pytorch_takes_every_mask(kind: str, case: Case) -> None:
    """Its fused backends have masks of two or of four dimensions; no row is without a key."""
    mask = MASKS[kind](case, CPU)
    assert mask.dim() in (2, 4) and mask.dtype in (torch.bool, torch.bfloat16)
    shown = mask if mask.dtype == torch.bool else mask > -torch.inf
    assert shown.expand(case.batch, case.q_heads, case.q_length, case.kv_length).any(-1).all()


def random(shape: tuple[int, ...], share: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < share


def last_pair(case: Case) -> torch.Tensor:
    mask = torch.zeros(case.q_length, case.kv_length, dtype=torch.bool)
    mask[-1, -1] = True
    return mask


BROADCAST: dict[str, Callable[[Case], torch.Tensor]] = {
    "(Sq, Sk), few": lambda case: random((case.q_length, case.kv_length), 1e-4),
    "(B, 1, 1, Sk)": lambda case: torch.arange(case.kv_length) < torch.tensor([100, 129]).view(2, 1, 1, 1),
    "(1, 1, Sq, 1)": lambda case: random((1, 1, case.q_length, 1), 0.01),
    "(Hq, Sq, Sk), few": lambda case: random((3, case.q_length, case.kv_length), 1e-4),
    "(B, Hq, Sq, Sk), few": lambda case: random((2, 3, case.q_length, case.kv_length), 1e-4),
    "added, few": lambda case: masks.added(random((1, 3, case.q_length, case.kv_length), 1e-4)),
    "added, numbers": lambda case: torch.full((2, 1, 1, case.kv_length), -7.0),
    "nothing": lambda case: torch.zeros(case.q_length, case.kv_length, dtype=torch.bool),
    "last pair": last_pair,
}


@pytest.mark.parametrize("lengths", [(64, 128), (128, 384), (200, 300), (1, 130)], ids=str)
@pytest.mark.parametrize("kind", BROADCAST)
def test_shares_are_those_counted(kind: str, lengths: tuple[int, int]) -> None:
    """Blocks of 64 queries and 128 keys, one by one."""
    rows, keys = lengths
    case = Case("x", 2, 3, 3, rows, keys, 32, 32, causal=False)
    mask = BROADCAST[kind](case)
    shown = (mask if mask.dtype == torch.bool else mask != -torch.inf).expand(2, 3, rows, keys)
    blocks = [
        bool(shown[batch, head, row : row + 64, key : key + 128].any())
        for batch in range(2) for head in range(3) for row in range(0, rows, 64) for key in range(0, keys, 128)
    ]  # fmt: skip
    pairs, found = masks.shares_shown(case, mask)
    assert pairs == pytest.approx(int(shown.sum()) / shown.numel()) and found == pytest.approx(sum(blocks) / len(blocks))


def test_a_masked_case_is_the_case_with_a_mask() -> None:
    mask = torch.ones(40, 200, dtype=torch.bool)
    options = with_mask(FEW_QUERIES, mask).options
    assert options.pop("attn_mask") is mask and options == FEW_QUERIES.options == {"is_causal": False, "enable_gqa": True}
    assert with_mask(SMALL, None).options == SMALL.options | {"attn_mask": None}


def errors(relative_l2: float) -> Errors:
    return Errors(max_abs=0.1, mean_abs=0.01, rmse=0.02, relative_l2=relative_l2, bad_share=0.0, sqnr_db=26.0, cosine=0.999)


def result(kind: str, row: str, us: float | None = None, over: float | None = None, **fields) -> Result:
    return Result(SMALL, kind, row, 0.25, 0.5, timing=None if us is None else Timing.of([[us]], 1, "by hand"), against_without=over, **fields)


def test_records_are_flat() -> None:
    record = result("padding", "fp8attn cuda", 30.0, 1.5, errors=errors(0.05)).record()
    assert record == SMALL.record() | {
        "mask": "padding", "backend": "fp8attn cuda", "pairs": 0.25, "blocks": 0.5,
        "p50_us": 30.0, "against_without": 1.5, "relative_l2": 0.05, "refused": None,
    }  # fmt: skip
    refused = result("padding", "SDPA cuDNN", refused="RuntimeError: no").record()
    assert (refused["p50_us"], refused["against_without"], refused["relative_l2"], refused["refused"]) == (None, None, None, "RuntimeError: no")
    for one in (record, refused):
        assert json.loads(report.json_line("masks", one, {"gpu": None})) == {"benchmark": "masks", **one, "gpu": None}


def test_the_table() -> None:
    results = [
        result("documents", WITHOUT, 20.0, 1.0),
        result("documents", "fp8attn cuda", 5.0, 0.25, errors=errors(0.0512)),
        result("documents", "SDPA cuDNN", 77.77, 3.9, errors=errors(0.002)),
        result("ALiBi", WITHOUT, 21.0, 1.0),
        result("ALiBi", "fp8attn cuda", refused="BackendUnavailable: no"),
        result("ALiBi", "SDPA cuDNN", refused="RuntimeError: no"),
    ]
    made = masks.table(results)
    cells = [list(column.cells) for column in made.columns]
    headers = ["mask", "pairs", "blocks", WITHOUT, "fp8attn cuda", "SDPA cuDNN", "cuda × no mask", "relative L2"]
    assert [column.header for column in made.columns] == headers
    assert [column[0] for column in cells] == ["documents", "25%", "50%", "20.0", "5.0", "77.8", "0.25", "0.0512"]
    assert [column[1] for column in cells] == ["ALiBi", "25%", "50%", "21.0", "–", "–", "–", "–"]


def blind(problem: Problem) -> Attention:
    return lambda i: F.scaled_dot_product_attention(*problem.sets[0])


def peer(name: str) -> Peer:
    return next(one for one in (*OWN, *PYTORCH) if one.name == name)


@pytest.mark.parametrize("kind", ("documents", "padding", "ALiBi"))
def test_rows_attend_with_the_mask(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside our kernel without one, PyTorch's where there is no GPU; who doesn't look at the mask is far off."""
    if device.type != "cuda":
        monkeypatch.setattr(masks, "OWN", (peer("SDPA math"),))
    rows = [peer("fp8attn cuda"), peer("fp8attn triton"), peer("SDPA math"), peer("SDPA cuDNN"), Peer("blind", (KERNEL,), blind)]
    first, *found = masks.measure(SMALL, kind, rows, BAD, SHORT, device)
    assert (first.case, first.mask, first.row, first.against_without) == (SMALL, kind, WITHOUT, 1.0) and first.us is not None
    assert [one.row for one in found] == [row.name for row in rows]
    by = {one.row: one for one in found}
    assert by["fp8attn triton"].timing and by["SDPA math"].timing
    for one in found:
        assert (one.case, one.mask) == (SMALL, kind) and (one.pairs, one.blocks) == masks.shares_shown(SMALL, MASKS[kind](SMALL, device))
        if one.refused is not None:
            assert one.row == "SDPA cuDNN" or (one.row == "fp8attn cuda" and device.type != "cuda")
            assert one.timing is one.against_without is None
            continue
        assert one.us is not None and one.against_without == one.us / first.us and one.errors is not None
        least, most = (0.2, 2.0) if one.row == "blind" else (0.0, 0.08 if "fp8attn" in one.row else 0.005)
        assert least < one.errors.relative_l2 < most, one.row
    assert masks.table([first, *found]).row_count == 1


def test_who_runs_out_of_memory_beside_the_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def greedy(i: int) -> torch.Tensor:
        asked.append(i)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("tried to allocate 16 GiB")
        return torch.zeros(2, 2, 136, 64)

    def kernel(problem: Problem) -> Attention:
        assert problem.case == SMALL  # without the mask
        return blind(problem)

    monkeypatch.setattr(masks, "OWN", (Peer("kernel", (KERNEL,), kernel),))
    first, found = masks.measure(SMALL, "padding", [Peer("greedy", (KERNEL,), lambda problem: greedy)], BAD, SHORT, CPU)
    assert first.timing is not None and first.refused is None
    assert found.timing is found.against_without is None and found.refused == "out of memory beside the others"


@pytest.mark.parametrize("kind", MASKS)
def test_flex_attention_is_given_the_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As blocks where it only shows and hides; uncompiled here."""
    compiled, asked = torch.compile, []

    def recorded(*args: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options)
        return flex_attention(*args, **options)

    monkeypatch.setattr(torch, "compile", lambda f, **options: recorded if f is flex_attention else compiled(f, **options))
    problem = Problem.of(with_mask(SMALL, MASKS[kind](SMALL, CPU)), "normal", CPU, rotate=False)
    given = answer(masks.ROWS_OF_TABLE[-1], problem, problem.expected(), BAD)
    assert given.refused is None and given.errors is not None and given.errors.relative_l2 < 0.005
    assert [set(options) for options in asked] == [{"score_mod" if kind == "ALiBi" else "block_mask"}]


def test_the_rows_of_the_table() -> None:
    assert [row.name for row in masks.ROWS_OF_TABLE] == [
        "fp8attn cuda", "fp8attn cuda end to end", "fp8attn triton", "SDPA cuDNN", "SDPA efficient", "FlexAttention",
    ]  # fmt: skip


def test_the_command(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "masks.jsonl"
    words = ["masks", "--case", "D128 full 4k", "--mask", "padding", "--peer", "fp8attn cuda", "--rounds", "2", "--json", str(file)]
    if device.type != "cuda":
        assert command.main(words) == 2 and "masks: needs an NVIDIA GPU" in capsys.readouterr().err and not file.exists()
        return
    assert command.main(words) == 0 and "padding" in capsys.readouterr().out
    assert [json.loads(line)["backend"] for line in file.read_text().splitlines()] == [WITHOUT, "fp8attn cuda", "fp8attn cuda end to end"]
    assert command.main(["masks", "--mask", "nobody's"]) == 2 and "nobody's" in capsys.readouterr().err

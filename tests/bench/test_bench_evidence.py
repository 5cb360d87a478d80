"""The benchmarks that judge numerics: what their inputs are, and that a wrong answer is seen by each."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import GPU

from bench import __main__ as command
from bench import accuracy, cases, model, needle, rows
from bench.errors import Bad, Errors
from bench.gates import Gates
from bench.peers import END_TO_END, Attention, Peer, Problem
from fp8attn import PRECISE, Recipe, quantize, reference, reference_sdpa
from fp8attn.cuda import configs

CPU = torch.device("cpu")
TINY = model.Size(layers=2, heads=2, head_dim=32, context=64, batch=8, steps=40, learning_rate=3e-3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Test processes share the cores; threads of several wait for each other in every small operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rmse_and_cosine_by_hand() -> None:
    expected = torch.tensor([3.0, 4.0])
    errors = Errors.of(torch.tensor([4.0, 3.0]), expected, Bad(0.1, 0.1))
    assert errors.rmse == pytest.approx(1.0) and errors.cosine == pytest.approx(24 / 25)
    assert Errors.of(-expected, expected, Bad(0.1, 0.1)).cosine == pytest.approx(-1.0)
    assert Errors.of(torch.zeros(2), expected, Bad(0.1, 0.1)).cosine == 0.0
    assert math.isnan(Errors.of(torch.tensor([math.nan, 4.0]), expected, Bad(0.1, 0.1)).cosine)
    slightly = expected * (1 + 1e-3 * torch.tensor([1.0, -1.0]))  # 1 - cosine = sin²/2, about 4.6e-7
    assert 1 - Errors.of(slightly, expected, Bad(0.1, 0.1)).cosine == pytest.approx(4.6e-7, rel=0.05)


def test_every_recipe_has_a_row() -> None:
    names = [row.name for row in rows.ROWS]
    assert len(names) == len(set(names)) and rows.BASELINE in names and "FA3 e4m3, modelled" in names
    assert {"fp8attn cuda end to end", "fp8attn triton end to end"} <= set(names)
    assert all(f"fp8attn {name}" in names for name in rows.RECIPES)
    assert len(set(rows.RECIPES.values()) | {Recipe()}) == len(rows.RECIPES) + 1
    with pytest.raises(ValueError, match="no row has 'nobody'"):
        rows.chosen(["nobody"])


@pytest.mark.parametrize("causal", (False, True))
def test_caches_answer_as_attention_does(causal: bool) -> None:
    case = accuracy.by_distribution(300, 2, 32, True) if causal else dataclasses.replace(accuracy.by_length(300, 5), q_heads=2)
    problem = Problem.of(case, "normal", torch.device("cpu"), rotate=False)
    for recipe, worst in ((Recipe(), 0.06), (PRECISE, 0.045)):
        out = rows.from_cache(recipe, problem)(0)
        errors = Errors.of(out, problem.expected(), Bad(0.5, 0.5))
        assert out.shape == problem.expected().shape and 0.005 < errors.relative_l2 < worst


def test_caches_refuse_queries_that_are_not_the_last_tokens() -> None:
    problem = Problem.of(accuracy.by_length(1024, 1024), "normal", torch.device("cpu"), rotate=False)
    with pytest.raises(ValueError, match="1024 queries"):
        rows.from_cache(Recipe(), problem)


def test_the_models_are_of_the_kernels_that_ship() -> None:
    assert {config.exact for config in configs.SPEEDS} == {rows.EXACT}


def test_accuracy_covers_what_goes_wrong() -> None:
    found = accuracy.workloads(gpu=True)
    assert {name for _, name in found} == set(cases.DISTRIBUTIONS)
    for name in cases.DISTRIBUTIONS:
        shapes = {(case.head_dim, case.causal) for case, distribution in found if distribution == name and case.kv_length == 4096}
        assert shapes == {(dim, causal) for dim in (64, 128, 256) for causal in (False, True)}
    lengths = {case.kv_length for case, _ in found}
    assert min(lengths) == 128 and max(lengths) == 524288
    assert max(case.scores for case, _ in found) <= 1 << 27, "float64 would take long"
    assert len({(case.name, name) for case, name in found}) == len(found)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128))
def test_precise_is_at_least_as_exact_as_the_default(dim: int, causal: bool) -> None:
    """By the oracles: of sinks at D 128, causal, 0.91 times the default's error, and less elsewhere. Where nearly all of a row's weight is one key's,
    V's rounding is all that is lost, and both lose it."""
    case = cases.square("x", 1, 1, 512, dim, causal)
    for name in cases.DISTRIBUTIONS:
        problem = Problem.of(case, name, CPU, rotate=False)
        expected = problem.expected(torch.float64)
        default, precise = (
            Errors.of(rows.modelled(recipe, None, None, problem)(0), expected, Bad(0.1, 0.1)).relative_l2 for recipe in (Recipe(), PRECISE)
        )
        assert precise <= default * (1.001 if name in ("one-hot", "constant") else 0.95), name


@pytest.mark.parametrize("dim", (64, 128))
def test_distributions_are_what_they_say(dim: int) -> None:
    case = cases.square("x", 1, 1, 1024, dim)
    weights, values = {}, {}
    for name in cases.DISTRIBUTIONS:
        q, k, v = (x.float() for x in cases.inputs(case, name, CPU))
        weights[name], values[name] = (q @ k.transpose(-2, -1) * dim**-0.5).softmax(-1), v
    sinks = weights["sinks"][..., :4].sum(-1)
    assert sinks.median() > 0.9 and values["sinks"][:, :, :4].abs().mean() < 0.03 * values["sinks"].abs().mean()
    assert weights["one-hot"].diagonal(dim1=-2, dim2=-1).median() > 0.99
    assert torch.equal(weights["constant"], torch.full_like(weights["constant"], 1 / 1024))
    tails = cases.inputs(case, "heavy-tails", CPU)[0].float()
    assert tails.abs().max() > 8 * tails.std() and tails.abs().median() < 0.55 < cases.inputs(case, "normal", CPU)[0].float().abs().median()


def test_the_model_of_short_accumulators_loses_what_was_measured() -> None:
    """FlashAttention-3's FP8 kernel on an H100, V of one sign: relative L2 0.017 at 1k keys, 0.227 at 16k."""
    for keys, measured in ((1024, 0.017), (16384, 0.227)):
        problem = Problem.of(dataclasses.replace(accuracy.by_length(keys, 16), head_dim=64, value_dim=64), "one-sign", CPU, rotate=False)
        expected = problem.expected(torch.float64)
        outs = {bits: rows.by_oracle(rows.cast_by_tensor, bits, None, problem)(0) for bits in (13, None)}
        errors = {bits: Errors.of(out, expected, Bad(0.1, 0.1)).relative_l2 for bits, out in outs.items()}
        assert errors[13] == pytest.approx(measured, rel=0.1) and errors[None] < 0.005


def test_long_enough_accumulators_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    acc, p, v = (torch.randn(shape, generator=generator) for shape in ((2, 5, 7), (2, 5, 100), (2, 100, 7)))
    exact = acc + p @ v
    assert (reference.chained(acc, p, v, 22) - exact).abs().max() < 1e-4
    assert 1e-3 < (reference.chained(acc, p, v, 8) - exact).abs().max() < 1
    assert torch.equal(reference.chained(acc * 0, p * 0, v, 13), acc * 0)
    # one small term beside a large one is cut off 13 bits below it: toward zero, whatever its sign
    one, tiny = torch.ones(1, 1), torch.full((1, 1), 2.0**-14)
    assert reference.chained(one, tiny, one, 13) == 1 and reference.chained(one, -tiny, one, 13) == 1
    assert reference.chained(one, 2 * tiny, one, 13) == 1 + 2.0**-13
    assert reference.chained(one + tiny, 0 * one, one, 13) == 1 and reference.chained(-one - tiny, 0 * one, one, 13) == -1


def test_accumulator_bits_are_the_pipelines() -> None:
    """All keys in one block, so that P are relative to the same scores."""
    q, k, v = cases.inputs(cases.square("x", 1, 2, 256, 32), "one-sign", CPU)
    operands = quantize(q, k, v, recipe=rows.PLAIN)
    plain, _ = reference.pipeline(*operands, arithmetic=reference.Arithmetic(256))
    long, lse = reference.pipeline(*operands, arithmetic=reference.Arithmetic(256, accumulator_bits=22))
    torch.testing.assert_close(long, plain, rtol=1e-5, atol=1e-6)
    assert (reference.pipeline(*operands, arithmetic=reference.Arithmetic(256, accumulator_bits=8))[0] < plain).double().mean() > 0.99


@pytest.mark.skipif(GPU, reason="a GPU's rows take longer")
def test_the_accuracy_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["accuracy", "--case", "512 keys D128", "--distribution", "one-sign", "--distribution", "sinks"]
    assert command.main([*words, "--json", str(out), "--peer", "SDPA flash", "--peer", "fp8attn", "--peer", "modelled"]) == 0
    printed = capsys.readouterr()
    assert "the pipeline's oracle" in " ".join(printed.out.split()) and "modelled" in printed.out
    assert "accuracy: cases: 2, rows: " in printed.err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    by = {(line["distribution"], line["backend"]): line for line in lines}
    assert len(by) == len(lines) and {name for name, _ in by} == {"one-sign", "sinks"}
    for line in lines:
        assert line["refused"] is None and {"rmse", "relative_l2", "cosine", "sqnr_db", "max_abs", "commit", "torch", "date"} <= line.keys()
    assert by["one-sign", "FA3 e4m3, modelled"]["relative_l2"] > 2 * by["one-sign", "fp8attn triton end to end"]["relative_l2"]
    assert not any("cuda" in name for _, name in by)
    assert command.main(["accuracy", "--peer", "nobody"]) == 2
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    for line in lines:
        line["gpu"] = "a GPU"
    out.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert command.main(["accuracy", "--draw", str(out)]) == 0
    picture = (tmp_path / "accuracy.svg").read_text()
    assert "relative L2 error" in picture and "FA3 e4m3, modelled" in picture and "sinks" in picture
    (tmp_path / "empty.jsonl").write_text("")
    assert command.main(["accuracy", "--draw", str(tmp_path / "empty.jsonl")]) == 2
    assert "no errors by length" in capsys.readouterr().err


@pytest.mark.parametrize("share", needle.SHARES)
def test_a_needle_has_its_share_and_exact_attention_finds_it(share: float) -> None:
    hay = needle.haystack(needle.case_of(4096, heads=1, queries=64), share, CPU)
    q, k, v = (x.float() for x in hay.problem.sets[0])
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    largest, place = weights.max(-1)
    assert largest.mean() == pytest.approx(share, rel=0.05) and len(place.unique()) == 64
    assert torch.equal(v[0, 0, place[0, 0]], hay.codes[hay.words[0, 0]])
    assert hay.found(weights @ v) == 1.0
    # a reader of a blurred or shifted answer guesses
    assert hay.found((weights * 0 + 1 / 4096) @ v) < 0.1 and hay.found((weights @ v).roll(1, 2)) < 0.1
    with pytest.raises(ValueError, match="at most keys, 32"):
        needle.haystack(needle.case_of(32, queries=64), share, CPU)


def test_one_long_accumulation_loses_the_needle_and_two_levels_do_not() -> None:
    hay = needle.haystack(needle.case_of(16384, heads=1, queries=16), 1 / 16, CPU)
    found = {bits: hay.found(rows.by_oracle(rows.cast_by_tensor, bits, None, hay.problem)(0)) for bits in (13, None)}
    assert found[13] < 0.3 and found[None] == 1.0
    assert hay.found(rows.modelled(Recipe(), None, None, hay.problem)(0)) == 1.0


@pytest.mark.skipif(GPU, reason="a GPU's rows take longer")
def test_the_needle_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "lines.jsonl"
    assert command.main(["needle", "--keys", "1024", "--peer", "SDPA flash", "--peer", "fp8attn triton", "--json", str(out)]) == 0
    assert "Needles found" in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["backend"] for line in lines] == ["exact, float32", "SDPA flash", "fp8attn triton end to end"] * 2
    assert all(line["found"] == 1.0 and line["trials"] == 32 for line in lines)
    assert command.main(["needle", "--peer", "nobody"]) == 2


def test_the_text_is_real_and_held_out_files_are_others() -> None:
    train, held_out = model.corpus(1 << 20)
    again, _ = model.corpus(1 << 20)
    assert torch.equal(train, again) and len(train) > 10 * len(held_out) > 10_000
    text = bytes(train.tolist())
    assert b"def __init__(self" in text and bytes(held_out[:2000].tolist()) not in text


@pytest.fixture(scope="module")
def small() -> tuple[model.Transformer, torch.Tensor]:
    """A trained model and held-out windows."""
    text, held_out = model.corpus(1 << 18)
    trained = model.train(TINY, text, CPU, 60.0, lambda line: None)
    return trained, held_out[: 4 * (TINY.context + 1)].view(4, -1).long()


def test_a_model_learns_and_a_wrong_attention_costs_it(small: tuple[model.Transformer, torch.Tensor]) -> None:
    trained, windows = small
    values = Peer("wrong", (END_TO_END,), lambda problem: lambda i: problem.sets[0][2])
    exact = Peer("exact", (END_TO_END,), lambda problem: lambda i: reference_sdpa(*problem.sets[0], is_causal=True))
    default = Peer("default", (END_TO_END,), lambda problem: rows.modelled(Recipe(), None, None, problem))
    raising = Peer("raising", (END_TO_END,), lambda problem: 1 / 0)  # type: ignore[arg-type, return-value]
    found = {result.row: result for result in model.evaluate(trained, windows, [values, exact, default, raising], 2)}
    assert found["bfloat16"].gap == 0 and found["bfloat16"].agreement == 1
    assert found["bfloat16"].perplexity is not None and found["bfloat16"].perplexity < 60  # of 256 bytes
    gaps = {name: result.gap for name, result in found.items() if result.gap is not None}
    assert 0 < abs(gaps["exact"]) < 2e-3 and 0 < abs(gaps["default"]) < 5e-3 and gaps["wrong"] > 10 * abs(gaps["default"])
    assert found["raising"].perplexity is None and "division by zero" in (found["raising"].refused or "")


def test_a_model_sees_the_past_only(small: tuple[model.Transformer, torch.Tensor]) -> None:
    trained, windows = small
    changed = windows.clone()
    changed[:, 32:] = (changed[:, 32:] + 1) % 256
    before, after = (trained(x[:, :-1]) for x in (windows, changed))
    torch.testing.assert_close(before[:, :32], after[:, :32], rtol=0, atol=1e-5)
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 0.1


def test_gaps_by_hand() -> None:
    base = model.Predictions(torch.full((4, 8), 1.0, dtype=torch.float64), torch.zeros(4, 8))
    worse = model.Predictions(torch.tensor([1.0, 1.1, 1.0, 1.1], dtype=torch.float64).unsqueeze(-1).expand(4, 8), torch.eye(4, 8))
    found = model.Result.of("x", worse, base)
    assert found.perplexity == pytest.approx(math.exp(1.05)) and found.gap == pytest.approx(math.expm1(0.05))
    assert found.gap_error == pytest.approx(0.1 / math.sqrt(3) / 2) and found.agreement == pytest.approx(28 / 32)


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = (torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(i)).expand(1, 1, 50, 32) for i in range(2))
    scores = model.rotary(q)[0, 0] @ model.rotary(k)[0, 0].T
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(47), rtol=1e-4, atol=1e-4)
    assert abs(scores[0, 3] - scores[0, 0]) > 0.1


@pytest.mark.skipif(GPU, reason="a GPU's rows take longer")
def test_the_model_command(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8ATTN_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "lines.jsonl"
    words = ["model", "--layers", "1", "--heads", "2", "--head-dim", "32", "--context", "128", "--batch", "4", "--steps", "3", "--windows", "2"]
    words += ["--text", "300000", "--peer", "triton", "--peer", "FA3 e4m3, modelled", "--json", str(out)]
    assert command.main(words) == 0
    first = capsys.readouterr()
    assert "step 0" in first.err and "perplexity" in first.out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["backend"] for line in lines] == ["bfloat16", "fp8attn triton end to end", "FA3 e4m3, modelled"]
    assert all(line["refused"] is None and line["parameters"] and line["windows"] == 2 for line in lines) and lines[0]["gap"] == 0
    assert command.main(words) == 0
    assert "step 0" not in capsys.readouterr().err, "it was trained again"
    assert command.main([*words, "--context", "1000000"]) == 2
    assert "there must be more than 1000000" in capsys.readouterr().err


def test_means_over_draws() -> None:
    """Of what single ones have; who refuses one of them has none."""
    case, gates = accuracy.by_length(128, 8), Gates.load()

    def refuses(problem: Problem) -> Attention:
        if not torch.equal(problem.sets[0][0], cases.inputs(case, "normal", CPU)[0]):
            raise ValueError("only the first")
        return lambda i: F.scaled_dot_product_attention(*problem.sets[i])

    peers = [
        Peer("rounded", (END_TO_END,), lambda problem: lambda i: F.scaled_dot_product_attention(*problem.sets[i])),
        Peer("refuses", (END_TO_END,), refuses),
    ]
    single = []
    for seed in range(cases.SEED, cases.SEED + 3):
        problem = Problem.of(case, "normal", CPU, rotate=False, seed=seed)
        single.append(Errors.of(F.scaled_dot_product_attention(*problem.sets[0]), problem.expected(torch.float64), gates.bad))
    found, none = accuracy.measure(case, "normal", peers, gates, CPU, 3)
    relative = [errors.relative_l2 for errors in single]
    assert found.errors is not None and found.errors.relative_l2 == pytest.approx(statistics.fmean(relative)) and len(set(relative)) == 3
    assert found.errors.max_abs == max(errors.max_abs for errors in single)
    assert found.standard_error == pytest.approx(statistics.stdev(relative) / math.sqrt(3)) and found.record()["seeds"] == 3
    assert none.errors is None and none.refused == "ValueError: only the first" and none.record()["relative_l2"] is None
    assert command.main(["accuracy", "--seeds", "0"]) == 2


def test_gates_are_asked_for_bad_elements() -> None:
    """`measure` judges with the limits the other benchmarks use, and leaves rows out that this machine can't have."""
    case = accuracy.by_length(128, 8)
    rounded = Peer("rounded", (END_TO_END,), lambda problem: lambda i: F.scaled_dot_product_attention(*problem.sets[i]))
    cuda = next(row for row in rows.ROWS if row.name == "fp8attn cuda end to end")
    found = accuracy.measure(case, "normal", [rounded] if GPU else [rounded, cuda], Gates.load(), CPU)
    assert [result.row for result in found] == ["rounded"] and found[0].record()["bad_share"] == 0

"""The house: who imports whom, what is documented, what the shipped table holds."""

from __future__ import annotations

import ast
import inspect
import io
import json
import math
import re
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RECORD, dealt, long_tests, recorded, residues

import fp8attn
from fp8attn.device import ARCHITECTURES, Device
from fp8attn.layout import padded_length
from fp8attn.prepare import call_of
from fp8attn.triton import configs, tune

ROOT = Path(fp8attn.__file__).resolve().parent
FLOORS = (
    {"recipe", "device", "ambient", "dtensor", "recording"},
    {"layout", "rotation"},
    {"quantization"},
    {"reference"},
    {"call", "pages"},
    {"paged_tensors", "page_table", "rotary"},
    {"validate", "paged_copies"},
    {"schedule"},
    {"triton", "cuda"},
    {"ops"},
    {"problem_ops"},
    {"eager", "hybrid", "paged_ops", "varlen_ops", "backends"},
    {"prepare"},
    {"paged_tensors_ops", "rotary_ops"},
    {"cache"},
    {"paged"},
    {"api", "explaining"},
    {"info", "calibration", "ahead", "distributed"},
    {"integrations"},
    {"__init__", "__main__"},
)
"""Modules of the package from the ground up: each imports from floors below its own only."""

CPP_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL)
"""A comment of C++, or a literal, in which there is none."""


def floor_of(module: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if module in floor)


def imported(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package, ""][: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {[*base, *name.split(".")][0] for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fp8attn":
            found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fp8attn.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    others = imported(path) - {own, "__version__"}
    if own == "__main__":
        others -= {"info"}
    higher = [other for other in others if floor_of(other) >= floor_of(own)]
    assert not higher, f"{own} imports {higher}, which must not be below it"


def test_the_import_check_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "forward.py").write_text("from .. import quantize\nfrom ..api import sdpa\nfrom .tile import hide\nimport fp8attn.ops\n")
    assert imported(tmp_path / "triton" / "forward.py") == {"quantize", "api", "triton", "ops"}


@pytest.mark.parametrize("name", fp8attn.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(fp8attn, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for method_name, method in inspect.getmembers(thing, inspect.isfunction):
            assert method_name.startswith("_") or inspect.getdoc(method), f"{name}.{method_name} has no docstring"


MOST_ARGUMENTS = 8

USERS = "arguments that users know, as keywords"
OPERATOR = "implements an operator: the arguments are its schema's"
COPIED = "the signature of another library"
MORE_ARGUMENTS = {
    "fp8attn/api.py sdpa": USERS,
    "fp8attn/api.py varlen_sdpa": USERS,
    "fp8attn/api.py reference_sdpa": USERS,
    "fp8attn/paged.py paged_sdpa": USERS,
    "fp8attn/distributed/context_parallel.py context_parallel_sdpa": USERS,
    "fp8attn/distributed/paged.py context_parallel_paged_sdpa": USERS,
    "fp8attn/distributed/varlen.py context_parallel_varlen_sdpa": USERS,
    "fp8attn/api.py _whole": OPERATOR,
    "fp8attn/api.py _fake_whole": OPERATOR,
    "fp8attn/api.py _whole_varlen": OPERATOR,
    "fp8attn/api.py _fake_whole_varlen": OPERATOR,
    "fp8attn/ops.py _quantize": OPERATOR,
    "fp8attn/ops.py _fake_quantize": OPERATOR,
    "fp8attn/ops.py forward_by.forward": OPERATOR,
    "fp8attn/ops.py _fake_forward": OPERATOR,
    "fp8attn/ops.py _half_keys": OPERATOR,
    "fp8attn/ops.py _half_keys_modelled": OPERATOR,
    "fp8attn/ops.py _fake_half_keys": OPERATOR,
    "fp8attn/ops.py _reference_forward": OPERATOR,
    "fp8attn/ops.py _fake_reference_forward": OPERATOR,
    "fp8attn/problem_ops.py from_fp16_by.forward": OPERATOR,
    "fp8attn/problem_ops.py _fake_from_fp16": OPERATOR,
    "fp8attn/varlen_ops.py call_of": OPERATOR,
    "fp8attn/varlen_ops.py _fake_forward": OPERATOR,
    "fp8attn/varlen_ops.py from_fp16_by.forward": OPERATOR,
    "fp8attn/varlen_ops.py _fake_from_fp16": OPERATOR,
    "fp8attn/varlen_ops.py _reference_forward": OPERATOR,
    "fp8attn/varlen_ops.py _fake_reference_forward": OPERATOR,
    "fp8attn/paged_ops.py _append_by.append": OPERATOR,
    "fp8attn/paged_ops.py _fake_append": OPERATOR,
    "fp8attn/paged_ops.py _attend_by.attend": OPERATOR,
    "fp8attn/paged_ops.py _fake_attend": OPERATOR,
    "fp8attn/paged_tensors_ops.py _attend_by.attend": OPERATOR,
    "fp8attn/paged_tensors_ops.py _fake_attend": OPERATOR,
    "fp8attn/rotary_ops.py _turn_by.turn": OPERATOR,
    "fp8attn/rotary_ops.py _fake_turn": OPERATOR,
    "fp8attn/integrations/continuous_batching.py _Flash.func": COPIED,
    "fp8attn/integrations/continuous_batching.py _Flash.varlen_func": COPIED,
    "fp8attn/integrations/continuous_batching.py _Flash.with_kvcache": COPIED,
    "fp8attn/integrations/diffusers.py register.fp8attn_attention": COPIED,
    "fp8attn/integrations/diffusers.py _forward_op.forward": COPIED,
    "fp8attn/integrations/flash_attn.py flash_attn_func": COPIED,
    "fp8attn/integrations/flash_attn.py flash_attn_varlen_func": COPIED,
    "fp8attn/integrations/flash_attn.py flash_attn_with_kvcache": COPIED,
    "tests/bench/test_bench_peers.py flash_attn_interface.flash_attn_func": COPIED,
    "tests/bench/test_bench_peers.py vllm.flash_attn_varlen_func": COPIED,
    "tests/bench/test_bench_peers.py flashinfer.single_prefill_with_kv_cache": COPIED,
    "tests/bench/test_bench_peers.py sageattention_inside.per_thread_int8_triton": COPIED,
    "tests/bench/test_bench_peers.py sageattention_inside.kernel": COPIED,
}
"""Functions that take more than MOST_ARGUMENTS, and why."""


def arguments_of(text: str) -> dict[str, int]:
    """The most arguments of the functions of each qualified name, `self` and `*args` not counted. A Triton kernel has as
    many as it has pointers and sizes, and isn't counted."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, outside: tuple[str, ...]) -> None:
        for inner in ast.iter_child_nodes(node):
            inside = outside
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = (*outside, inner.name)
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [x.arg for x in (*inner.args.posonlyargs, *inner.args.args)]
                count = len(names) + len(inner.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
                if not any(ast.unparse(x).split("(")[0].endswith("jit") for x in inner.decorator_list):
                    found[".".join(inside)] = max(count, found.get(".".join(inside), 0))
            visit(inner, inside)

    visit(ast.parse(text), ())
    return found


def test_functions_take_few_arguments() -> None:
    files = [path for part in ("fp8attn", "bench", "examples", "tests") for path in (ROOT.parent / part).rglob("*.py")]
    assert len(files) > 200
    many = {
        f"{path.relative_to(ROOT.parent)} {name}"
        for path in files
        for name, count in arguments_of(path.read_text()).items()
        if count > MOST_ARGUMENTS
    }
    assert many == MORE_ARGUMENTS.keys()


def test_the_argument_check_sees() -> None:
    text = "@x.jit\ndef kernel(a, b): ...\nclass A:\n def f(self, a, /, b, *c, d, **e):\n  def g(): ...\n@x\nasync def h(a): ...\n"
    assert arguments_of(text) == {"A.f": 3, "A.f.g": 0, "h": 1}


def test_no_machine_paths() -> None:
    here = re.compile("/" + "(work|tmp|home|root)/")
    files = [path for part in ("fp8attn", "bench", "docs", "tests") for path in (ROOT.parent / part).rglob("*.*") if path.suffix in (".py", ".md")]
    assert files
    assert not [path for path in files if here.search(path.read_text())]


def long_prose(path: Path) -> list[int]:
    """Lines of comments and docstrings with more than 120 characters, or 150 where a comment ends a line of code."""
    text = path.read_text()
    lines, prose, behind = text.split("\n"), set[int](), set[int]()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                prose |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
        starts = [token.start for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    else:
        comments = [match for match in CPP_COMMENT.finditer(text) if match[0].startswith(("//", "/*"))]
        starts = [(text.count("\n", 0, x.start()) + 1, x.start() - text.rfind("\n", 0, x.start()) - 1) for x in comments]
        for (line, _), comment in zip(starts, comments, strict=True):
            prose |= {*range(line + 1, line + 1 + comment[0].count("\n"))}
    for line, column in starts:
        (behind if lines[line - 1][:column].strip() else prose).add(line)
    return sorted(line for line in prose | behind if len(lines[line - 1]) > (120 if line in prose else 150))


def test_prose_fits_into_120_characters() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".h", ".cuh", ".cpp")]
    assert {path.suffix for path in files} == {".py", ".h", ".cuh", ".cpp"}
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files for line in long_prose(path)]


def test_the_length_check_sees(tmp_path: Path) -> None:
    long, path, header = "x" * 120, tmp_path / "a.py", tmp_path / "a.h"
    path.write_text(f'"""Doc.\n{long}.\n"""\n# {long}\ny = 1  # {long}\ny = "# {long}"\ny = "{long}"  # {long}\n')
    header.write_text(f'// {long}\nint y;  // {long}\n/*\n{long}.\n*/\nauto y = "// {long}";\nauto y = "{long}";  // {long}\n')
    assert long_prose(path) == [2, 4, 7] and long_prose(header) == [1, 4, 7]


def typical_call(kind: str):
    """A call of a kind of the shipped table, large enough to fill a GPU."""
    match = re.fullmatch(r"d(\d+) dv(\d+) (e4m3|f16) (full|causal|masked)", kind)
    assert match, f"{kind!r} isn't a kind of call"
    dim, value_dim = int(match[1]), int(match[2])
    q, k = (torch.zeros(1, 64, 512, dim, dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(2))
    v = torch.zeros(1, 64, 512, value_dim).to(torch.float8_e4m3fn)
    mask = torch.ones(512, 512, dtype=torch.bool) if match[4] == "masked" else None
    recipe = fp8attn.Recipe(compute=match[3])
    return call_of(q, k, v, mask, is_causal=match[4] == "causal", q_scale=1.0, k_scale=1.0, v_scale=1.0, recipe=recipe)


@pytest.mark.parametrize("name, kind", [(name, kind) for name, kinds in tune.table().items() for kind in kinds])
@pytest.mark.one_in(3)
def test_shipped_configs_fit_and_are_chosen(name: str, kind: str) -> None:
    device = next(device for device in ARCHITECTURES.values() if device.name == name)
    call = typical_call(kind)
    assert tune.kind(call) == kind
    assert configs.unsupported_config(tune.table()[name][kind], call, device) is None
    assert tune.measured(call, device) == tune.table()[name][kind]


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("dim", (16, 64, 128, 256))
@pytest.mark.one_in(6)
def test_candidates_fit_and_rules_choose_what_fits(device: Device, dim: int) -> None:
    q = torch.zeros(1, 4, 300, dim, dtype=torch.bfloat16)
    call = call_of(q, q, q, recipe=fp8attn.Recipe(q="token", smooth_k=False, smooth_v=False))
    space = configs.candidates(call, device)
    assert space and all(configs.fits(config, call, device) for config in space)
    assert any(isinstance(config, configs.HopperConfig) for config in space) == (device.arch == 90)
    assert configs.fits(configs.portable_config(call, device), call, device)
    if device.arch == 90:
        assert configs.fits(configs.hopper_config(call, device), call, device)


@pytest.mark.parametrize(
    "dim, qk, causal, length, consumers, teams",
    ((64, "e4m3", False, 4096, 3, 3), (64, "int8", False, 4096, 2, 1), (128, "e4m3", False, 1024, 2, 1), (128, "e4m3", True, 1024, 2, 2),
     (128, "int8", True, 1024, 2, 2), (128, "e4m3", True, 1025, 2, 1), (256, "e4m3", True, 1024, 2, 1), (64, "e4m3", True, 1024, 3, 3)),
)  # fmt: skip
def test_consumers_and_teams_follow_the_call(dim: int, qk: str, causal: bool, length: int, consumers: int, teams: int) -> None:
    q = torch.zeros(1, 64, length, dim, device="meta", dtype=torch.int8 if qk == "int8" else torch.float8_e4m3fn)
    v = torch.zeros(1, 64, dim, padded_length(length), device="meta", dtype=torch.float8_e4m3fn)
    scale, of_v = torch.zeros(1, 64, length, device="meta"), torch.zeros(1, 64, dim, device="meta")
    query, key = (fp8attn.Quantized(q, scale, "token", "rows", length) for _ in range(2))
    call = call_of(query, key, fp8attn.Quantized(v, of_v, "channel", "values", length), is_causal=causal, recipe=fp8attn.Recipe(qk=qk))
    config = configs.hopper_config(call, ARCHITECTURES[90])
    assert (config.consumers, config.teams) == (consumers, teams)


def test_unsupported_configs_say_why() -> None:
    q = torch.zeros(1, 1, 300, 256, dtype=torch.bfloat16)
    call = call_of(q, q, q)
    hopper, consumer = ARCHITECTURES[90], ARCHITECTURES[120]
    for config, device, reason in (
        (configs.PortableConfig(16, 64, 4, 2), hopper, "4 warps of 16 rows for 16 rows"),
        (configs.PortableConfig(64, 128, 4, 4), consumer, "shared memory"),
        (configs.PortableConfig(64, 96, 4, 2), hopper, "straddle"),
        (configs.PortableConfig(128, 128, 2, 2), hopper, "accumulator registers"),
        (configs.HopperConfig(3, 128, 2, 240), hopper, "an SM has"),
        (configs.HopperConfig(3, 128, 2, 160, teams=2), hopper, "teams"),
    ):
        assert reason in (configs.unsupported_config(config, call, device) or ""), config


def test_parts_are_recorded_together() -> None:
    facts, counts = {"gpu": "one", "commit": "a"}, {"passed": 3, "failed": 0}
    first = recorded({"commit": "older", "passed": 7}, facts, "1/2", counts)
    assert first["parts"] == {"1/2": counts} and first["passed"] == 3
    both = recorded(first, facts, "2/2", {"passed": 4, "failed": 0})
    assert list(both["parts"]) == ["1/2", "2/2"] and both["passed"] == 7
    assert recorded(both, facts, "1/2", {"passed": 1, "failed": 0})["passed"] == 5
    for other in ({"gpu": "two", "commit": "a"}, {"gpu": "one", "commit": "b"}):
        assert recorded(both, other, "1/2", counts)["parts"] == {"1/2": counts}
    assert recorded(both, facts, "1/1", counts)["parts"] == {"1/1": counts}
    assert list(recorded(both, facts, "4/4", counts)["parts"]) == ["1/2", "4/4"]


@pytest.mark.anywhere  # where there is a GPU it is about to be made
def test_the_gpu_record_is_green_and_of_all_parts() -> None:
    record = json.loads(RECORD.read_text())
    parts = record.get("parts", {"1/1": record})
    modulus = math.lcm(*(int(part.split("/")[1]) for part in parts))
    assert sorted(i for part in parts for i in residues(part, modulus)) == list(range(modulus))
    assert record["failed"] == 0 < record["passed"] == sum(one["passed"] for one in parts.values())


def test_tests_that_took_long_come_first() -> None:
    seconds = long_tests([("a", 1.0), ("b", 50.0), ("a", 2.5), ("c", 2.9)])
    assert list(seconds.items()) == [("b", 50.0), ("a", 3.5)]
    tests = [SimpleNamespace(nodeid=name, obj=None, get_closest_marker=lambda _: None, fixturenames=[]) for name in "acxyzb"]
    assert [[x.nodeid for x in dealt(tests, 2, seconds)[part]] for part in (slice(0, 3), slice(3, 6))] == [["a", "c", "x"], ["b", "y", "z"]]


@pytest.mark.parametrize("workers", (1, 3, 20))
@pytest.mark.parametrize(
    "whole, drawn, gpu, others", ((0, 40, 60, 900), (0, 0, 0, 7), (0, 5, 0, 0), (0, 2, 1, 30), (0, 21, 20, 2), (25, 40, 60, 900))
)
def test_dealing_out_loses_no_test(whole: int, drawn: int, gpu: int, others: int, workers: int) -> None:
    """Each part begins with as many long tests as another, the drawn ones first; but the first one with those that take the whole GPU."""
    kinds = [0] * others + [1] * gpu + [2] * drawn + [3] * whole
    tests = [
        SimpleNamespace(
            kind=kind,
            nodeid="test",
            obj=SimpleNamespace(is_hypothesis_test=kind == 2),
            get_closest_marker=lambda name, kind=kind: kind in (1, 3) or None,
            fixturenames=["whole_gpu"] * (kind == 3),
        )
        for kind in kinds
    ]
    order = dealt(tests, workers, {})
    assert len(order) == len(tests) and {id(x) for x in order} == {id(x) for x in tests}
    counts = []
    for i in range(workers):
        # xdist.scheduler.worksteal: each gets an equal part of what is left
        size = len(order) // (workers - i)
        part, order = [x.kind for x in order[:size]], order[size:]
        assert part == sorted(part, reverse=True)
        assert part.count(3) == (whole if i == 0 else 0)
        if i > 0 or not whole:
            counts.append(sum(kind > 0 for kind in part))
    assert not counts or max(counts) - min(counts) <= 1

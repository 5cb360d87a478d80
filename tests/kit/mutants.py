"""Mutants of the CUDA kernels: a text in their sources, and its replacement."""

from __future__ import annotations

STALE = ("tile/softmax.h", "m = m_new;\n  return alpha;", "if (m == NOTHING) m = m_new;\n  return alpha;")


MUTANTS = {
    "mask off by one": ("tile/mask.h", "min(row, q_length - 1) + causal_offset + 1)", "min(row, q_length - 1) + causal_offset + 2)"),
    "end of keys forgotten": ("tile/mask.h", "max(min(kv_length, min(row", "max(min(1 << 30, min(row"),
    "missing rescale": ("tile/softmax.h", "alpha = ptx::exp2_approx(m - m_new);", "alpha = 1.0f;"),
    "stale maximum": STALE,
    "m never falls": ("tile/softmax.h", "* factor[r];", "* factor[r], m_new[r] = fmaxf(m_new[r], m[r]);"),
    "m falls below zero": ("tile/softmax.h", "__vimax3_s32(bits(0), bits(1), 0)", "max(bits(0), bits(1))"),
    "wrong scale": ("hopper_mainloop.h", "(by_key ? 1.0f : C.int8 ? fabsf(k_scale) : k_scale)", "1.0f"),
    "scale of another block": ("hopper_producer.h", "scale_at(k_scale += (after - n) * scale_step)", "scale_at(k_scale)"),
    "scale of the block before": ("hopper_mainloop.h", "read(shared.k_scale[ring.stage].next)", "read(shared.k_scale[ring.stage].own)"),
    "scale of another row": ("hopper_mainloop.h", "scales.row_scale[f.row + 8 * r]", "scales.row_scale[f.row]"),
    "unpermuted V": ("tile/softmax.h", "0x6420", "0x4620"),
    "P truncated, not rounded": ("ptx/convert.h", "cvt.rn.relu.f16x2.f32", "cvt.rz.relu.f16x2.f32"),
    "sums of the wrong ones": ("tile/attend.h", "= FOUR_ONES;", "= FOUR_ONES + 1;"),
    "output in the wrong place": ("tile/staged_output.h", "by_rows() ? 0 : row % 8;", "by_rows() ? 0 : row % 4;"),
    "mean of the wrong channel": ("tile/staged_output.h", "fmaf(b * inverse[r], scale.y, mean.y)", "fmaf(b * inverse[r], scale.y, mean.x)"),
}
"""Mutants of the Hopper kernel: file, text in it, replacement."""


SPLIT, NATIVE, SPECIALISED, FUSED, SCALAR, WMMA = (
    "11 register operands",
    "10 native e4m3",
    "7 warp-specialised",
    "4 fused softmax",
    "0 scalar",
    "3 wmma-pv",
)


NEVER_FALLS = ("tile/softmax.h", "fabsf(m) >= FALL ? m : m >= 0.0f ? 0.0f : -FALL", "m")


RUNG_MUTANTS = {
    "scores that no lane wrote": (SCALAR, "tile/unfused.h", "for (int j = 0; j < keys; ++j) shared.s", "for (int j = 0; j < keys - 1; ++j) shared.s"),
    "end of keys forgotten, unfused": (SCALAR, "tile/unfused.h", "if (key >= end)\n", "if (key >= end + 1)\n"),
    "missing rescale, unfused": (
        SCALAR,
        "tile/unfused.h",
        "\n        shared.l[row] = fmaf(shared.l[row], alpha, sum)",
        "\n        shared.l[row] = shared.l[row] + sum",
    ),
    "missing rescale of fragments": (WMMA, "tile/unfused.h", "columns.x[i] *= alpha.x[i];", "columns.x[i] *= 1.0f;"),
    "half a row": (WMMA, "tile/unfused.h", "sum += __shfl_xor_sync(~0u, sum, 16);", ""),
    "channels of another fragment": (WMMA, "tile/unfused.h", "v.at(channel, key / 8)", "v.at(channel ^ 16, key / 8)"),
    "halves in the wrong order": (
        FUSED,
        "tile/shared_tile.h",
        "halves_of_e4m3(codes.y, first.y, second.y)",
        "halves_of_e4m3(codes.y, second.y, first.y)",
    ),
    "scale of another block": (FUSED, "tile/fused.h", "key / SCALE_BLOCK * p", "start / (2 * SCALE_BLOCK) * p"),
    "scale of another row": (FUSED, "tile/fused.h", "shared.scales.row_scale[f.row + 8 * r]", "shared.scales.row_scale[f.row]"),
    "missing rescale": (FUSED, "tile/online_softmax.h", "l[r] *= alpha[r];", ""),
    "stale maximum": (FUSED, *STALE),
    "m never falls": (FUSED, *NEVER_FALLS),
    "m never falls, unfused": (SCALAR, *NEVER_FALLS),
    "unrounded P": (FUSED, "tile/products.h", "constexpr (E4M3)", "constexpr (false)"),
    "mask off by one": (FUSED, "tile/mask.h", "min(row, q_length - 1) + causal_offset + 1)", "min(row, q_length - 1) + causal_offset + 2)"),
    "a stage too early": (
        FUSED,
        "portable.cuh",
        "stage == 0 ? ahead : stage - 1);\n    ptx::cp_async_commit();\n    if",
        "stage);\n    ptx::cp_async_commit();\n    if",
    ),
    "producers a stage too early": (
        SPECIALISED,
        "portable.cuh",
        "stage == 0 ? ahead : stage - 1);\n      ptx::cp_async_commit();\n      ptx",
        "stage);\n      ptx::cp_async_commit();\n      ptx",
    ),
    "swizzle of another row": (SPECIALISED, "tile/shared_tile.h", "lane_offset ^ 16 * chunks :", "lane_offset + 16 * chunks :"),
    "unpermuted V": (
        NATIVE,
        "tile/products.h",
        "a[2 * h + r] = ptx::e4m3x4(x[0], x[1], x[4], x[5])",
        "a[2 * h + r] = ptx::e4m3x4(x[0], x[4], x[1], x[5])",
    ),
    "output not rescaled": (NATIVE, "tile/fused.h", "alpha[t][i / 2 % 2], fresh", "1.0f, fresh"),
    "a part's weight": (SPLIT, "tile/softmax.h", "theirs = ptx::exp2_approx(their_m - m_new);", "theirs = 1.0f;"),
    "a part's sum": (SPLIT, "tile/softmax.h", "fmaf(sum, mine, their_sum * theirs)", "sum * mine"),
    "values of another part": (SPLIT, "tile/fused.h", "0, first_key / 16 * (", "0, 0 * ("),
}
"""Mutants of the portable kernel: the rung that detects it, then file, text and replacement."""


FUSED_SMALL = "fused_small"


FUSED_SMALL_MUTANTS = {
    "scale of another block": (FUSED_SMALL, "fused_small.cuh", "&shared.k_largest[block], {", "&shared.k_largest[BLOCKS - 1 - block], {"),
    "mean of another slice": (
        FUSED_SMALL,
        "fused_small.cuh",
        "&shared.key_mean[part.slice * QUADS + quad]",
        "&shared.key_mean[(3 - part.slice) * QUADS + quad]",
    ),
    "means not awaited": (FUSED_SMALL, "fused_small.cuh", "  ptx::mbarrier_wait(&shared.means_full, 0);\n  finish", "  finish"),
    "an LSE without the mean": (FUSED_SMALL, "fused_small.cuh", "own = rotated_mean(shared, threadIdx.x % (PART / 4))", "own = {}"),
    "an LSE with the mean of other channels": (
        FUSED_SMALL,
        "fused_small.cuh",
        "const int from = member * QUADS + i;",
        "const int from = i;",
    ),
    "bytes of another token": (FUSED_SMALL, "fused_small.cuh", "upper ? 0x3276 : 0x5410", "upper ? 0x7632 : 0x1054"),
    "columns of another slice": (FUSED_SMALL, "tile/key_block.h", "keys + 2 * step * (column_bytes / 16)", "keys + step * (column_bytes / 16)"),
    "mean not added back": (
        FUSED_SMALL,
        "fused_small.cuh",
        "own.stats.mean[c] = own.shift[c] = mean;",
        "own.stats.mean[c] = 0, own.shift[c] = mean;",
    ),
    "a NaN unseen": (FUSED_SMALL, "tile/key_block.h", "nonfinite >> its_key % LANES & 1 ? NAN_CODES<false> : codes", "codes"),
    "tokens that don't exist": (FUSED_SMALL, "tile/key_block.h", "if (exists(pair, i % 2)) largest = fmaxf", "largest = fmaxf"),
    "scale of another row": (FUSED_SMALL, "tile/quantize.h", "scale[row(known())] = largest", "scale[row(0)] = largest"),
    "queries not divided as keys are": (FUSED_SMALL, "tile/quantize.h", "restores * PART", "restores"),
    "signs of other channels": (FUSED_SMALL, "tile/rotate.h", "uint32_t(SIGNS >> from) ^ parity(to", "parity(to"),
}
"""Mutants of the kernel that also quantizes: the kernel, then file, text and replacement."""


INT8 = "int8"


INT8_MUTANTS = {
    "sums taken for scores": ("tile/subnormal_softmax.h", "s[i] = float(sums[i] - start);", "s[i] = float(sums[i]);"),
    "converted sums taken for subnormals": ("tile/subnormal_softmax.h", "s[i] = __int_as_float(sums[i]);", "s[i] = float(sums[i]);"),
    "sums that start at zero": ("hopper.cuh", "(shared.side.ones)[threadIdx.x] = ~0u;", "(shared.side.ones)[threadIdx.x] = 0;"),
    "maxima of sums": ("tile/subnormal_softmax.h", "__fmul_rn(float(top - BEGIN), factor[r])", "__fmul_rn(float(top), factor[r])"),
    "maxima of sums, not int_max_ok": (
        "tile/subnormal_softmax.h",
        "-INFINITE : float(top - BEGIN) * factor[r]",
        "-INFINITE : float(top) * factor[r]",
    ),
    "a largest sum below the start": ("tile/subnormal_softmax.h", "shfl_xor_sync(~0u, largest, 2), least)", "shfl_xor_sync(~0u, largest, 2), 0)"),
    "a sum that isn't its row's": ("tile/subnormal_softmax.h", "peak[r] = __int_as_float(top);", "peak[r] = __int_as_float(top - 4096);"),
    "a mark taken for a sign": ("hopper_mainloop.h", "C.int8 ? fabsf(k_scale) : k_scale", "k_scale"),
    "keys that aren't finite forgotten": ("hopper_mainloop.h", "row_sum(o, o_second, r) = NAN;", ";"),
    "the key before": ("hopper_mainloop.h", "first_bits(row_end[row] - start - i) &", "first_bits(row_end[row] - start - i + 1) &"),
    "queries that aren't finite forgotten": ("hopper_mainloop.h", "r), nonfinite[r]);", "r), false);"),
}
"""Mutants of the Hopper kernel for int8."""


READY = "ready"


READY_MUTANTS = {
    "keys that aren't there yet": ("hopper_producer.h", "if (C.fuse_q_quant && p.ready != nullptr) wait_until_ready(p, tile);", ""),
    "keys of another head": ("hopper_producer.h", "tile.batch * p.kv_heads + tile.kv_head) < p.ready_ctas", "0 * tile.batch) < p.ready_ctas"),
    "a part of the keys": ("hopper_producer.h", "< p.ready_ctas", "< p.ready_ctas - 1"),
    "a mean that isn't there yet": (
        "hopper_producer.h",
        "    if (p.ready != nullptr) wait_until_ready(p, tile);\n    if (has_keys",
        "    if (has_keys",
    ),
    "a mean that isn't waited for": ("hopper_mainloop.h", "ptx::mbarrier_wait(&shared.mean.full[round % 2], round / 2 % 2);", ""),
}
"""Mutants of attention that starts while keys and values are still being quantized."""


GENERAL = "general"


GENERAL_MUTANTS = {
    "mean of queries forgotten": ("hopper_mainloop.h", "if (p.bias != nullptr) keys.add_bias(", "if (false) keys.add_bias("),
    "mean of other queries": ("tile/key_metadata.h", "tile.head, row) + start", "tile.head, tile.first_row) + start"),
    "means of the next key": ("tile/key_metadata.h", "factor[r], pair.y)", "factor[r], pair.x)"),
    "means without the softmax scale": ("tile/key_metadata.h", "factor[0] = factor[1] = unit;", "factor[0] = factor[1] = 1.0f;"),
    "means times the scale twice": ("hopper_mainloop.h", "!C.general || p.bias != nullptr ? 1.0f : p.score_scale", "p.score_scale"),
    "keys' own scales forgotten": ("hopper_mainloop.h", "if (by_key) keys.scale_scores(s, f);", ""),
    "scales of the next key": ("tile/key_metadata.h", "*= pair.y;", "*= pair.x;"),
    "scales of other keys": ("tile/key_metadata.h", "at + (start + i) * p.k_scale_strides[2]", "at + i * p.k_scale_strides[2]"),
}
"""Mutants of the Hopper kernel's general instances, for smoothed queries and for one scale per key."""


MASKED = "masked"


MASKED_MUTANTS = {
    "nothing hidden": ("tile/key_metadata.h", "if (!(seen >> i & 1))", "if (false)"),
    "bits of another row": ("tile/key_metadata.h", "min(f.row + 8 * r, p.mask_rows - 1)", "f.row"),
    "what others are shown": ("tile/kv_blocks.h", "mask >> BLOCK_MASK_BITS * consumer;", "mask;"),
    "bits that others are shown": ("tile/key_metadata.h", "tile.first_row / ROWS + consumer", "tile.first_row / ROWS"),
    "blocks left out that show something": ("tile/kv_blocks.h", "mask_ != 0", "(mask_ & 15) != 0"),
    "scale of a block that is left out": ("hopper_producer.h", "k_scale += (after - n) * scale_step", "k_scale += scale_step"),
    "values of a block that is left out": (
        "hopper_producer.h",
        "first_value(tile) + (n - shard.first()) * KEYS",
        "first_value(tile) + (after - 1) * KEYS",
    ),
    "all is shown": ("block_mask.cuh", "hides |= exists && !visible", "hides |= false"),
}
"""Mutants of the Hopper kernel's instances for boolean masks."""


ADDED = "added"


ADDED_MUTANTS = {
    "nothing added": ("tile/added_mask.h", "fmaf(at[0], factor[i % 2], two.x)", "at[0] * factor[i % 2]"),
    "numbers of the next key": ("tile/added_mask.h", "fmaf(at[1], factor[i % 2], two.y)", "fmaf(at[1], factor[i % 2], two.x)"),
    "chunks where they would lie unswizzled": ("tile/added_mask.h", "(chunk ^ row % 8)", "chunk"),
    "numbers of other keys": ("tile/added_mask.h", "2 * (kv_block.index * KEYS + i * SLOT_KEYS)", "2 * i * SLOT_KEYS"),
    "numbers of other queries": ("tile/added_mask.h", "row = tile.first_row + consumer * ROWS;", "row = tile.first_row;"),
    "numbers taken for exponents": ("hopper_mainloop.h", "factor[0] = factor[1] = LOG2E;", "factor[0] = factor[1] = 1.0f;"),
    "what is added isn't seen": ("block_mask.cuh", "adds |= exists && visible && value != 0.0f", "adds |= false"),
    "the next key's from memory": ("tile/added_mask.h", "mask_value(two.of[i])", "mask_value(two.of[0])"),
    "any others from memory": ("tile/added_mask.h", "key < row.keys ? row.at[key * apart]", "key < row.keys ? row.at[0]"),
    "the lowest numbers hide": ("block_mask.cuh", "visible = value != -INFINITE", "visible = value * LOG2E != -INFINITE"),
    "the lowest numbers overflow": (
        "tile/softmax.h",
        "ptx::max_nan(__fmul_rn(s[i], factor[i / 2 % 2]), LOWEST_SCORE)",
        "__fmul_rn(s[i], factor[i / 2 % 2])",
    ),
    "an offset lost next to low numbers": (
        "tile/softmax.h",
        "any_large(m)) make_relative(factor, m, origin, s);",
        "any_large(m)) scale_by_row(factor, s);",
    ),
}
"""Mutants of the Hopper kernel's instances for masks that are added to scores."""


WINDOW = "window"


WINDOW_MUTANTS = {
    "a key too early": ("tile/mask.h", "min(row, q_length - 1) + first_offset, 0)", "min(row, q_length - 1) + first_offset - 1, 0)"),
    "a key too late": ("tile/mask.h", "if (8 * j + 1 < limit)", "if (8 * j < limit)"),
    "the first block whole": ("tile/attend.h", "edge = (visible.begin(row + ROWS - 1)", "edge = (visible.begin(row)"),
    "another consumer's first block": ("hopper_mainloop.h", "n < wg_tile.begin; ring", "n + 1 < wg_tile.begin; ring"),
    "scale of the first block": ("hopper_producer.h", "(first_page(tile) + begin) * scale_step", "first_page(tile) * scale_step"),
    "first keys hidden in every row": ("tile/mask.h", "begin(f.row + 8 * r) - start", "begin(f.row + 8) - start"),
    "sink in base 2": ("tile/score_mod.h", "merge_rows(m, l, sink * LOG2E,", "merge_rows(m, l, sink,"),
    "sink of another head": ("hopper_mainloop.h", "return p.sinks + query_head_of(tile, consumer);", "return p.sinks;"),
    "sink beside scores without the mean": (
        "hopper_mainloop.h",
        "SinkRow::add<>(rows.m[0], rows.l[0], logit - rows.mean_scores.x)",
        "SinkRow::add<>(rows.m[0], rows.l[0], logit)",
    ),
    "values' mean with all weight": ("tile/score_mod.h", "return {mine * inverse, mine * keys * inverse};", "return {mine * inverse, 1.0f};"),
    "sums of keys not rescaled": ("tile/score_mod.h", "mine * keys * inverse};", "keys * inverse};"),
}
"""Mutants of the Hopper kernel's instances for windows."""


SOFTCAP = "softcap"


SOFTCAP_MUTANTS = {
    "cap without the mean": ("tile/capped_softmax.h", "fmaf(largest, scale, mean)", "largest * scale"),
    "a row's mean for both": ("hopper_mainloop.h", "mean_score(p, wg_tile.tile, row + 8)", "mean_score(p, wg_tile.tile, row)"),
    "cap of natural scores": ("tile/capped_softmax.h", "p.inverse_softcap * (1 / LOG2E)", "p.inverse_softcap"),
    "no cap": ("tile/capped_softmax.h", "ptx::tanh_approx(fmaf(x, scale, mean))", "fmaf(x, scale, mean)"),
    "curved distances by tanh": ("tile/capped_softmax.h", "    curve = 0;\n", ""),
    "NaN as a low score": ("tile/capped_softmax.h", "code = ptx::max_nan(", "code = fmaxf("),
}
"""Mutants of the Hopper kernel's instances for soft caps."""


FINE_SOFTCAP_MUTANTS = {
    "a straight line": ("tile/capped_softmax.h", "curve = ptx::half_twice(second * (-CAP_CODES * CODE));", "curve = 0;"),
    "no cubic term": ("tile/capped_softmax.h", "-CAP_CUBIC, 2 * CAP_CUBIC / 3", "0.0f, 0.0f"),
    "no row near the cap": ("tile/capped_softmax.h", "fall >= CAP_LEAST_FALL && ", ""),
    "scores below zero as above": ("tile/capped_softmax.h", "return fits && t >= 0.0f", "return fits"),
    "hidden keys at the cap": ("tile/capped_softmax.h", "x == -INFINITE ? 1.0f : ", ""),
    "negative scores as integers": ("tile/capped_softmax.h", "if (__any_sync(~0u, min(bits[0], bits[1]) < 0))", "if (false)"),
}
"""Those that only emulation sees, where scores are exact."""


VARLEN_MUTANTS = {
    "keys of the first sequence": ("hopper_producer.h", "first_key(tile) + (n - shard", "(n - shard"),
    "pages of the first sequence": ("hopper_producer.h", "first_value(tile) + (n - shard", "(n - shard"),
    "scales of the first sequence": ("hopper_producer.h", "(first_page(tile) + begin) * scale_step", "begin * scale_step"),
    "means of the first sequence": ("tile/seq_len.h", "return tile.sequence;", "return 0;"),
    "rows of the next sequence in a box": ("tile/staged_output.h", "return first_row + OUTPUT_ROWS > row_end;", "return false;"),
    "rows of the next sequence, one by one": ("tile/staged_output.h", "|| row >= row_end ||", "|| row > row_end ||"),
    "rows with TMA's swizzle": ("tile/staged_output.h", "by_rows() ? 0 : row % 8;", "row % 8;"),
    "rows that only one lane waits for": ("tile/staged_output.h", "if (PACKED || lane == 0) {  //", "if (lane == 0) {  //"),
    "rows that are in no group": (
        "tile/staged_output.h",
        "if (PACKED || lane == 0) ptx::tma_store_commit();",
        "if (lane == 0) ptx::tma_store_commit();",
    ),
    "an LSE of the next sequence": ("tile/attend.h", "left = row_end() - row;", "left = p.q_length - row;"),
    "aligned to a key too late": ("tile/seq_len.h", "aligned = tile.kv_length - tile.q_end;", "aligned = tile.kv_length - tile.q_end + 1;"),
    "all keys of the tensor": ("tile/seq_len.h", "found.kv_length = tile.kv_length;", "found.kv_length = p_.kv_length;"),
    "a tile less": ("tile/seq_len.h", "p.tile_table[int(TableHeader::tiles)];", "p.tile_table[int(TableHeader::tiles)] - 1;"),
    "all rows of a tile of one head": ("tile/seq_len.h", "if (++head == sharing)", "if (true)"),
    "a tile that begins with the first head": ("tile/seq_len.h", "head = field(TileField::head);", "head = 0;"),
    "keys of the first consumer only": ("hopper_storage.h", "first_row_of(tile, C.consumers - 1)", "first_row_of(tile, 0)"),
    "one block for a consumer's last rows": ("tile/attend.h", "row < visible.q_length ?", "row + ROWS <= visible.q_length ?"),
}
"""Mutants of the Hopper kernel's instances for packed sequences. tests/emulated/test_varlen_emulated.py sees them."""

VARLEN_FUSED_Q_MUTANTS = {
    "keys' mean of the first sequence": ("tile/seq_len.h", "int64_t(sequence_of(tile)) * p.kv_heads", "int64_t(tile.batch) * p.kv_heads"),
    "a mean that nobody has written": (
        "tile/seq_len.h",
        "has_keys(const PackedTile& tile) { return tile.kv_length > 0; }",
        "has_keys(const PackedTile&) { return true; }",
    ),
    "sink of another head": ("hopper_mainloop.h", "p.sinks + query_head_of(tile, consumer), true", "p.sinks, true"),
    "no rows behind the first sequence": ("hopper_mainloop.h", "tile.exists() ? lengths.row_end(p, tile) : 0", "tile.exists() ? 70 : 0"),
}
"""The same where the kernel quantizes queries, which start at those of 70 tokens."""

WITHOUT_KEYS = ("tile/seq_len.h", "tile.kv_length > 0 ? tile.page * KEYS : 1 << 30", "tile.page * KEYS")
"""A mutant that only sinks show: it multiplies P = 0 by values that nobody has written."""


EVERY = {name: (None, *mutant) for name, mutant in MUTANTS.items()}


EVERY |= {f"{mutant[0]}: {name}": mutant for name, mutant in (RUNG_MUTANTS | FUSED_SMALL_MUTANTS).items()}


EVERY |= {f"{READY}: {name}": (READY, *mutant) for name, mutant in READY_MUTANTS.items()}


EVERY |= {f"{INT8}: {name}": (INT8, *mutant) for name, mutant in INT8_MUTANTS.items()}


EVERY |= {f"{GENERAL}: {name}": (GENERAL, *mutant) for name, mutant in GENERAL_MUTANTS.items()}


EVERY |= {f"{MASKED}: {name}": (MASKED, *mutant) for name, mutant in MASKED_MUTANTS.items()}


EVERY |= {f"{ADDED}: {name}": (ADDED, *mutant) for name, mutant in ADDED_MUTANTS.items()}


EVERY |= {f"{WINDOW}: {name}": (WINDOW, *mutant) for name, mutant in WINDOW_MUTANTS.items()}


EVERY |= {f"{SOFTCAP}: {name}": (SOFTCAP, *mutant) for name, mutant in SOFTCAP_MUTANTS.items()}

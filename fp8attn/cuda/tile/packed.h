// Where packed sequences lie: recipe.Packed. P has `cu_seqlens`, and `length`: all tokens.
#pragma once

namespace fp8attn {

// The first token of a sequence. Numbers are read from L2: the grids before may have written them.
template <class P>
__device__ int begin_of(const P& p, int sequence) {
  return min(max(__ldcg(p.cu_seqlens + sequence), 0), p.length);
}

// layout.first_unit: the place of a sequence's first unit of UNIT tokens.
template <int UNIT>
__device__ int first_place(int begin, int sequence) {
  return begin / UNIT + sequence;
}

// The one of so many sequences that has the place of a unit. Called by whole warps.
template <int UNIT, class P>
__device__ int sequence_at(const P& p, int sequences, int place) {
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < sequences; first += 32) {
    const int sequence = first + threadIdx.x % 32;
    before += __popc(__ballot_sync(~0u, sequence < sequences && first_place<UNIT>(begin_of(p, sequence), sequence) <= place));
  }
  return max(before - 1, 0);
}

}  // namespace fp8attn

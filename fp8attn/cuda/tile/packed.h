// Where packed sequences lie: recipe.Packed. P has `cu_seqlens`, `seqused`, and `length`: all tokens.
#pragma once

namespace fp8attn {

// The first token of a sequence. Numbers are read from L2: the grids before may have written them.
template <class P>
__device__ int begin_of(const P& p, int sequence) {
  return min(max(__ldcg(p.cu_seqlens + sequence), 0), p.length);
}

// Where one of packed sequences lies.
struct PackedSequence {
  int begin, length;  // first token, number of tokens

  __device__ PackedSequence(int begin, int length) : begin(begin), length(length) {}

  template <class P>
  __device__ PackedSequence(const P& p, int sequence) : begin(begin_of(p, sequence)), length(max(begin_of(p, sequence + 1) - begin, 0)) {
    if (p.seqused != nullptr) length = min(max(__ldcg(p.seqused + sequence), 0), length);
  }
};

// layout.first_unit: the place of a sequence's first unit of UNIT tokens.
template <int UNIT>
__device__ int first_place(int begin, int sequence) {
  return begin / UNIT + sequence;
}

// The one of so many sequences that has the place of a unit: a search in which each lane looks at one of 32 candidates.
// Called by whole warps.
template <int UNIT, class P>
__device__ int sequence_at(const P& p, int sequences, int place) {
  int first = 0;
#pragma unroll 1
  for (int left = sequences, step; left > 1; left = min(left, step)) {
    step = (left + 31) / 32;
    const int candidate = threadIdx.x % 32 * step;
    const bool before = candidate < left && first_place<UNIT>(begin_of(p, first + candidate), first + candidate) <= place;
    const int chosen = max(__popc(__ballot_sync(~0u, before)) - 1, 0) * step;
    first += chosen, left -= chosen;
  }
  return first;
}

// What lies at the place of a unit of packed sequences: a sequence, its first token and its tokens, and which of its
// units; -1: none.
struct alignas(16) PackedUnit {
  int sequence, begin, length, number;

  // From L2, where a grid before has written it.
  __device__ static PackedUnit load(const PackedUnit& from) {
    const int4 words = __ldcg(reinterpret_cast<const int4*>(&from));
    return {words.x, words.y, words.z, words.w};
  }
};

// A search. Called by whole warps.
template <int UNIT, class P>
__device__ PackedUnit packed_unit_at(const P& p, int place) {
  const int sequence = sequence_at<UNIT>(p, p.sequences, place);
  const PackedSequence found(p, sequence);
  const int number = place - first_place<UNIT>(found.begin, sequence);  // below 0 only if starts aren't in order
  return {sequence, found.begin, found.length, number >= 0 && number * UNIT < found.length ? number : -1};
}

}  // namespace fp8attn

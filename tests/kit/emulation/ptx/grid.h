// Programmatic dependent launch. It has no effect here: grids run one at a time.
#pragma once

namespace fp8attn::ptx {

inline void wait_for_grids_before() {}
inline void launch_dependents() {}

}  // namespace fp8attn::ptx

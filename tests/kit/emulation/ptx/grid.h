// Programmatic dependent launch. Grids run one at a time here. What a grid before writes, a test may keep back until a
// thread waits for it.
#pragma once

namespace fp8attn::ptx {

void wait_for_grids_before();

inline void launch_dependents() {}

}  // namespace fp8attn::ptx

// Dot products with fixed lanes. Included by one file per instruction set; see CMakeLists.txt for their
// flags.
//
// Only <cstdint> and plain code may be used here: an inline function of the standard library compiled for a
// newer instruction set could be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

#include "loops.h"

namespace pyddl {
namespace {

typedef double Quad __attribute__((vector_size(32)));
typedef double QuadInMemory __attribute__((vector_size(32), aligned(8), may_alias));
static_assert(kLanes == 8, "a row of lanes is two quads");

template <int count>
void sweep(const double* a, const double* const* b, std::int64_t n, double* out) {
    Quad low[count] = {};
    Quad high[count] = {};
    for (std::int64_t k = 0; k < n; k += kLanes) {
        const Quad a_low = *reinterpret_cast<const QuadInMemory*>(a + k);
        const Quad a_high = *reinterpret_cast<const QuadInMemory*>(a + k + 4);
        for (int j = 0; j < count; ++j) {
            // Both factors are widened float32 wherever Gram sums are formed: the product is exact.
            low[j] += a_low * *reinterpret_cast<const QuadInMemory*>(b[j] + k);
            high[j] += a_high * *reinterpret_cast<const QuadInMemory*>(b[j] + k + 4);
        }
    }
    for (int j = 0; j < count; ++j) {
        const Quad s = low[j] + high[j];
        out[j] = (s[0] + s[1]) + (s[2] + s[3]);
    }
}

void dots(const double* a, const double* const* b, int count, std::int64_t n, double* out) {
    switch (count) {
        case 1:
            return sweep<1>(a, b, n, out);
        case 2:
            return sweep<2>(a, b, n, out);
        case 3:
            return sweep<3>(a, b, n, out);
        default:
            return sweep<4>(a, b, n, out);
    }
}

}  // namespace
}  // namespace pyddl

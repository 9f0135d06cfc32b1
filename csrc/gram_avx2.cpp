// Dot products compiled for: avx2.
#include "gram.h"

namespace pyddl {
void dots_avx2(const double* a, const double* const* b, int count, std::int64_t n, double* out);
void dots_avx2(const double* a, const double* const* b, int count, std::int64_t n, double* out) {
    dots(a, b, count, n, out);
}
}  // namespace pyddl

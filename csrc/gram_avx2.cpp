// Gram matrix compiled for: avx2.
#define PYDDL_WIDTH 4
#include "gram.h"

namespace pyddl {
void gram_avx2(const double* rows, const double* units, int count, std::int64_t n, double* out);
void gram_avx2(const double* rows, const double* units, int count, std::int64_t n, double* out) {
    gram(rows, units, count, n, out);
}
}  // namespace pyddl

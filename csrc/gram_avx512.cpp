// Gram matrix compiled for: avx512.
#define PYDDL_WIDTH 8
#include "gram.h"

namespace pyddl {
void gram_avx512(const double* rows, const double* units, int count, std::int64_t n, double* out);
void gram_avx512(const double* rows, const double* units, int count, std::int64_t n, double* out) {
    gram(rows, units, count, n, out);
}
}  // namespace pyddl

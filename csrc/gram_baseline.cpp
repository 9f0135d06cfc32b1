// Gram matrix compiled for: baseline.
#define PYDDL_WIDTH 2
#include "gram.h"

namespace pyddl {
void gram_baseline(const double* rows, const double* units, int count, std::int64_t n, double* out);
void gram_baseline(const double* rows, const double* units, int count, std::int64_t n, double* out) {
    gram(rows, units, count, n, out);
}
}  // namespace pyddl

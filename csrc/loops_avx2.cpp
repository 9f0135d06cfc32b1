// Inner loops compiled for: avx2.
#include "loops_impl.h"

namespace pyddl {
void dots_avx2(const double* a, const double* const* b, int count, std::int64_t n, double* out);
extern const Loops loops_avx2;
const Loops loops_avx2 = {"avx2", widen, dots_avx2, add_scaled, step, encode_bf16, decode_bf16};
}  // namespace pyddl

// Inner loops compiled for: baseline.
#include "loops_impl.h"

namespace pyddl {
void dots_baseline(const double* a, const double* const* b, int count, std::int64_t n, double* out);
extern const Loops loops_baseline;
const Loops loops_baseline = {"baseline", widen, dots_baseline, add_scaled, step, encode_bf16, decode_bf16};
}  // namespace pyddl

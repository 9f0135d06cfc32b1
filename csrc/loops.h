// The hot inner loops, one table per instruction set, chosen once at run time.
//
// Here: loops over at most a block of contiguous elements, none of which crosses a multiple of kBlock. Not
// here: anything that knows of tensors, weights or rules. Every table gives the same bits: sums have kLanes
// fixed lanes, and nothing is contracted into FMA but exact products.
#pragma once

#include <cstdint>

#include "element.h"

namespace pyddl {

constexpr int kLanes = 8;                 // partial sums of a dot product
constexpr int kBlock = kCodecBlock;       // elements of a block; a row of doubles takes 2 KiB of L1
constexpr int kStride = kBlock + kLanes;  // from row to row: not all of them on the same few lines of a cache

struct OuterRule {
    double lr;
    double momentum;
    bool nesterov;
};

// Pieces of the model that one step reads and writes; momentum and momentum_out are both null or both not.
struct ModelBlock {
    const float* theta;
    const float* momentum;
    float* theta_out;
    float* momentum_out;
};

namespace {

// The sum of a row of lanes. Each file's own: see lanes.h.
inline double sum_of_lanes(const double* lane) {
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

}  // namespace

struct Loops {
    const char* name;
    // units[i] * rows[i * kStride + k] = v[i][first + k] for k < n <= kBlock; zeros follow up to a multiple
    // of kLanes. A unit is 1, or a block's scale: the rows then hold small integers.
    void (*widen)(const Vector* v, int count, std::int64_t first, std::int64_t n, double* rows,
                  double* units);
    // out[i * count + j] += units[i] * units[j] * sum_k rows[i][k] * rows[j][k] for i <= j < count, and some
    // of the lower triangle; n is a multiple of kLanes.
    void (*gram)(const double* rows, const double* units, int count, std::int64_t n, double* out);
    // squares[i * kLanes + l] += sum_k v[i][first + k]^2 over the k of that lane, k % kLanes = l; of codes
    // all in the first lane, since theirs are exact.
    void (*squares)(const Vector* v, int count, std::int64_t first, std::int64_t n, double* squares);
    // sum[k] = sum_i c[i] * v[i][first + k], zeros up to a multiple of kLanes; where squares is not null, as
    // above.
    void (*weighted_sum)(const Vector* v, const double* c, int count, std::int64_t first, std::int64_t n,
                         double* sum, double* squares);
    // out[k] = g[k], rounded; squares[l] += g[k]^2 by lanes.
    void (*narrow)(const double* g, std::int64_t n, float* out, double* squares);
    // g[k] = factor * values[k], zeros up to a multiple of kLanes.
    void (*scale)(const float* values, double factor, std::int64_t n, double* g);
    // One outer step with the merged outer gradient g, zeros up to a multiple of kLanes; squares[l] += g[k]^2
    // by lanes. True if every element of theta_out is finite.
    bool (*step)(const double* g, ModelBlock model, std::int64_t n, OuterRule rule, double* squares);
    void (*encode_bf16)(const float* values, float* residual, std::uint16_t* out, std::int64_t n);
    void (*decode_bf16)(const std::uint16_t* bits, float* out, std::int64_t n);
    // One block of n <= kCodecBlock values; see codec.h.
    void (*encode_int8)(const float* values, float* residual, std::int64_t n, std::uint8_t* block);
    void (*encode_int4)(const float* values, float* residual, std::int64_t n, std::uint8_t* block);
};

// The table in use: the best that this processor can run, unless select_loops named another.
const Loops& loops();

// Choose a table by name; false (and no change) if it is not built or this processor cannot run it.
bool select_loops(const char* name);

}  // namespace pyddl

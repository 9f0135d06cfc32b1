// The inner loops but the dot products. Included by one file per instruction set, which sets the compiler's
// flags.
//
// Plain loops that the compiler vectorises; elementwise, so that the width of a vector changes no bit. The
// warning of gram.h about the standard library holds here too.
#pragma once

#include <cstdint>
#include <cstring>

#include "loops.h"

namespace pyddl {
namespace {

inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

// All ones in the exponent: Inf or NaN.
constexpr std::uint32_t kExponent = 0x7f800000u;

// Round to nearest, ties to even; NaN stays NaN (made quiet, so that the cut bits cannot turn it into Inf).
inline std::uint32_t bf16_of(std::uint32_t bits) {
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x40u;
    return (bits & 0x7fffffffu) > kExponent ? quiet : rounded;
}

void widen(Vector src, std::int64_t first, std::int64_t n, double* __restrict dst) {
    if (src.element == Element::f32) {
        const float* values = static_cast<const float*>(src.data) + first;
        for (std::int64_t k = 0; k < n; ++k) {
            dst[k] = static_cast<double>(values[k]);
        }
    } else {
        const std::uint16_t* bits = static_cast<const std::uint16_t*>(src.data) + first;
        for (std::int64_t k = 0; k < n; ++k) {
            dst[k] = static_cast<double>(float_of(static_cast<std::uint32_t>(bits[k]) << 16));
        }
    }
    for (std::int64_t k = n; k % kLanes != 0; ++k) {
        dst[k] = 0.0;
    }
}

void add_scaled(double c, const double* __restrict row, std::int64_t n, double* __restrict sum) {
    for (std::int64_t k = 0; k < n; ++k) {
        sum[k] += c * row[k];
    }
}

bool step(const double* __restrict g, ModelBlock model, std::int64_t n, OuterRule rule) {
    const double lr = rule.lr;
    const double mu = rule.momentum;
    const float* __restrict theta = model.theta;
    float* __restrict theta_out = model.theta_out;
    if (rule.nesterov) {
        const float* __restrict momentum = model.momentum;
        float* __restrict momentum_out = model.momentum_out;
        for (std::int64_t k = 0; k < n; ++k) {
            const double b = mu * static_cast<double>(momentum[k]) + g[k];
            momentum_out[k] = static_cast<float>(b);
            theta_out[k] = static_cast<float>(static_cast<double>(theta[k]) - lr * (g[k] + mu * b));
        }
    } else {
        for (std::int64_t k = 0; k < n; ++k) {
            theta_out[k] = static_cast<float>(static_cast<double>(theta[k]) - lr * g[k]);
        }
        if (model.momentum_out != nullptr) {  // without momentum the buffer passes through unchanged
            __builtin_memcpy(model.momentum_out, model.momentum, static_cast<std::size_t>(n) * sizeof(float));
        }
    }
    std::uint32_t bad = 0;
    for (std::int64_t k = 0; k < n; ++k) {
        bad |= (bits_of(theta_out[k]) & kExponent) == kExponent ? 1u : 0u;
    }
    return bad == 0;
}

void encode_bf16(const float* __restrict values, float* __restrict residual, std::uint16_t* __restrict out,
                 std::int64_t n) {
    if (residual == nullptr) {
        for (std::int64_t k = 0; k < n; ++k) {
            out[k] = static_cast<std::uint16_t>(bf16_of(bits_of(values[k])));
        }
        return;
    }
    for (std::int64_t k = 0; k < n; ++k) {
        const float x = values[k] + residual[k];
        const std::uint32_t code = bf16_of(bits_of(x));
        out[k] = static_cast<std::uint16_t>(code);
        // A code that is not finite (x was not, or rounds up to Inf) is refused by the merge: no error is
        // carried. A mask, not a choice between floats, which would keep the compiler from vectorising.
        const std::uint32_t left = bits_of(x - float_of(code << 16));
        const std::uint32_t keep = ((code << 16) & kExponent) == kExponent ? 0u : ~0u;
        residual[k] = float_of(left & keep);
    }
}

void decode_bf16(const std::uint16_t* __restrict bits, float* __restrict out, std::int64_t n) {
    for (std::int64_t k = 0; k < n; ++k) {
        out[k] = float_of(static_cast<std::uint32_t>(bits[k]) << 16);
    }
}

}  // namespace
}  // namespace pyddl

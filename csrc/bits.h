// One value at a time: the bits of float32, rounding to bf16, and the codes of blocks. The same for every
// backend.
//
// Each file's own: see lanes.h.
#pragma once

#include <cstdint>

#include "both.h"

namespace pyddl {
namespace {

PYDDL_BOTH inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

PYDDL_BOTH inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

// All ones in the exponent: Inf or NaN.
constexpr std::uint32_t kExponent = 0x7f800000u;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr float kSmallestNormal = 0x1p-126f;

PYDDL_BOTH inline bool is_finite(float value) { return (bits_of(value) & kExponent) != kExponent; }

// Round to nearest, ties to even; NaN stays NaN (made quiet, so that the cut bits cannot turn it into Inf).
PYDDL_BOTH inline std::uint32_t bf16_of(std::uint32_t bits) {
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x40u;
    return (bits & kMagnitude) > kExponent ? quiet : rounded;
}

// What rounding x to the bf16 `code` loses. A code that is not finite (x was not, or rounds up to Inf) is
// refused by the merge: no error is carried. A mask, not a choice between floats, which would keep a compiler
// from vectorising.
PYDDL_BOTH inline float lost_in_bf16(float x, std::uint32_t code) {
    const std::uint32_t left = bits_of(x - float_of(code << 16));
    const std::uint32_t keep = ((code << 16) & kExponent) == kExponent ? 0u : ~0u;
    return float_of(left & keep);
}

// Of a block: the scale that gives the largest value the code `most`, and what to multiply by to come to
// codes. A scale below the normal numbers is 0, and so are all codes; with a NaN or Inf it is NaN.
struct BlockScale {
    float scale;
    float inverse;
    bool finite;

    // `largest`: the largest magnitude of the block as the bits of a float32.
    PYDDL_BOTH BlockScale(std::uint32_t largest, float most) {
        finite = largest < kExponent;
        scale = finite ? float_of(largest) / most : float_of(0x7fc00000u);
        if (scale < kSmallestNormal) scale = 0.0f;
        inverse = finite && scale > 0.0f ? 1.0f / scale : 0.0f;
    }
    // What a value in the block loses by its code.
    PYDDL_BOTH float lost(float x, std::int32_t code) const {
        const double decoded = static_cast<double>(scale) * static_cast<double>(code);
        return finite ? static_cast<float>(static_cast<double>(x) - decoded) : 0.0f;
    }
};

constexpr float kMostInt8 = 127.0f;
constexpr float kMostInt4 = 64.0f;

// To nearest even, of |x| < 2^22: what is added leaves no room for a fraction.
constexpr float kNoFraction = 12582912.0f;

PYDDL_BOTH inline std::int32_t int8_code(float x, const BlockScale& block) {
    const float scaled = block.finite ? x * block.inverse : 0.0f;
    return static_cast<std::int32_t>((scaled + kNoFraction) - kNoFraction);
}

// From the middle between two powers of two on, half a mantissa more is the next exponent. Below 1 the next
// value is 0 and the middle is 1/2.
PYDDL_BOTH inline std::uint32_t int4_code(float x, const BlockScale& block) {
    const std::uint32_t bits = bits_of(x);
    const float scaled = float_of(bits & kMagnitude) * block.inverse;
    const std::int32_t power = static_cast<std::int32_t>((bits_of(scaled) + 0x00400000u) >> 23) - 126;
    const std::int32_t least = scaled >= 0.5f ? 1 : 0;
    std::int32_t exponent = power > least ? power : least;
    exponent = exponent > 7 ? 7 : exponent;
    exponent = block.finite ? exponent : 0;
    return static_cast<std::uint32_t>(exponent) | ((bits >> 28) & 8u);
}

// In units of the scale.
PYDDL_BOTH inline std::int32_t int4_value(std::uint32_t code) {
    const std::int32_t magnitude = static_cast<std::int32_t>((1u << (code & 7u)) >> 1);
    return (code & 8u) != 0 ? -magnitude : magnitude;
}

}  // namespace
}  // namespace pyddl

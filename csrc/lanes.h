// Vectors of the width that a file is compiled for. Included by one file per instruction set, with
// PYDDL_WIDTH set to the doubles of a register: 2, 4 or 8.
//
// Sums have kLanes lanes whatever the width, and are added up in one order: every width gives the same bits.
//
// Only <cstdint> and plain code may be used in these files: an inline function of the standard library
// compiled for a newer instruction set could be the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>

#if PYDDL_WIDTH > 2
#include <immintrin.h>
#endif

#include "loops.h"

namespace pyddl {
namespace {

constexpr int kWidth = PYDDL_WIDTH;
constexpr int kParts = kLanes / kWidth;  // registers that hold a row of lanes

typedef double Doubles __attribute__((vector_size(8 * kWidth)));
typedef double DoublesInMemory __attribute__((vector_size(8 * kWidth), aligned(8), may_alias));
inline Doubles load(const double* p) { return *reinterpret_cast<const DoublesInMemory*>(p); }
inline void store(double* p, Doubles value) { *reinterpret_cast<DoublesInMemory*>(p) = value; }

// The value of each code of int4 in units of the scale; the upper half is the negative of the lower.
constexpr std::int8_t kInt4Values[16] = {0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64};

// Values of float32, bf16 (the upper half of a float32) and small integers, widened; and a * b + c of factors
// whose product is exact, fused where that is faster, with the same bits. By intrinsics, since compilers take
// what is written with vectors of unequal widths to pieces.
//
// And the sum of squares of small integers: exact, so in any order; and the codes of a block of int4 taken
// apart.
#if PYDDL_WIDTH == 8

inline void unpack_int4(const std::uint8_t* codes, std::int8_t* out) {
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kInt4Values)));
    const __m512i low = _mm512_set1_epi8(15);
    for (std::int64_t j = 0; j < kCodecBlock / 2; j += 64) {
        const __m512i both = _mm512_loadu_si512(codes + j);
        _mm512_storeu_si512(out + j, _mm512_shuffle_epi8(table, _mm512_and_si512(both, low)));
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_storeu_si512(out + kCodecBlock / 2 + j, _mm512_shuffle_epi8(table, high));
    }
}

inline std::int32_t sum_of_squares(const std::int8_t* codes, std::int64_t n) {
    __m512i sums = _mm512_setzero_si512();
    std::int64_t k = 0;
    for (; k + 32 <= n; k += 32) {
        const __m512i wide =
            _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + k)));
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(wide, wide));
    }
    std::int32_t sum = _mm512_reduce_add_epi32(sums);
    for (; k < n; ++k) sum += codes[k] * codes[k];
    return sum;
}

// The sum of the squares of a block's codes: squares up to 64 and, in units of 256, those above.
inline std::int32_t sum_of_squares_int4(const std::uint8_t* codes) {
    const __m512i small =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 16, 64, 0, 0, 0, 0, 1, 4, 16, 64, 0, 0, 0));
    const __m512i large =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 1, 4, 16, 0, 0, 0, 0, 0, 1, 4, 16));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i zero = _mm512_setzero_si512();
    __m512i sum = zero;
    for (std::int64_t j = 0; j < kCodecBlock / 2; j += 64) {
        const __m512i both = _mm512_loadu_si512(codes + j);
        const __m512i a = _mm512_and_si512(both, low);
        const __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        // Two bytes of at most 64 each: no carry.
        const __m512i smalls = _mm512_add_epi8(_mm512_shuffle_epi8(small, a), _mm512_shuffle_epi8(small, b));
        const __m512i larges = _mm512_add_epi8(_mm512_shuffle_epi8(large, a), _mm512_shuffle_epi8(large, b));
        sum = _mm512_add_epi64(sum, _mm512_sad_epu8(smalls, zero));
        sum = _mm512_add_epi64(sum, _mm512_slli_epi64(_mm512_sad_epu8(larges, zero), 8));
    }
    return static_cast<std::int32_t>(_mm512_reduce_add_epi64(sum));
}

inline Doubles load_wide(const float* p) { return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p)); }

// A factor times each code of int4. Exact: powers of two.
struct Products {
    __m512d positive, negative;

    Products() = default;
    explicit Products(double factor) {
        const __m512d all = _mm512_set1_pd(factor);
        positive = _mm512_mul_pd(all, _mm512_setr_pd(0, 1, 2, 4, 8, 16, 32, 64));
        negative = _mm512_mul_pd(all, _mm512_setr_pd(0, -1, -2, -4, -8, -16, -32, -64));
    }
    // Adds those of the low and of the high halves of eight bytes.
    void add(const std::uint8_t* codes, Doubles* low, Doubles* high) const {
        std::int64_t bits;
        __builtin_memcpy(&bits, codes, sizeof bits);
        const __m512i all = _mm512_set1_epi64(bits);
        const __m512i first = _mm512_srlv_epi64(all, _mm512_setr_epi64(0, 8, 16, 24, 32, 40, 48, 56));
        const __m512i second = _mm512_srlv_epi64(all, _mm512_setr_epi64(4, 12, 20, 28, 36, 44, 52, 60));
        *low += (Doubles)_mm512_permutex2var_pd(positive, first, negative);  // by the last four bits
        *high += (Doubles)_mm512_permutex2var_pd(positive, second, negative);
    }
};

inline Doubles load_wide(const std::uint16_t* p) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return (Doubles)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16)));
}

inline Doubles load_wide(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (Doubles)_mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(bytes));
}

inline void store_narrow(float* p, Doubles value) { _mm256_storeu_ps(p, _mm512_cvtpd_ps((__m512d)value)); }

inline Doubles add_exact_product(Doubles a, Doubles b, Doubles c) {
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}

#elif PYDDL_WIDTH == 4

inline void unpack_int4(const std::uint8_t* codes, std::int8_t* out) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kInt4Values)));
    const __m256i low = _mm256_set1_epi8(15);
    for (std::int64_t j = 0; j < kCodecBlock / 2; j += 32) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + j));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        __m256i* to = reinterpret_cast<__m256i*>(out + j);
        _mm256_storeu_si256(to, _mm256_shuffle_epi8(table, _mm256_and_si256(both, low)));
        _mm256_storeu_si256(to + kCodecBlock / 2 / 32, _mm256_shuffle_epi8(table, high));
    }
}

inline std::int32_t sum_of_squares(const std::int8_t* codes, std::int64_t n) {
    __m256i sums = _mm256_setzero_si256();
    std::int64_t k = 0;
    for (; k + 16 <= n; k += 16) {
        const __m256i wide =
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k)));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(wide, wide));
    }
    std::int32_t lane[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane), sums);
    std::int32_t sum = 0;
    for (const std::int32_t value : lane) sum += value;
    for (; k < n; ++k) sum += codes[k] * codes[k];
    return sum;
}

inline Doubles load_wide(const float* p) { return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(p)); }

inline Doubles load_wide(const std::uint16_t* p) {
    const __m128i halves = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (Doubles)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(halves, 16)));
}

inline Doubles load_wide(const std::int8_t* p) {
    std::int32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return (Doubles)_mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes)));
}

inline void store_narrow(float* p, Doubles value) { _mm_storeu_ps(p, _mm256_cvtpd_ps((__m256d)value)); }

inline Doubles add_exact_product(Doubles a, Doubles b, Doubles c) {
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}

#else

inline void unpack_int4(const std::uint8_t* codes, std::int8_t* out) {
    for (std::int64_t j = 0; j < kCodecBlock / 2; ++j) {
        out[j] = kInt4Values[codes[j] & 15];
        out[kCodecBlock / 2 + j] = kInt4Values[codes[j] >> 4];
    }
}

inline std::int32_t sum_of_squares(const std::int8_t* codes, std::int64_t n) {
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < n; ++k) sum += codes[k] * codes[k];
    return sum;
}

inline Doubles load_wide(const float* p) { return Doubles{p[0], p[1]}; }

inline Doubles load_wide(const std::uint16_t* p) {
    const std::uint32_t bits[kWidth] = {static_cast<std::uint32_t>(p[0]) << 16,
                                        static_cast<std::uint32_t>(p[1]) << 16};
    float values[kWidth];
    __builtin_memcpy(values, bits, sizeof values);
    return Doubles{values[0], values[1]};
}

inline Doubles load_wide(const std::int8_t* p) {
    return Doubles{static_cast<double>(p[0]), static_cast<double>(p[1])};
}

inline void store_narrow(float* p, Doubles value) {
    p[0] = static_cast<float>(value[0]);
    p[1] = static_cast<float>(value[1]);
}

inline Doubles add_exact_product(Doubles a, Doubles b, Doubles c) { return a * b + c; }

#endif

// The sum of a row of lanes.
inline double sum_of_lanes(const Doubles* row) {
    double lane[kLanes];
    for (int part = 0; part < kParts; ++part) store(lane + part * kWidth, row[part]);
    return sum_of_lanes(lane);
}

}  // namespace
}  // namespace pyddl

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
typedef float FloatsInMemory __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef std::uint16_t HalvesInMemory __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::int8_t CodesInMemory __attribute__((vector_size(kWidth), aligned(1), may_alias));
typedef std::int32_t Integers __attribute__((vector_size(4 * kWidth)));
typedef float Floats __attribute__((vector_size(4 * kWidth)));

inline Doubles load(const double* p) { return *reinterpret_cast<const DoublesInMemory*>(p); }
inline void store(double* p, Doubles value) { *reinterpret_cast<DoublesInMemory*>(p) = value; }

inline Doubles load_wide(const float* p) {
    return __builtin_convertvector(*reinterpret_cast<const FloatsInMemory*>(p), Doubles);
}

// bf16: the upper half of a float32.
inline Doubles load_wide(const std::uint16_t* p) {
    const Words bits = __builtin_convertvector(*reinterpret_cast<const HalvesInMemory*>(p), Words) << 16;
    return __builtin_convertvector((Floats)bits, Doubles);  // between vectors a cast keeps the bits
}

inline Doubles load_wide(const std::int8_t* p) {
    return __builtin_convertvector(
        __builtin_convertvector(*reinterpret_cast<const CodesInMemory*>(p), Integers), Doubles);
}

// a * b + c of factors whose product is exact: fused where that is faster, with the same bits.
inline Doubles add_exact_product(Doubles a, Doubles b, Doubles c) {
#if PYDDL_WIDTH == 8
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif PYDDL_WIDTH == 4
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

// The sum of a row of lanes.
inline double sum_of_lanes(const Doubles* row) {
    double lane[kLanes];
    for (int part = 0; part < kParts; ++part) store(lane + part * kWidth, row[part]);
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

}  // namespace
}  // namespace pyddl

// Element types of the vectors that kernels read and write, and the codecs of the wire.
#pragma once

#include <cstdint>
#include <cstring>

namespace pyddl {

// f32, bf16 (its 16 bits), or blocks of 256 values (element k of a vector is element k % 256 of block k /
// 256; the last block is whole, its rest zero) with one scale:
//
//     int8    scale float32 | 256 codes           value = scale * code, -127 <= code <= 127
//     int4    scale float32 | 128 bytes           byte j: element j in the low half, element j + 128 in the
//     high half;
//                                                 sign 1 bit, exponent e 3 bits (E3M0): value = +-scale *
//                                                 2^(e-1), e = 0: 0
//
// A block that holds a NaN or Inf has the scale NaN.
enum class Element : std::uint8_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

constexpr std::int64_t kCodecBlock = 256;
constexpr std::int64_t kInt8BlockBytes = 4 + kCodecBlock;
constexpr std::int64_t kInt4BlockBytes = 4 + kCodecBlock / 2;

// Bytes of a vector of n elements.
constexpr std::int64_t encoded_bytes(Element element, std::int64_t n) {
    const std::int64_t blocks = (n + kCodecBlock - 1) / kCodecBlock;
    switch (element) {
        case Element::f32:
            return 4 * n;
        case Element::bf16:
            return 2 * n;
        case Element::int8:
            return blocks * kInt8BlockBytes;
        default:
            return blocks * kInt4BlockBytes;
    }
}

// A vector in memory with its element type.
struct Vector {
    const void* data;
    Element element;
};

}  // namespace pyddl

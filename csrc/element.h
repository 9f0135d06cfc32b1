// Element types of the vectors that kernels read and write.
#pragma once

#include <cstdint>
#include <cstring>

namespace pyddl {

enum class Element : std::uint8_t { f32, bf16 };

// A vector in memory with its element type; bf16 is held as its 16 bits.
struct Vector {
    const void* data;
    Element element;
};

}  // namespace pyddl

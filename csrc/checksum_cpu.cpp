// CRC32C on the CPU: the SSE4.2 instruction on three streams at once, or tables that take eight bytes a step.
#include <array>
#include <cstring>

#include "checksum.h"

#if defined(__x86_64__) || defined(_M_X64)
#define PYDDL_X86_64
#include <nmmintrin.h>
#endif

namespace pyddl {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // bit 31 is x^0: the reflected form

// a * b modulo the polynomial, both reflected.
std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ ((b & 1u) ? kPolynomial : 0u);
    }
    return product;
}

// x^(8 * num_bytes) modulo the polynomial: what num_bytes zero bytes multiply a checksum register by.
std::uint32_t power_of_bytes(std::uint64_t num_bytes) {
    std::uint32_t result = 0x80000000u;  // 1
    std::uint32_t square = 0x00800000u;  // x^8
    for (; num_bytes != 0; num_bytes >>= 1) {
        if (num_bytes & 1u) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

struct Tables {
    // byte[k][b]: the register after byte b and then k zero bytes.
    std::array<std::array<std::uint32_t, 256>, 8> byte;

    Tables() {
        for (std::uint32_t b = 0; b < 256; ++b) {
            std::uint32_t value = b;
            for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) ? kPolynomial : 0u);
            byte[0][b] = value;
        }
        for (std::size_t k = 1; k < 8; ++k) {
            for (std::size_t b = 0; b < 256; ++b) {
                byte[k][b] = (byte[k - 1][b] >> 8) ^ byte[0][byte[k - 1][b] & 0xffu];
            }
        }
    }
};

const Tables& tables() {
    static const Tables built;
    return built;
}

std::uint32_t little_endian(const unsigned char* p) {
    return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
           static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

#ifdef PYDDL_X86_64

// Moves a register past a fixed number of zero bytes by four look-ups.
struct Shift {
    std::array<std::array<std::uint32_t, 256>, 4> part;

    explicit Shift(std::uint64_t num_bytes) {
        const std::uint32_t factor = power_of_bytes(num_bytes);
        for (std::uint32_t k = 0; k < 4; ++k) {
            for (std::uint32_t b = 0; b < 256; ++b) part[k][b] = multiply(factor, b << (8 * k));
        }
    }

    std::uint32_t operator()(std::uint32_t value) const {
        return part[0][value & 0xffu] ^ part[1][(value >> 8) & 0xffu] ^ part[2][(value >> 16) & 0xffu] ^
               part[3][value >> 24];
    }
};

// What is done with the bytes besides: nothing, a copy, or a copy past the caches.
enum class Also { nothing, copy, stream };

template <Also also>
__attribute__((target("sse4.2"))) inline std::uint64_t take_word(std::uint64_t value, const unsigned char* p,
                                                                 unsigned char* to) {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    if (also == Also::copy) std::memcpy(to, &word, sizeof word);
    if (also == Also::stream) {
        long long bits;
        std::memcpy(&bits, &word, sizeof bits);
        _mm_stream_si64(reinterpret_cast<long long*>(to), bits);
    }
    return _mm_crc32_u64(value, word);
}

// The instruction takes three cycles but one can start in each: three streams of one block run side by side.
template <std::size_t stream_bytes, Also also>
__attribute__((target("sse4.2"))) std::uint64_t take_streams(std::uint64_t value, const unsigned char*& p,
                                                             unsigned char*& to, std::size_t& left) {
    static_assert(stream_bytes % 8 == 0, "streams are read by words");
    static const Shift shift(stream_bytes);
    while (left >= 3 * stream_bytes) {
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (std::size_t k = 0; k < stream_bytes; k += 8) {
            value = take_word<also>(value, p + k, to + k);
            second = take_word<also>(second, p + stream_bytes + k, to + stream_bytes + k);
            third = take_word<also>(third, p + 2 * stream_bytes + k, to + 2 * stream_bytes + k);
        }
        value = shift(static_cast<std::uint32_t>(value)) ^ second;
        value = shift(static_cast<std::uint32_t>(value)) ^ third;
        p += 3 * stream_bytes;
        if (also != Also::nothing) to += 3 * stream_bytes;
        left -= 3 * stream_bytes;
    }
    return value;
}

// Copies from here on go past the caches: they hold little of so much, and what is written need not be read
// first.
constexpr std::size_t kStreamBytes = 1 << 20;

template <Also also>
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const unsigned char* p, unsigned char* to,
                                                               std::size_t left, std::uint32_t start) {
    std::uint64_t value = ~start;
    value = take_streams<4096, also>(value, p, to, left);
    value = take_streams<256, also>(value, p, to, left);
    for (; left >= 8; left -= 8, p += 8) {
        value = take_word<also>(value, p, to);
        if (also != Also::nothing) to += 8;
    }
    for (; left != 0; --left, ++p) {
        value = _mm_crc32_u8(static_cast<std::uint32_t>(value), *p);
        if (also != Also::nothing) *to++ = *p;
    }
    if (also == Also::stream) _mm_sfence();
    return ~static_cast<std::uint32_t>(value);
}

#endif

}  // namespace

bool checksum_in_hardware() {
#ifdef PYDDL_X86_64
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
#else
    return false;
#endif
}

std::uint32_t checksum_by_tables(const void* data, std::size_t num_bytes, std::uint32_t value) {
    const auto& byte = tables().byte;
    const unsigned char* p = static_cast<const unsigned char*>(data);
    std::uint32_t crc = ~value;
    for (; num_bytes >= 8; num_bytes -= 8, p += 8) {
        const std::uint32_t low = crc ^ little_endian(p);
        const std::uint32_t high = little_endian(p + 4);
        crc = byte[7][low & 0xffu] ^ byte[6][(low >> 8) & 0xffu] ^ byte[5][(low >> 16) & 0xffu] ^
              byte[4][low >> 24] ^ byte[3][high & 0xffu] ^ byte[2][(high >> 8) & 0xffu] ^
              byte[1][(high >> 16) & 0xffu] ^ byte[0][high >> 24];
    }
    for (; num_bytes != 0; --num_bytes, ++p) crc = (crc >> 8) ^ byte[0][(crc ^ *p) & 0xffu];
    return ~crc;
}

std::uint32_t checksum_cpu(const void* data, std::size_t num_bytes, std::uint32_t value) {
#ifdef PYDDL_X86_64
    static const bool in_hardware = checksum_in_hardware();
    if (in_hardware)
        return by_instruction<Also::nothing>(static_cast<const unsigned char*>(data), nullptr, num_bytes,
                                             value);
#endif
    return checksum_by_tables(data, num_bytes, value);
}

std::uint32_t copy_checksum_cpu(void* to, const void* from, std::size_t num_bytes, std::uint32_t value) {
#ifdef PYDDL_X86_64
    static const bool in_hardware = checksum_in_hardware();
    if (in_hardware) {
        const auto* source = static_cast<const unsigned char*>(from);
        auto* target = static_cast<unsigned char*>(to);
        // Stores past the caches go by whole words: those of a target between two words would cross lines.
        const bool is_aligned = reinterpret_cast<std::uintptr_t>(target) % 8 == 0;
        if (num_bytes >= kStreamBytes && is_aligned)
            return by_instruction<Also::stream>(source, target, num_bytes, value);
        return by_instruction<Also::copy>(source, target, num_bytes, value);
    }
#endif
    std::memcpy(to, from, num_bytes);
    return checksum_by_tables(to, num_bytes, value);
}

}  // namespace pyddl

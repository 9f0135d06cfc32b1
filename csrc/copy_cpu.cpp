// Copies past the caches with SSE2's stores, which every x86-64 has; memcpy elsewhere.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "copy.h"

#if defined(__x86_64__) || defined(_M_X64)
#define PYDDL_X86_64
#include <emmintrin.h>
#endif

namespace pyddl {
namespace {

#ifdef PYDDL_X86_64

constexpr std::size_t kStreamBytes = 1 << 18;  // less than this is likely to be wanted from a cache
constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 16 * kLine;  // fetched while this is copied

// Bytes before the next multiple of `unit`, at most num_bytes.
std::size_t bytes_before(const void* address, std::size_t unit, std::size_t num_bytes) {
    return std::min(-reinterpret_cast<std::uintptr_t>(address) % unit, num_bytes);
}

void copy_lines(std::uint8_t* to, const std::uint8_t* from, std::size_t num_bytes) {
    for (std::size_t k = 0; k < num_bytes; k += kLine) {
        // Never faults, also behind the end.
        _mm_prefetch(reinterpret_cast<const char*>(from + k + kAhead), _MM_HINT_NTA);
        for (std::size_t part = k; part < k + kLine; part += sizeof(__m128i)) {
            const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part));
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + part), value);
        }
    }
    _mm_sfence();
}

#endif

}  // namespace

void copy_cpu(void* to, const void* from, std::size_t num_bytes) {
#ifdef PYDDL_X86_64
    if (num_bytes >= kStreamBytes) {
        auto* target = static_cast<std::uint8_t*>(to);
        const auto* source = static_cast<const std::uint8_t*>(from);
        const std::size_t head = bytes_before(target, kLine, num_bytes);
        const std::size_t body = (num_bytes - head) / kLine * kLine;
        std::memcpy(target, source, head);
        copy_lines(target + head, source + head, body);
        std::memcpy(target + head + body, source + head + body, num_bytes - head - body);
        return;
    }
#endif
    std::memcpy(to, from, num_bytes);
}

void stream_cpu(void* to, const void* from, std::size_t num_bytes) {
#ifdef PYDDL_X86_64
    constexpr std::size_t unit = sizeof(__m128i);
    auto* target = static_cast<std::uint8_t*>(to);
    const auto* source = static_cast<const std::uint8_t*>(from);
    std::size_t k = bytes_before(target, unit, num_bytes);
    std::memcpy(target, source, k);
    for (; k + unit <= num_bytes; k += unit) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + k));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + k), value);
    }
    std::memcpy(target + k, source + k, num_bytes - k);
#else
    std::memcpy(to, from, num_bytes);
#endif
}

void finish_streams() {
#ifdef PYDDL_X86_64
    _mm_sfence();
#endif
}

}  // namespace pyddl

// Single aligned 8-byte words: the only memory that counts as never torn between a writer and a reader.
#pragma once

#include <cstdint>

namespace pyddl {

// What was written before the store that is seen here is seen too.
inline std::uint64_t load_word(const void* address) {
    return __atomic_load_n(static_cast<const std::uint64_t*>(address), __ATOMIC_ACQUIRE);
}

// What this thread wrote before is seen by whoever sees the store.
inline void store_word(void* address, std::uint64_t value) {
    __atomic_store_n(static_cast<std::uint64_t*>(address), value, __ATOMIC_RELEASE);
}

}  // namespace pyddl

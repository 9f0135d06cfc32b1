// Choice of the table of inner loops at run time.
#include "loops.h"

#include <atomic>
#include <cstring>

namespace pyddl {

extern const Loops loops_baseline;
#ifdef PYDDL_HAVE_AVX2
extern const Loops loops_avx2;
#endif

namespace {

// By preference, best first; a null entry is one that this processor cannot run.
const Loops* find(const char* name) {
#ifdef PYDDL_HAVE_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        (name == nullptr || std::strcmp(name, loops_avx2.name) == 0)) {
        return &loops_avx2;
    }
#endif
    if (name == nullptr || std::strcmp(name, loops_baseline.name) == 0) {
        return &loops_baseline;
    }
    return nullptr;
}

std::atomic<const Loops*> chosen{nullptr};

}  // namespace

const Loops& loops() {
    const Loops* table = chosen.load(std::memory_order_acquire);
    if (table == nullptr) {
        table = find(nullptr);
        chosen.store(table, std::memory_order_release);
    }
    return *table;
}

bool select_loops(const char* name) {
    const Loops* table = find(name);
    if (table == nullptr) {
        return false;
    }
    chosen.store(table, std::memory_order_release);
    return true;
}

}  // namespace pyddl

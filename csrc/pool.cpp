#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "signals.h"

namespace pyddl {
namespace {

using Work = std::function<void(std::int64_t, int)>;

int processors() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
}

int found_threads() {
    const char* text = std::getenv("OMP_NUM_THREADS");
    const long wanted =
        text == nullptr ? 0 : std::strtol(text, nullptr, 10);  // "4,2": the first level counts
    return wanted > 0 ? static_cast<int>(std::min(wanted, 1024L)) : processors();
}

std::atomic<int> chosen_threads{0};

// One job at a time; workers sleep in between.
class Pool {
  public:
    void run(std::int64_t num_tasks, int num_workers, const Work& work) {
        grow(num_workers - 1);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            num_tasks_ = num_tasks;
            next_.store(0, std::memory_order_relaxed);
            wanted_ = num_workers - 1;
            running_ = num_workers - 1;
            ++job_;
        }
        start_.notify_all();
        take_tasks(0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return running_ == 0; });
    }

  private:
    void grow(int count) {
        if (threads_ >= count) return;
        const WithoutSignals guard;
        for (; threads_ < count; ++threads_) {
            std::thread([this, index = threads_ + 1] { serve(index); }).detach();
        }
    }

    void serve(int worker) {
        std::uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            start_.wait(lock, [&] { return job_ != seen && worker <= wanted_; });
            seen = job_;
            lock.unlock();
            take_tasks(worker);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    void take_tasks(int worker) {
        for (std::int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) {
            (*work_)(task, worker);
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    std::atomic<std::int64_t> next_{0};
    const Work* work_ = nullptr;
    std::int64_t num_tasks_ = 0;
    int wanted_ = 0;   // workers of this job, besides the caller
    int running_ = 0;  // of those, not done yet
    int threads_ = 0;
    std::uint64_t job_ = 0;
};

std::mutex turn;  // held by whoever uses the pool
Pool* pool = nullptr;

// A child made by fork has none of the threads: it starts with a pool of its own. The old one's memory stays.
void forget_pool() {
    new (&turn) std::mutex;
    pool = nullptr;
}

}  // namespace

int num_threads() {
    const int chosen = chosen_threads.load(std::memory_order_relaxed);
    return chosen > 0 ? chosen : found_threads();
}

void set_num_threads(int count) { chosen_threads.store(std::max(0, count), std::memory_order_relaxed); }

void for_each_task(std::int64_t num_tasks, int num_workers, const Work& work) {
    const int workers = static_cast<int>(std::min<std::int64_t>(num_workers, num_tasks));
    std::unique_lock<std::mutex> mine(turn, std::defer_lock);
    if (workers <= 1 || !mine.try_lock()) {
        for (std::int64_t task = 0; task < num_tasks; ++task) work(task, 0);
        return;
    }
    if (pool == nullptr) {
        static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
        static_cast<void>(registered);
        pool = new Pool;  // never destroyed: its threads may sleep in it when the process ends
    }
    pool->run(num_tasks, workers, work);
}

}  // namespace pyddl

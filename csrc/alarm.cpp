#include "alarm.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace pyddl {

struct Alarm::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool cancelled = false;
};

Alarm::Alarm(double seconds, std::string message) : state_(std::make_shared<State>()) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    // Signals are for the threads that know of them: this one is born with all of them blocked.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([state = state_, end, text = std::move(message)] {
        std::unique_lock<std::mutex> lock(state->mutex);
        if (state->changed.wait_until(lock, end, [&] { return state->cancelled; })) return;
        const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
        static_cast<void>(written);  // nobody is left to be told
        ::_exit(1);
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Alarm::cancel() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->cancelled = true;
    state_->changed.notify_all();
}

}  // namespace pyddl

#include "alarm.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "signals.h"

namespace pyddl {

constexpr int kWriteMs = 1000;

struct Alarm::State {
    std::mutex mutex;
    std::condition_variable changed;
    bool cancelled = false;
};

namespace {

// If somebody reads there: nobody may, and the process must end.
void write_to_stderr(const std::string& text) {
    pollfd output{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&output, 1, kWriteMs) != 1) return;
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    static_cast<void>(written);
}

}  // namespace

Alarm::Alarm(double seconds, std::string message) : state_(std::make_shared<State>()) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    const WithoutSignals guard;
    std::thread([state = state_, end, text = std::move(message)] {
        {
            std::unique_lock<std::mutex> lock(state->mutex);
            if (state->changed.wait_until(lock, end, [&] { return state->cancelled; })) return;
        }
        write_to_stderr(text);
        ::_exit(1);
    }).detach();
}

void Alarm::cancel() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->cancelled = true;
    state_->changed.notify_all();
}

}  // namespace pyddl

// Stops a kernel early: at a deadline, at Ctrl-C, or after a failure in another of its threads.
//
// Kernels call `check` every few thousand steps, from all their threads. Python handles signals
// only in its main thread, so only the thread that called the kernel asks Python for them, now and
// then.
#pragma once
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <thread>

namespace pipeplan {

struct DeadlinePassed : std::exception {
    const char* what() const noexcept override { return "the deadline has passed"; }
};

// Ctrl-C: the Python exception is set already.
struct Interrupted : std::exception {
    const char* what() const noexcept override { return "interrupted"; }
};

// Another thread of the same kernel has failed. The caller gets that thread's exception.
struct Cancelled : std::exception {
    const char* what() const noexcept override { return "cancelled"; }
};

class Control {
  public:
    using Signalled = bool (*)();  // whether Python wants the kernel to end

    // The deadline counts in seconds on the steady clock, as Python's time.monotonic() does.
    explicit Control(double deadline_s = std::numeric_limits<double>::infinity(),
                     Signalled signalled = nullptr)
        : deadline_s_(deadline_s), signalled_(signalled), caller_(std::this_thread::get_id()) {}

    void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

    bool is_late() const { return now_s() >= deadline_s_; }

    // Ends the kernel by an exception if it has to stop.
    void check() {
        check_cancelled();
        const double now = now_s();
        if (now >= deadline_s_) throw DeadlinePassed();
        poll(now);
    }

    // The same without the deadline, for kernels that return their best result at the deadline.
    void check_without_deadline() {
        check_cancelled();
        poll(now_s());
    }

    // The same, and whether the deadline has passed.
    bool check_for_deadline() {
        check_cancelled();
        const double now = now_s();
        poll(now);
        return now >= deadline_s_;
    }

  private:
    static constexpr double kBetweenPollsS = 0.02;

    static double now_s() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    void check_cancelled() const {
        if (cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    }

    void poll(double now) {
        if (!signalled_ || std::this_thread::get_id() != caller_ || now < next_poll_s_) return;
        next_poll_s_ = now + kBetweenPollsS;
        if (signalled_()) throw Interrupted();
    }

    const double deadline_s_;
    const Signalled signalled_;
    const std::thread::id caller_;
    double next_poll_s_ = 0.0;  // only the caller reads and writes it
    std::atomic<bool> cancelled_{false};
};

}  // namespace pipeplan

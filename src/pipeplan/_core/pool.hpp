// The one thread pool of all kernels. The calling thread works too.
//
// An exception in one thread cancels the others. It is thrown again in the caller, where it becomes
// a Python exception. Tasks do not depend on one another, so results do not depend on the number of
// threads.
//
// A thread that is woken may wait long for a processor. So threads are only made and woken where
// there is work for them, and the caller waits for tasks under way, not for threads that sleep: it
// runs what nobody has taken.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "control.hpp"

namespace pipeplan {

// Whether tasks are worth a thread from the first one on, or only if together they take long.
enum class Tasks { kLong, kShort };

class Pool {
  public:
    using Task = std::function<void(int index, int worker)>;

    Pool(int num_threads, Control& control) : control_(control), num_workers_(num_threads) {
        make_room_for_exceptions();
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        changed_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_workers() const { return num_workers_; }

    // Runs task(0 .. num_tasks - 1, worker) and returns when all are done.
    void run(int num_tasks, const Task& task, Tasks length = Tasks::kLong) {
        if (num_tasks <= 1 || num_workers_ == 1) {
            for (int index = 0; index < num_tasks; ++index) task(index, 0);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = &task;
            next_ = 0;
            num_tasks_ = num_tasks;
        }
        if (length == Tasks::kLong) wake(num_tasks);
        work(0, length == Tasks::kShort);
        wait_for_others();
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds kShortTime{200};

    // A thread needs memory for its exceptions. If there is none, the C library ends the process.
    // So each thread takes this memory first, before memory can run out.
    static void make_room_for_exceptions() {
        try {
            throw Cancelled();
        } catch (const Cancelled&) {
        }
    }

    // Enough threads for so many tasks, the caller among them.
    void wake(int num_tasks) {
        while (static_cast<int>(threads_.size()) + 1 < std::min(num_workers_, num_tasks)) {
            try {
                const int worker = static_cast<int>(threads_.size()) + 1;
                threads_.emplace_back([this, worker] { serve(worker); });
            } catch (const std::system_error&) {
                break;  // the system has no more threads; the existing ones do the work
            }
        }
        changed_.notify_all();
    }

    void serve(int worker) {
        make_room_for_exceptions();
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return closing_ || next_ < num_tasks_; });
                if (closing_) return;
            }
            work(worker, false);
        }
    }

    // Runs tasks until none is left. If they are short, others are woken once some time has passed.
    void work(int worker, bool is_alone) {
        const Clock::time_point begin = is_alone ? Clock::now() : Clock::time_point();
        try {
            for (int index = take(); index >= 0; index = take()) {
                (*task_)(index, worker);
                end_task();
                if (!is_alone || Clock::now() - begin < kShortTime) continue;
                is_alone = false;
                wake(num_tasks_ - index);
            }
        } catch (...) {
            fail(std::current_exception());
            end_task();
        }
    }

    int take() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (next_ >= num_tasks_) return -1;
        ++num_running_;
        return next_++;
    }

    void end_task() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (--num_running_ == 0 && next_ >= num_tasks_) finished_.notify_all();
    }

    // Only the first failure counts. It cancels the other threads, which fail for this reason.
    void fail(std::exception_ptr failure) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!failure_) failure_ = failure;
        next_ = num_tasks_;
        control_.cancel();
    }

    // While the caller waits for the others, it still listens for Ctrl-C.
    void wait_for_others() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!finished_.wait_for(lock, std::chrono::milliseconds(20),
                                   [&] { return num_running_ == 0; })) {
            lock.unlock();
            try {
                control_.check_without_deadline();
            } catch (...) {
                fail(std::current_exception());
            }
            lock.lock();
        }
    }

    Control& control_;
    const int num_workers_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable changed_, finished_;
    const Task* task_ = nullptr;
    int next_ = 0, num_tasks_ = 0, num_running_ = 0;
    bool closing_ = false;
    std::exception_ptr failure_;
};

}  // namespace pipeplan

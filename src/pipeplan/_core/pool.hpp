// The one thread pool of all kernels. The calling thread works too.
//
// An exception in one thread cancels the others. It is thrown again in the caller, where it becomes
// a Python exception. Tasks do not depend on one another, so results do not depend on the number of
// threads.
#pragma once
#include <algorithm>
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

class Pool {
  public:
    using Task = std::function<void(int index, int worker)>;

    Pool(int num_threads, Control& control) : control_(control) {
        make_room_for_exceptions();
        for (int worker = 1; worker < num_threads; ++worker) {
            try {
                threads_.emplace_back([this, worker] { serve(worker); });
            } catch (const std::system_error&) {
                break;  // the system has no more threads; the existing ones do the work
            }
        }
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

    int num_workers() const { return static_cast<int>(threads_.size()) + 1; }

    // Runs task(0 .. num_tasks - 1, worker) and returns when all are done.
    void run(int num_tasks, const Task& task) {
        if (num_tasks <= 1 || threads_.empty()) {
            for (int index = 0; index < num_tasks; ++index) task(index, 0);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = &task;
            next_ = 0;
            num_tasks_ = num_tasks;
            busy_ = num_workers();
            ++generation_;
        }
        changed_.notify_all();
        work(0);
        wait_for_others();
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

  private:
    // A thread needs memory for its exceptions. If there is none, the C library ends the process.
    // So each thread takes this memory first, before memory can run out.
    static void make_room_for_exceptions() {
        try {
            throw Cancelled();
        } catch (const Cancelled&) {
        }
    }

    void serve(int worker) {
        make_room_for_exceptions();
        long seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return closing_ || generation_ != seen; });
                if (closing_) return;
                seen = generation_;
            }
            work(worker);
        }
    }

    void work(int worker) {
        try {
            for (int index = take(); index >= 0; index = take()) (*task_)(index, worker);
        } catch (...) {
            fail(std::current_exception());
        }
        std::lock_guard<std::mutex> lock(mutex_);
        if (--busy_ == 0) finished_.notify_all();
    }

    int take() {
        std::lock_guard<std::mutex> lock(mutex_);
        return next_ < num_tasks_ ? next_++ : -1;
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
        while (!finished_.wait_for(lock, std::chrono::milliseconds(20), [&] { return busy_ == 0; })) {
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
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable changed_, finished_;
    const Task* task_ = nullptr;
    int next_ = 0, num_tasks_ = 0, busy_ = 0;
    long generation_ = 0;
    bool closing_ = false;
    std::exception_ptr failure_;
};

}  // namespace pipeplan

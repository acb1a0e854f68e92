#include "threading/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <thread_pool/thread_pool.hpp>
#include <vector>

namespace mxflash {

int thread_count(int requested) {
  if (requested > 0) return requested;
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

int worker_count(std::int64_t count, int threads) {
  return static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(thread_count(threads), count)));
}

void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body,
                  const std::function<void(std::int64_t)>& done) {
  parallel_for_workers(count, threads, [&](std::int64_t i, int) { body(i); }, done);
}

void parallel_for_workers(std::int64_t count, int threads, const std::function<void(std::int64_t, int)>& body,
                          const std::function<void(std::int64_t)>& done) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::int64_t finished = 0;
  const auto drain = [&](int worker) {
    for (std::int64_t i = next++; i < count; i = next++) {
      body(i, worker);
      if (done) {
        const std::scoped_lock lock(mutex);
        done(++finished);
      }
    }
  };
  const int workers = worker_count(count, threads);
  if (workers == 1) {
    drain(0);
    return;
  }
  thread_pool::ThreadPool pool(static_cast<std::size_t>(workers - 1));
  std::vector<std::future<void>> running;
  for (int worker = 1; worker < workers; ++worker) running.push_back(pool.Submit(drain, worker));
  drain(0);
  for (std::future<void>& worker : running) worker.get();
}

}  // namespace mxflash

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

void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body,
                  const std::function<void(std::int64_t)>& done) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::int64_t finished = 0;
  const auto drain = [&] {
    for (std::int64_t i = next++; i < count; i = next++) {
      body(i);
      if (done) {
        const std::scoped_lock lock(mutex);
        done(++finished);
      }
    }
  };
  const std::int64_t workers = std::min<std::int64_t>(thread_count(threads), count);
  if (workers <= 1) {
    drain();
    return;
  }
  thread_pool::ThreadPool pool(static_cast<std::size_t>(workers - 1));
  std::vector<std::future<void>> running;
  for (std::int64_t i = 0; i + 1 < workers; ++i) running.push_back(pool.Submit(drain));
  drain();
  for (std::future<void>& worker : running) worker.get();
}

}  // namespace mxflash

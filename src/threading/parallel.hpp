// A loop over independent items on a pool of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace mxflash {

/// Threads to use for a request: itself when positive, else one a core.
int thread_count(int requested);

/// Threads that a loop over `count` items runs on.
int worker_count(std::int64_t count, int threads);

/// Calls body(i) for every i in [0, count) once, items handed out in rising order, on thread_count(threads) threads.
/// Bodies must not throw. `done`, if set, is called with the number of finished items, from one thread at a time.
void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body,
                  const std::function<void(std::int64_t)>& done = {});

/// The same with body(i, worker): worker numbers below worker_count(count, threads), one a thread, for its scratch
/// memory.
void parallel_for_workers(std::int64_t count, int threads, const std::function<void(std::int64_t, int)>& body,
                          const std::function<void(std::int64_t)>& done = {});

}  // namespace mxflash

// A loop over independent items on a pool of threads.
#pragma once

#include <cstdint>
#include <functional>

namespace mxflash {

/// Threads to use for a request: itself when positive, else one a core.
int thread_count(int requested);

/// Calls body(i) for every i in [0, count) once, items handed out in rising order, on thread_count(threads) threads.
/// Bodies must not throw. `done`, if set, is called with the number of finished items, from one thread at a time.
void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body,
                  const std::function<void(std::int64_t)>& done = {});

}  // namespace mxflash

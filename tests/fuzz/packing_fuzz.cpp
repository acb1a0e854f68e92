// Any offsets and any mask: refused, or visible ranges that match the mask's definition and a proved schedule.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "mxflash/packing.hpp"
#include "mxflash/schedule.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Numbers taken off the front of the input; zeros once it is used up.
class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(sizeof value, bytes_.size());
    if (count > 0) std::memcpy(&value, bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
    return value;
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

/// A short bound most of the time, any 64 bits otherwise.
std::int64_t take_bound(Bytes& bytes) {
  return bytes.take<std::uint8_t>() % 4 == 0 ? bytes.take<std::int64_t>() : bytes.take<std::int8_t>();
}

/// Rising offsets in short steps; one in sixteen raw, to be refused or not.
std::vector<std::int32_t> take_offsets(Bytes& bytes, std::size_t entries) {
  std::vector<std::int32_t> offsets;
  for (std::size_t i = 0; i < entries; ++i) {
    const auto step = bytes.take<std::uint8_t>();
    const std::int32_t last = offsets.empty() ? 0 : offsets.back();
    if (step % 16 == 15) {
      offsets.push_back(bytes.take<std::int32_t>());
    } else {
      offsets.push_back(last > INT32_MAX - step || i == 0 ? last : last + step);
    }
  }
  return offsets;
}

bool allows(const mxflash::Document& document, const mxflash::Mask& mask, std::int64_t query, std::int64_t key) {
  const std::int64_t distance = key - (query + document.k_length - document.q_length);
  return (mask.left >= mxflash::Mask::unbounded || -distance <= mask.left) &&
         (mask.right >= mxflash::Mask::unbounded || distance <= mask.right);
}

void check_document(const mxflash::Document& document, const mxflash::Mask& mask) {
  std::int64_t pairs = 0;
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    const mxflash::KeyRange keys = visible_keys(document, mask, query);
    require(0 <= keys.begin && keys.begin <= keys.end && keys.end <= document.k_length);
    pairs += keys.end - keys.begin;
    for (std::int64_t key = 0; key < document.k_length; ++key) {
      require(keys.contains(key) == allows(document, mask, query, key));
      require(visible_queries(document, mask, key).contains(query) == keys.contains(key));
    }
  }
  require(visible_pairs(document, mask) == pairs);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::int64_t kMostTokens = 160;  // A proof walks every pair.
  Bytes bytes({data, size});
  const mxflash::Mask mask{take_bound(bytes), take_bound(bytes)};
  const std::int64_t query_blocks = 1 + bytes.take<std::uint8_t>() % 4;
  const std::int64_t key_blocks = 1 + bytes.take<std::uint8_t>() % 4;
  const mxflash::TileShape shape{mxflash::kBlock * query_blocks, mxflash::kBlock * key_blocks};
  const std::size_t entries = bytes.take<std::uint8_t>() % 12;
  const std::vector<std::int32_t> q = take_offsets(bytes, entries);
  const std::vector<std::int32_t> k = take_offsets(bytes, entries + (bytes.take<std::uint8_t>() == 7 ? 1 : 0));
  const std::int64_t tokens_q = q.empty() ? 0 : q.back();
  const std::int64_t tokens_k = k.empty() ? 0 : k.back();
  const mxflash::Result<mxflash::Packing> packing = mxflash::Packing::make(q, k, tokens_q, tokens_k);
  if (!packing) {
    require(packing.error().message.find('\n') == std::string::npos);
    return 0;
  }
  for (const mxflash::Document& document : packing->documents()) {
    require(visible_pairs(document, mask) >= 0);
    if (std::max(document.q_length, document.k_length) <= kMostTokens) check_document(document, mask);
  }
  if (tokens_q > kMostTokens || tokens_k > kMostTokens) return 0;
  const mxflash::Result<mxflash::Schedule> schedule = make_schedule(*packing, mask, shape);
  require(schedule.ok());
  require(prove_coverage(*schedule, *packing, mask).ok());
  return 0;
}

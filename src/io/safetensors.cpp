#include "mxflash/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "io/atomic_file.hpp"

namespace mxflash {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using Json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::array kTypes = {DType::bf16, DType::f16, DType::f32, DType::i32, DType::i64, DType::u8};

/// A name out of the file, fit for one line of a message.
std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMost = 80;
  std::string out = "\"";
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7F || c == '"' || c == '\\') {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > kMost ? "...\"" : "\"");
}

/// A tensor as the header describes it.
struct Entry {
  std::optional<DType> dtype;
  std::optional<std::vector<std::int64_t>> shape;
  std::optional<std::vector<std::int64_t>> data_offsets;
};

struct Header {
  std::map<std::string, Entry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Takes the header from the JSON parser's events. Only this shape passes, so nesting is bounded, nothing is kept that
/// is not used, and a repeated name is seen (a DOM would drop it silently):
///   {"__metadata__": {name: string}, name: {"dtype": string, "shape": [integer], "data_offsets": [integer]}}
class HeaderHandler {
 public:
  explicit HeaderHandler(Header& header) : header_(header) {}
  [[nodiscard]] const std::string& problem() const { return problem_; }

  bool null() { return unexpected("null"); }
  bool boolean(bool /*value*/) { return unexpected("a boolean"); }
  bool number_integer(std::int64_t value) { return unexpected(fmt::format("the negative number {}", value)); }
  bool number_unsigned(std::uint64_t value) {
    if (place_ != Place::numbers) return unexpected(fmt::format("the number {}", value));
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return unexpected(fmt::format("the number {} beyond 64 bits with a sign", value));
    }
    numbers_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool number_float(double /*value*/, const std::string& text) {
    return unexpected(fmt::format("the number {}", in_quotes(text)));
  }
  bool binary(Json::binary_t& /*value*/) { return unexpected("binary data"); }

  bool string(std::string& value) {
    if (place_ == Place::metadata_value) {
      *text_ = std::move(value);
      place_ = Place::metadata;
      return true;
    }
    if (place_ != Place::dtype) return unexpected(fmt::format("the string {}", in_quotes(value)));
    for (const DType type : kTypes) {
      if (name_of(type) == value) entry_->dtype = type;
    }
    place_ = Place::tensor;
    return entry_->dtype.has_value() ||
           fail(fmt::format("dtype {} given, BF16, F16, F32, I32, I64 or U8 allowed", in_quotes(value)));
  }

  bool start_object(std::size_t /*elements*/) {
    switch (place_) {
      case Place::start: place_ = Place::header; return true;
      case Place::tensor_value: place_ = Place::tensor; return true;
      case Place::metadata_start: place_ = Place::metadata; return true;
      default: return unexpected("an object");
    }
  }
  bool end_object() {
    if (place_ == Place::tensor) {
      const std::string_view missing = !entry_->dtype          ? "dtype"
                                       : !entry_->shape        ? "shape"
                                       : !entry_->data_offsets ? "data_offsets"
                                                               : "";
      if (!missing.empty()) return fail(fmt::format("{} is missing", missing));
    }
    place_ = place_ == Place::header ? Place::end : Place::header;
    where_.clear();
    return true;
  }

  bool start_array(std::size_t /*elements*/) {
    if (place_ != Place::array) return unexpected("an array");
    place_ = Place::numbers;
    return true;
  }
  bool end_array() {
    place_ = Place::tensor;
    return true;
  }

  bool key(std::string& name) {
    if (place_ == Place::header) return header_key(name);
    if (place_ == Place::metadata) return metadata_key(name);
    return tensor_key(name);
  }

  bool parse_error(std::size_t position, const std::string& /*token*/, const Json::exception& /*exception*/) {
    return fail(fmt::format("no JSON at byte {} of the header", position));
  }

 private:
  enum class Place {
    start,
    header,
    tensor_value,
    tensor,
    dtype,
    array,
    numbers,
    metadata_start,
    metadata,
    metadata_value,
    end
  };

  bool fail(std::string_view problem) {
    problem_ = where_.empty() ? std::string(problem) : fmt::format("{}: {}", where_, problem);
    return false;
  }
  bool unexpected(std::string_view given) {
    const auto allowed = [this]() -> std::string_view {
      switch (place_) {
        case Place::start: return "an object";
        case Place::tensor_value: return "an object with dtype, shape and data_offsets";
        case Place::dtype: return "a string for dtype";
        case Place::array: return "an array of integers for shape and data_offsets";
        case Place::numbers: return "non-negative integers in shape and data_offsets";
        case Place::metadata_start: return "an object";
        case Place::metadata_value: return "a string";
        default: return "a name";
      }
    };
    return fail(fmt::format("{} given, {} allowed", given, allowed()));
  }

  bool header_key(const std::string& name) {
    if (name == kMetadata) {
      where_ = kMetadata;
      place_ = Place::metadata_start;
      if (has_metadata_) return fail("named twice");
      has_metadata_ = true;
      return true;
    }
    where_ = "tensor " + in_quotes(name);
    place_ = Place::tensor_value;
    const auto [position, inserted] = header_.tensors.try_emplace(name);
    entry_ = &position->second;
    return inserted || fail("named twice");
  }
  bool metadata_key(const std::string& name) {
    place_ = Place::metadata_value;
    const auto [position, inserted] = header_.metadata.try_emplace(name);
    text_ = &position->second;
    return inserted || fail(fmt::format("{} named twice", in_quotes(name)));
  }
  bool tensor_key(const std::string& name) {
    if (name == "dtype") {
      place_ = Place::dtype;
      return !entry_->dtype || fail("dtype named twice");
    }
    if (name != "shape" && name != "data_offsets") {
      return fail(fmt::format("field {} given, dtype, shape and data_offsets allowed", in_quotes(name)));
    }
    place_ = Place::array;
    std::optional<std::vector<std::int64_t>>& field = name == "shape" ? entry_->shape : entry_->data_offsets;
    if (field) return fail(fmt::format("{} named twice", name));
    numbers_ = &field.emplace();
    return true;
  }

  Header& header_;
  Place place_ = Place::start;
  std::string where_;
  std::string problem_;
  bool has_metadata_ = false;
  Entry* entry_ = nullptr;
  std::string* text_ = nullptr;
  std::vector<std::int64_t>* numbers_ = nullptr;
};

/// Bytes of a tensor, or nothing when a product of its extents leaves 63 bits. Extents of 0 are left out of the
/// product: [0, 2^62, 2^62] would still overflow whoever computes a stride.
std::optional<std::int64_t> checked_bytes(DType dtype, const std::vector<std::int64_t>& shape) {
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (bytes > std::numeric_limits<std::int64_t>::max() / extent) {
      return std::nullopt;
    } else {
      bytes *= extent;
    }
  }
  return empty ? 0 : bytes;
}

/// The problem with a tensor's own fields, empty when there is none.
std::string entry_problem(const Entry& entry, std::int64_t data_bytes) {
  const std::vector<std::int64_t>& offsets = *entry.data_offsets;
  if (offsets.size() != 2) return fmt::format("data_offsets: {} numbers given, 2 allowed", offsets.size());
  if (offsets[0] > offsets[1]) return fmt::format("data_offsets: {} to {} is reversed", offsets[0], offsets[1]);
  if (offsets[1] > data_bytes) {
    return fmt::format("data_offsets: end {} given, at most {} (the bytes of data in the file) allowed", offsets[1],
                       data_bytes);
  }
  const std::optional<std::int64_t> bytes = checked_bytes(*entry.dtype, *entry.shape);
  if (!bytes) return "shape: the number of bytes overflows 63 bits";
  if (*bytes != offsets[1] - offsets[0]) {
    return fmt::format("data_offsets: {} bytes given, {} (shape x {}) allowed", offsets[1] - offsets[0], *bytes,
                       name_of(*entry.dtype));
  }
  return "";
}

/// Every byte of the data belongs to one tensor: no overlap that aliases, no hole that hides something.
std::string layout_problem(const Header& header, std::int64_t data_bytes) {
  using Named = std::pair<const std::string, Entry>;
  std::vector<const Named*> order;
  order.reserve(header.tensors.size());
  for (const Named& named : header.tensors) order.push_back(&named);
  std::ranges::sort(order, {}, [](const Named* named) { return *named->second.data_offsets; });
  std::int64_t covered = 0;
  for (const auto* named : order) {
    const std::int64_t begin = (*named->second.data_offsets)[0];
    if (begin < covered) {
      return fmt::format("tensor {}: begins at byte {}, which another tensor covers", in_quotes(named->first), begin);
    }
    if (begin > covered) return fmt::format("bytes {} to {} of the data belong to no tensor", covered, begin);
    covered = (*named->second.data_offsets)[1];
  }
  if (covered < data_bytes) return fmt::format("bytes {} to {} of the data belong to no tensor", covered, data_bytes);
  return "";
}

/// The problem with a file's first 8 bytes, empty when there is none.
std::string length_problem(std::uint64_t header_bytes, std::uint64_t file_bytes) {
  if (header_bytes > kMaxHeader) {
    return fmt::format("a header of {} bytes given, at most {} allowed", header_bytes, kMaxHeader);
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    return fmt::format("a header of {} bytes given, {} bytes follow: the file is truncated", header_bytes,
                       file_bytes - kLengthBytes);
  }
  return "";
}

/// Fills `header`; the problem, empty when there is none.
std::string parse_header(std::string_view text, std::int64_t data_bytes, Header& header) {
  if (!text.starts_with('{')) return "the header does not begin with {, a JSON object allowed";
  // The JSON lexer takes a NUL for the end of its input, so anything could hide behind one.
  if (text.find('\0') != std::string_view::npos) return "the header holds a NUL byte";
  HeaderHandler handler(header);
  if (!Json::sax_parse(text.begin(), text.end(), &handler)) return handler.problem();
  for (const auto& [name, entry] : header.tensors) {
    const std::string problem = entry_problem(entry, data_bytes);
    if (!problem.empty()) return fmt::format("tensor {}: {}", in_quotes(name), problem);
  }
  return layout_problem(header, data_bytes);
}

/// A safetensors file, wherever its bytes come from.
class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  /// The bytes at `offset`, all of them; the problem, empty when there is none. They are known to lie within size().
  virtual std::string read(std::uint64_t offset, std::span<std::byte> bytes) = 0;
};

class MemorySource final : public Source {
 public:
  explicit MemorySource(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  std::string read(std::uint64_t offset, std::span<std::byte> bytes) override {
    std::ranges::copy(bytes_.subspan(offset, bytes.size()), bytes.begin());
    return "";
  }

 private:
  std::span<const std::byte> bytes_;
};

class FileSource final : public Source {
 public:
  ~FileSource() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  /// The problem, empty when there is none.
  std::string open(const std::filesystem::path& path) {
    // Without O_NONBLOCK the open of a pipe waits for its writer.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status{};
    if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0) return cannot_read(errno);
    if (S_ISDIR(status.st_mode)) return cannot_read(EISDIR);
    if (!S_ISREG(status.st_mode)) return "cannot be read: not a regular file";
    size_ = static_cast<std::uint64_t>(status.st_size);
    return "";
  }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  std::string read(std::uint64_t offset, std::span<std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t count = ::pread(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return cannot_read(errno);
      if (count == 0) return "cannot be read: the file shrank meanwhile";
      bytes = bytes.subspan(static_cast<std::size_t>(count));
      offset += static_cast<std::uint64_t>(count);
    }
    return "";
  }

 private:
  static std::string cannot_read(int error) {
    return fmt::format("cannot be read: {}", std::generic_category().message(error));
  }
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// Fills `file`; the problem, empty when there is none. The sizes are checked before anything of that size is
/// allocated.
std::string read_from(Source& source, TensorFile& file) {
  if (source.size() < kLengthBytes) {
    return fmt::format("{} bytes given, at least 8 (the header's length) allowed", source.size());
  }
  std::uint64_t header_bytes = 0;
  std::string problem = source.read(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  if (problem.empty()) problem = length_problem(header_bytes, source.size());
  if (!problem.empty()) return problem;

  std::string text(header_bytes, '\0');
  problem = source.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  if (!problem.empty()) return problem;
  const std::uint64_t data_begin = kLengthBytes + header_bytes;
  Header header;
  problem = parse_header(text, static_cast<std::int64_t>(source.size() - data_begin), header);
  if (!problem.empty()) return problem;

  file.metadata = std::move(header.metadata);
  for (auto& [name, entry] : header.tensors) {
    const auto begin = static_cast<std::uint64_t>((*entry.data_offsets)[0]);
    const auto end = static_cast<std::uint64_t>((*entry.data_offsets)[1]);
    Tensor& tensor = file.tensors[name];
    tensor.dtype = *entry.dtype;
    tensor.shape = std::move(*entry.shape);
    tensor.data.resize(end - begin);
    problem = source.read(data_begin + begin, tensor.data);
    if (!problem.empty()) return problem;
  }
  return "";
}

Result<TensorFile> read_guarded(Source& source, const std::string& name) {
  try {
    TensorFile file;
    const std::string problem = read_from(source, file);
    if (!problem.empty()) return io_error(fmt::format("{}: {}", name, problem));
    return file;
  } catch (const std::bad_alloc&) {
    return io_error(name + ": not enough memory");
  } catch (const std::exception& exception) {
    return io_error(fmt::format("{}: {}", name, exception.what()));
  }
}

std::string tensor_problem(const std::string& name, const Tensor& tensor) {
  if (name == kMetadata) return "the name is reserved";
  const std::optional<std::int64_t> bytes = checked_bytes(tensor.dtype, tensor.shape);
  if (!bytes) {
    return fmt::format("shape [{}] given, non-negative extents and less than 2^63 bytes allowed",
                       fmt::join(tensor.shape, ", "));
  }
  if (static_cast<std::uint64_t>(*bytes) != tensor.data.size()) {
    return fmt::format("{} bytes given, {} (shape [{}] x {}) allowed", tensor.data.size(), *bytes,
                       fmt::join(tensor.shape, ", "), name_of(tensor.dtype));
  }
  return "";
}

using NamedTensor = std::pair<const std::string, Tensor>;

/// Large elements first: without holes, which readers refuse, each tensor then is aligned to its own elements.
std::vector<const NamedTensor*> data_order(const TensorFile& file) {
  std::vector<const NamedTensor*> order;
  order.reserve(file.tensors.size());
  for (const NamedTensor& named : file.tensors) order.push_back(&named);
  const auto rank = [](const NamedTensor* named) {
    return std::pair(sizeof(std::int64_t) - size_of(named->second.dtype), std::string_view(named->first));
  };
  std::ranges::sort(order, {}, rank);
  return order;
}

/// The header with its length in front, padded with spaces so that the data begins at a multiple of 8.
std::string header_text(const TensorFile& file, const std::vector<const NamedTensor*>& order) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!file.metadata.empty()) header[std::string(kMetadata)] = file.metadata;
  std::size_t offset = 0;
  for (const NamedTensor* named : order) {
    const Tensor& tensor = named->second;
    header[named->first] = {{"dtype", name_of(tensor.dtype)},
                            {"shape", tensor.shape},
                            {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  std::array<char, kLengthBytes> prefix{};
  std::memcpy(prefix.data(), &length, prefix.size());
  return std::string(prefix.data(), prefix.size()) + text;
}

Status write_checked(const std::filesystem::path& path, const TensorFile& file) {
  for (const auto& [name, tensor] : file.tensors) {
    const std::string problem = tensor_problem(name, tensor);
    if (!problem.empty()) return invalid(fmt::format("{}: tensor {}: {}", path.string(), in_quotes(name), problem));
  }
  const std::vector<const NamedTensor*> order = data_order(file);
  const std::string header = header_text(file, order);
  if (header.size() - kLengthBytes > kMaxHeader) {
    return invalid(fmt::format("{}: a header of {} bytes given, at most {} allowed", path.string(),
                               header.size() - kLengthBytes, kMaxHeader));
  }
  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(header))};
  for (const NamedTensor* named : order) parts.emplace_back(named->second.data);
  return write_parts(path, parts);
}

}  // namespace

Result<TensorFile> read_safetensors(const std::filesystem::path& path) {
  FileSource source;
  const std::string problem = source.open(path);
  if (!problem.empty()) return io_error(fmt::format("{}: {}", path.string(), problem));
  return read_guarded(source, path.string());
}

Result<TensorFile> parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  MemorySource source(bytes);
  return read_guarded(source, name);
}

Status write_safetensors(const std::filesystem::path& path, const TensorFile& file) {
  try {
    return write_checked(path, file);
  } catch (const Json::type_error&) {
    return invalid(path.string() + ": a name or metadata that is no UTF-8 given, UTF-8 allowed");
  } catch (const std::bad_alloc&) {
    return io_error(path.string() + ": not enough memory");
  } catch (const std::exception& exception) {
    return io_error(fmt::format("{}: {}", path.string(), exception.what()));
  }
}

}  // namespace mxflash

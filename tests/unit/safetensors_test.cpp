#include "mxflash/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>

namespace {

// Every allocation of this executable is counted, to bound what the reader asks for. Under operator new there is malloc
// alone.
std::size_t live_bytes = 0;
std::size_t peak_bytes = 0;
constexpr std::size_t kPrefix = alignof(std::max_align_t);

void* counted(std::size_t size) noexcept {
  auto* block = static_cast<std::byte*>(std::malloc(size + kPrefix));  // NOLINT(cppcoreguidelines-no-malloc)
  if (block == nullptr) return nullptr;
  std::memcpy(block, &size, sizeof size);
  live_bytes += size;
  peak_bytes = std::max(peak_bytes, live_bytes);
  return block + kPrefix;
}

void* counted_or_throw(std::size_t size) {
  void* pointer = counted(size);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

void release(void* pointer) noexcept {
  if (pointer == nullptr) return;
  std::byte* block = static_cast<std::byte*>(pointer) - kPrefix;
  std::size_t size = 0;
  std::memcpy(&size, block, sizeof size);
  live_bytes -= size;
  std::free(block);  // NOLINT(cppcoreguidelines-no-malloc)
}

}  // namespace

// All forms: a sanitizer's own would not match the others.
void* operator new(std::size_t size) { return counted_or_throw(size); }
void* operator new[](std::size_t size) { return counted_or_throw(size); }
void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept { return counted(size); }
void* operator new[](std::size_t size, const std::nothrow_t& /*tag*/) noexcept { return counted(size); }
void operator delete(void* pointer) noexcept { release(pointer); }
void operator delete[](void* pointer) noexcept { release(pointer); }
void operator delete(void* pointer, std::size_t /*size*/) noexcept { release(pointer); }
void operator delete[](void* pointer, std::size_t /*size*/) noexcept { release(pointer); }
void operator delete(void* pointer, const std::nothrow_t& /*tag*/) noexcept { release(pointer); }
void operator delete[](void* pointer, const std::nothrow_t& /*tag*/) noexcept { release(pointer); }

namespace mxflash {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCorpus = MXFLASH_TEST_DATA "/../fuzz/corpus/safetensors";

Bytes to_bytes(std::string_view text) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

/// A file as the format's own library writes it: little-endian length, JSON, data of `data_bytes` counting up.
Bytes make_file(std::string_view json, std::size_t data_bytes = 0) {
  const std::uint64_t length = json.size();
  Bytes bytes(sizeof length);
  std::memcpy(bytes.data(), &length, sizeof length);
  const Bytes header = to_bytes(json);
  bytes.insert(bytes.end(), header.begin(), header.end());
  for (std::size_t i = 0; i < data_bytes; ++i) bytes.push_back(static_cast<std::byte>(i));
  return bytes;
}

/// One tensor "x" with these fields.
std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"({{"x":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape, offsets);
}

std::string verdict(const Bytes& bytes) {
  const Result<TensorFile> file = parse_safetensors(bytes, "f");
  if (file) return "read";
  EXPECT_EQ(file.error().kind, ErrorKind::io);
  EXPECT_EQ(file.error().message.find('\n'), std::string::npos) << file.error().message;
  return file.error().message;
}

bool same(const TensorFile& a, const TensorFile& b) {
  const auto equal = [](const auto& left, const auto& right) {
    return left.first == right.first && left.second.dtype == right.second.dtype &&
           left.second.shape == right.second.shape && left.second.data == right.second.data;
  };
  return a.metadata == b.metadata && std::ranges::equal(a.tensors, b.tensors, equal);
}

Bytes read_bytes(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<char> text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  return to_bytes({text.data(), text.size()});
}

TensorFile example() {
  TensorFile file;
  file.metadata = {{"causal", "true"}, {"softmax_scale", "0.125"}, {"note", "Zeilen\n\"zitiert\" \xC3\xA4"}};
  file.tensors["q"] = Tensor::from_floats(DType::bf16, {2, 1, 3}, {1, -2, 3, 0.5F, 0, -0.25F});
  file.tensors["a"] = Tensor::zeros(DType::u8, {3});
  file.tensors["h"] = Tensor::from_floats(DType::f16, {1}, {7});
  file.tensors["wide"] = Tensor::from_floats(DType::f32, {1, 2}, {1.5F, -2.5F});
  file.tensors["cu_seqlens"] = Tensor::zeros(DType::i32, {2});
  file.tensors["long"] = Tensor::zeros(DType::i64, {1});
  file.tensors["none"] = Tensor::zeros(DType::f32, {0, 4});
  file.tensors["scalar"] = Tensor::from_floats(DType::f32, {}, {42});
  file.tensors["a"].data = {std::byte{1}, std::byte{2}, std::byte{255}};
  return file;
}

/// A directory of its own for each test.
class Files : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "safetensors_test.XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory_)) {
      all.push_back(entry.path().filename().string());
    }
    std::ranges::sort(all);
    return all;
  }
  [[nodiscard]] fs::path put(const std::string& name, const Bytes& bytes) const {
    std::ofstream stream(directory_ / name, std::ios::binary);
    for (const std::byte byte : bytes) stream.put(static_cast<char>(byte));
    return directory_ / name;
  }

  fs::path directory_;
};

TEST(Safetensors, ReadsAFileOfTheFormatsOwnLibrary) {
  const Bytes bytes =
      make_file(R"({"__metadata__":{"causal":"true"},"b":{"dtype":"I32","shape":[1,2],"data_offsets":[0,8]},)"
                R"("a":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}   )",
                11);
  const Result<TensorFile> file = parse_safetensors(bytes, "f");
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->metadata, (std::map<std::string, std::string>{{"causal", "true"}}));
  ASSERT_EQ(file->tensors.size(), 2U);
  EXPECT_EQ(file->tensors.at("b").dtype, DType::i32);
  EXPECT_EQ(file->tensors.at("b").shape, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(file->tensors.at("b").data, Bytes(bytes.end() - 11, bytes.end() - 3));
  EXPECT_EQ(file->tensors.at("a").dtype, DType::u8);
  EXPECT_EQ(file->tensors.at("a").data, Bytes(bytes.end() - 3, bytes.end()));
}

TEST(Safetensors, ReadsEveryType) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::i32, DType::i64, DType::u8}) {
    const std::size_t size = size_of(dtype);
    const Bytes bytes = make_file(one(name_of(dtype), "[2,1]", fmt::format("[0,{}]", 2 * size)), 2 * size);
    const Result<TensorFile> file = parse_safetensors(bytes, "f");
    ASSERT_TRUE(file.ok()) << file.error().message;
    EXPECT_EQ(file->tensors.at("x").dtype, dtype);
  }
}

TEST(Safetensors, RefusesTypesByName) {
  for (const std::string dtype : {"F64", "BOOL", "I8", "U16", "F8_E4M3", "bf16", ""}) {
    EXPECT_EQ(verdict(make_file(one(dtype, "[0]", "[0,0]"))),
              fmt::format("f: tensor \"x\": dtype \"{}\" given, BF16, F16, F32, I32, I64 or U8 allowed", dtype));
  }
}

TEST(Safetensors, ZeroElementsAreFine) {
  for (const std::string shape : {"[0]", "[0,4611686018427387904]", "[4,0,7]", "[9223372036854775807,0]"}) {
    EXPECT_EQ(verdict(make_file(one("U8", shape, "[0,0]"))), "read") << shape;
  }
  EXPECT_EQ(verdict(make_file("{}")), "read");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":{}})")), "read");
}

TEST(Safetensors, RefusesShapes) {
  const std::string overflow = "f: tensor \"x\": shape: the number of bytes overflows 63 bits";
  EXPECT_EQ(verdict(make_file(one("F32", "[4611686018427387904,4]", "[0,0]"))), overflow);
  EXPECT_EQ(verdict(make_file(one("F32", "[2305843009213693952]", "[0,0]"))), overflow);
  EXPECT_EQ(verdict(make_file(one("U8", "[4294967296,4294967296]", "[0,0]"))), overflow);
  // The product is 0, but a stride of this shape would overflow.
  EXPECT_EQ(verdict(make_file(one("U8", "[0,4611686018427387904,4]", "[0,0]"))), overflow);
  const std::string numbers = " given, non-negative integers in shape and data_offsets allowed";
  EXPECT_EQ(verdict(make_file(one("U8", "[-1]", "[0,0]"))), "f: tensor \"x\": the negative number -1" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "[1.5]", "[0,0]"))), "f: tensor \"x\": the number \"1.5\"" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "[9223372036854775808]", "[0,0]"))),
            "f: tensor \"x\": the number 9223372036854775808 beyond 64 bits with a sign" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "[18446744073709551616]", "[0,0]"))),
            "f: tensor \"x\": the number \"18446744073709551616\"" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "[null]", "[0,0]"))), "f: tensor \"x\": null" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "[[1]]", "[0,0]"))), "f: tensor \"x\": an array" + numbers);
  EXPECT_EQ(verdict(make_file(one("U8", "\"1\"", "[0,0]"))),
            "f: tensor \"x\": the string \"1\" given, an array of integers for shape and data_offsets allowed");
}

TEST(Safetensors, RefusesOffsets) {
  const auto offsets = [](std::string_view pair, std::size_t data_bytes) {
    return verdict(make_file(one("U8", "[4]", pair), data_bytes));
  };
  EXPECT_EQ(offsets("[0,4]", 4), "read");
  EXPECT_EQ(offsets("[4,0]", 4), "f: tensor \"x\": data_offsets: 4 to 0 is reversed");
  EXPECT_EQ(offsets("[0,5]", 4),
            "f: tensor \"x\": data_offsets: end 5 given, at most 4 (the bytes of data in the file) allowed");
  EXPECT_EQ(offsets("[9223372036854775803,9223372036854775807]", 4),
            "f: tensor \"x\": data_offsets: end 9223372036854775807 given, at most 4 (the bytes of data in the file) "
            "allowed");
  EXPECT_EQ(offsets("[0,3]", 3), "f: tensor \"x\": data_offsets: 3 bytes given, 4 (shape x U8) allowed");
  EXPECT_EQ(offsets("[0]", 4), "f: tensor \"x\": data_offsets: 1 numbers given, 2 allowed");
  EXPECT_EQ(offsets("[0,4,4]", 4), "f: tensor \"x\": data_offsets: 3 numbers given, 2 allowed");
  EXPECT_EQ(offsets("[1,5]", 5), "f: bytes 0 to 1 of the data belong to no tensor");
  EXPECT_EQ(offsets("[0,4]", 6), "f: bytes 4 to 6 of the data belong to no tensor");
}

TEST(Safetensors, RefusesOverlapsAndHoles) {
  const auto two = [](std::string_view first, std::string_view second) {
    return verdict(make_file(fmt::format(R"({{"a":{{"dtype":"U8","shape":[2],"data_offsets":{}}},)"
                                         R"("b":{{"dtype":"U8","shape":[2],"data_offsets":{}}}}})",
                                         first, second),
                             4));
  };
  EXPECT_EQ(two("[0,2]", "[2,4]"), "read");
  EXPECT_EQ(two("[2,4]", "[0,2]"), "read");
  EXPECT_EQ(two("[0,2]", "[0,2]"), "f: tensor \"b\": begins at byte 0, which another tensor covers");
  EXPECT_EQ(two("[0,2]", "[1,3]"), "f: tensor \"b\": begins at byte 1, which another tensor covers");
  EXPECT_EQ(two("[2,4]", "[1,3]"), "f: bytes 0 to 1 of the data belong to no tensor");
  EXPECT_EQ(verdict(make_file("{}", 1)), "f: bytes 0 to 1 of the data belong to no tensor");
}

TEST(Safetensors, RefusesRepeatedNames) {
  const std::string x = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_EQ(verdict(make_file(R"({"x":)" + x + R"(,"x":)" + x + "}")), "f: tensor \"x\": named twice");
  EXPECT_EQ(verdict(make_file(R"({"x":)" + x + R"(,"\u0078":)" + x + "}")), "f: tensor \"x\": named twice");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":{},"__metadata__":{}})")), "f: __metadata__: named twice");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":{"a":"","a":""}})")), "f: __metadata__: \"a\" named twice");
  for (const std::string field : {R"("dtype":"U8")", R"("shape":[0])", R"("data_offsets":[0,0])"}) {
    const std::string header = R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],)" + field + "}}";
    EXPECT_EQ(verdict(make_file(header)),
              fmt::format("f: tensor \"x\": {} named twice", field.substr(1, field.find(':') - 2)));
  }
}

TEST(Safetensors, RefusesOtherFields) {
  EXPECT_EQ(verdict(make_file(R"({"x":{"dtype":"U8","shape":[0]}})")), "f: tensor \"x\": data_offsets is missing");
  EXPECT_EQ(verdict(make_file(R"({"x":{"dtype":"U8","data_offsets":[0,0]}})")), "f: tensor \"x\": shape is missing");
  EXPECT_EQ(verdict(make_file(R"({"x":{}})")), "f: tensor \"x\": dtype is missing");
  EXPECT_EQ(verdict(make_file(R"({"x":{"strides":[1]}})")),
            "f: tensor \"x\": field \"strides\" given, dtype, shape and data_offsets allowed");
  EXPECT_EQ(verdict(make_file(R"({"x":{"dtype":7}})")),
            "f: tensor \"x\": the number 7 given, a string for dtype allowed");
  EXPECT_EQ(verdict(make_file(R"({"x":[]})")),
            "f: tensor \"x\": an array given, an object with dtype, shape and data_offsets allowed");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":[]})")), "f: __metadata__: an array given, an object allowed");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":{"a":true}})")), "f: __metadata__: a boolean given, a string allowed");
  EXPECT_EQ(verdict(make_file(R"({"__metadata__":{"a":{}}})")), "f: __metadata__: an object given, a string allowed");
}

TEST(Safetensors, RefusesWhatIsNoHeader) {
  EXPECT_EQ(verdict({}), "f: 0 bytes given, at least 8 (the header's length) allowed");
  EXPECT_EQ(verdict(Bytes(7)), "f: 7 bytes given, at least 8 (the header's length) allowed");
  const std::string no_object = "f: the header does not begin with {, a JSON object allowed";
  for (const std::string text : {"", "[]", " {}", "null", "\xEF\xBB\xBF{}"})
    EXPECT_EQ(verdict(make_file(text)), no_object);
  EXPECT_EQ(verdict(make_file("{")), "f: no JSON at byte 2 of the header");
  EXPECT_EQ(verdict(make_file("{}{}")), "f: no JSON at byte 3 of the header");
  EXPECT_EQ(verdict(make_file("{/**/}")), "f: no JSON at byte 2 of the header");
  EXPECT_EQ(verdict(make_file(std::string_view("{}\0x", 4))), "f: the header holds a NUL byte");
  EXPECT_EQ(verdict(make_file("{\"\xFF\":{}}")), "f: no JSON at byte 3 of the header");
  Bytes truncated = make_file("{}");
  truncated[0] = std::byte{3};
  EXPECT_EQ(verdict(truncated), "f: a header of 3 bytes given, 2 bytes follow: the file is truncated");
  truncated[7] = std::byte{255};
  EXPECT_EQ(verdict(truncated), "f: a header of 18374686479671623683 bytes given, at most 100000000 allowed");
}

TEST(Safetensors, DeepNestingIsRefusedAtItsFirstLevel) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(verdict(make_file(R"({"x":)" + deep)),
            "f: tensor \"x\": an array given, an object with dtype, shape and data_offsets allowed");
}

TEST(Safetensors, NamesAreShownOnOneShortLine) {
  EXPECT_EQ(verdict(make_file(R"({"a\nb\"\u00e4":7})")),
            "f: tensor \"a\\x0ab\\x22\\xc3\\xa4\": the number 7 given, an object with dtype, shape and data_offsets "
            "allowed");
  const std::string shown = verdict(make_file(R"({")" + std::string(5000, 'n') + R"(":7})"));
  EXPECT_LT(shown.size(), 300U);
}

/// What one call asked the heap for, at its peak.
std::size_t peak_of(const Bytes& bytes) {
  const std::size_t before = live_bytes;
  peak_bytes = before;
  static_cast<void>(parse_safetensors(bytes, "f"));
  return peak_bytes - before;
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const Bytes whole = make_file(one("F32", "[2,2]", "[0,16]"), 16);
  ASSERT_EQ(verdict(whole), "read");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const Bytes prefix(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_NE(verdict(prefix), "read") << length << " of " << whole.size() << " bytes";
    EXPECT_LT(peak_of(prefix), 16384U) << length;
  }
}

TEST(Safetensors, EveryChangedByteIsRefusedOrReadWhole) {
  const Bytes whole =
      make_file(R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}})", 8);
  ASSERT_EQ(verdict(whole), "read");
  for (std::size_t place = 0; place < whole.size(); ++place) {
    for (int value = 0; value < 256; ++value) {
      Bytes changed = whole;
      changed[place] = static_cast<std::byte>(value);
      ASSERT_LT(peak_of(changed), 16384U) << "byte " << place << " value " << value;
      const Result<TensorFile> file = parse_safetensors(changed, "f");
      if (!file) continue;
      std::size_t total = 0;
      for (const auto& [name, tensor] : file->tensors) total += tensor.data.size();
      ASSERT_EQ(total, 8U) << "byte " << place << " value " << value;
    }
  }
}

TEST(Safetensors, MemoryStaysWithinASmallMultipleOfTheFile) {
  constexpr std::size_t kMultiple = 12;  // A name of a few characters becomes a few words of the heap.
  std::string many = "{";
  for (int i = 0; i < 20000; ++i) {
    many += fmt::format(R"({}"{}":{{"dtype":"U8","shape":[],"data_offsets":[{},{}]}})", i == 0 ? "" : ",", i, i, i + 1);
  }
  many += "}";
  const Bytes tensors = make_file(many, 20000);
  ASSERT_EQ(verdict(tensors), "read");
  EXPECT_LT(peak_of(tensors), kMultiple * tensors.size());
  std::string shape = "[0";
  for (int i = 0; i < 200000; ++i) shape += ",0";
  const Bytes extents = make_file(one("U8", shape + "]", "[0,0]"));
  ASSERT_EQ(verdict(extents), "read");
  EXPECT_LT(peak_of(extents), kMultiple * extents.size());
  std::string metadata = R"({"__metadata__":{)";
  for (int i = 0; i < 20000; ++i) metadata += fmt::format(R"({}"{}":"")", i == 0 ? "" : ",", i);
  const Bytes names = make_file(metadata + "}}");
  ASSERT_EQ(verdict(names), "read");
  EXPECT_LT(peak_of(names), kMultiple * names.size());
}

/// Everything the fuzzer kept: one file for each path through the parser.
TEST(Safetensors, FuzzCorpusIsRefusedOrReadWhole) {
  int files = 0;
  int read = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(kCorpus)) {
    const Bytes bytes = read_bytes(entry.path());
    ++files;
    ASSERT_LT(peak_of(bytes), 65536 + 12 * bytes.size()) << entry.path();
    const Result<TensorFile> file = parse_safetensors(bytes, "f");
    if (!file) {
      EXPECT_TRUE(file.error().message.starts_with("f: ")) << entry.path();
      EXPECT_EQ(file.error().message.find('\n'), std::string::npos) << entry.path();
      continue;
    }
    ++read;
    std::uint64_t total = 0;
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    for (const auto& [name, tensor] : file->tensors) total += tensor.data.size();
    EXPECT_EQ(total + header + 8, bytes.size()) << entry.path();
  }
  EXPECT_GE(files, 12);
  EXPECT_GE(read, 5);
}

TEST_F(Files, RoundTrip) {
  const fs::path path = directory_ / "out.safetensors";
  const TensorFile file = example();
  const Status status = write_safetensors(path, file);
  ASSERT_TRUE(status.ok()) << status.error().message;
  EXPECT_EQ(names(), std::vector<std::string>{"out.safetensors"});
  const Result<TensorFile> again = read_safetensors(path);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_TRUE(same(file, *again));
  // The same bytes from memory, and the same bytes written again.
  const Bytes bytes = read_bytes(path);
  const Result<TensorFile> parsed = parse_safetensors(bytes, "f");
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  EXPECT_TRUE(same(file, *parsed));
  ASSERT_TRUE(write_safetensors(path, *again).ok());
  EXPECT_EQ(read_bytes(path), bytes);
}

TEST_F(Files, WhateverIsReadCanBeWritten) {
  const fs::path path = directory_ / "again";
  int read = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(kCorpus)) {
    const Result<TensorFile> file = read_safetensors(entry.path());
    if (!file) continue;
    ++read;
    const Status status = write_safetensors(path, *file);
    ASSERT_TRUE(status.ok()) << entry.path() << ": " << status.error().message;
    const Result<TensorFile> again = read_safetensors(path);
    ASSERT_TRUE(again.ok()) << entry.path() << ": " << again.error().message;
    EXPECT_TRUE(same(*file, *again)) << entry.path();
  }
  EXPECT_GE(read, 5);
}

TEST_F(Files, AnEmptyFileRoundTrips) {
  const fs::path path = directory_ / "empty.safetensors";
  ASSERT_TRUE(write_safetensors(path, {}).ok());
  EXPECT_EQ(read_bytes(path), make_file("{}      "));
  const Result<TensorFile> again = read_safetensors(path);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_TRUE(same({}, *again));
}

TEST_F(Files, WritesAlignedTensorsInAFixedOrder) {
  TensorFile file;
  file.tensors["a"] = Tensor::zeros(DType::u8, {3});
  file.tensors["b"] = Tensor::zeros(DType::f32, {1});
  file.tensors["c"] = Tensor::zeros(DType::i64, {1});
  file.tensors["d"] = Tensor::zeros(DType::f32, {1});
  file.metadata["causal"] = "true";
  const fs::path path = directory_ / "order.safetensors";
  ASSERT_TRUE(write_safetensors(path, file).ok());
  std::string header =
      R"({"__metadata__":{"causal":"true"},"c":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"d":{"dtype":"F32","shape":[1],"data_offsets":[12,16]},)"
      R"("a":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  Bytes expected = make_file(header);
  expected.insert(expected.end(), 19, std::byte{0});
  EXPECT_EQ(read_bytes(path), expected);
}

TEST_F(Files, WriteRefusesWhatCouldNotBeRead) {
  const fs::path path = directory_ / "refused.safetensors";
  const auto refusal = [&](const std::string& name, const Tensor& tensor) {
    TensorFile file;
    file.tensors[name] = tensor;
    const Status status = write_safetensors(path, file);
    return status ? "written" : status.error().message.substr(path.string().size());
  };
  Tensor tensor = Tensor::zeros(DType::f32, {2});
  tensor.data.pop_back();
  EXPECT_EQ(refusal("x", tensor), ": tensor \"x\": 7 bytes given, 8 (shape [2] x F32) allowed");
  tensor.shape = {-1, -2};
  EXPECT_EQ(refusal("x", tensor),
            ": tensor \"x\": shape [-1, -2] given, non-negative extents and less than 2^63 bytes allowed");
  EXPECT_EQ(refusal("__metadata__", Tensor::zeros(DType::u8, {1})), ": tensor \"__metadata__\": the name is reserved");
  EXPECT_EQ(refusal("\xFF", Tensor::zeros(DType::u8, {1})),
            ": a name or metadata that is no UTF-8 given, UTF-8 allowed");
  EXPECT_TRUE(names().empty());
}

TEST_F(Files, WhatCannotBeReadIsNamed) {
  const auto reason = [](const fs::path& path) {
    const Result<TensorFile> file = read_safetensors(path);
    if (file) return std::string("read");
    EXPECT_EQ(file.error().kind, ErrorKind::io);
    EXPECT_TRUE(file.error().message.starts_with(path.string() + ": ")) << file.error().message;
    return file.error().message.substr(path.string().size() + 2);
  };
  EXPECT_EQ(reason(directory_ / "missing"), "cannot be read: No such file or directory");
  EXPECT_EQ(reason(directory_), "cannot be read: Is a directory");
  EXPECT_EQ(reason(put("plain", to_bytes("12345678")) / "x"), "cannot be read: Not a directory");
  EXPECT_EQ(reason("/dev/null"), "cannot be read: not a regular file");
  EXPECT_EQ(reason(""), "cannot be read: No such file or directory");
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(reason(directory_ / "pipe"), "cannot be read: not a regular file");
  EXPECT_EQ(reason(put("empty", {})), "0 bytes given, at least 8 (the header's length) allowed");
  fs::create_symlink(directory_ / "loop", directory_ / "loop");
  EXPECT_EQ(reason(directory_ / "loop"), "cannot be read: Too many levels of symbolic links");
}

TEST_F(Files, ALyingHeaderOfAHugeFileCostsNoMemory) {
  const fs::path path = put("sparse", make_file("{}"));
  fs::resize_file(path, std::uintmax_t{1} << 36);
  const std::size_t before = live_bytes;
  peak_bytes = before;
  const Result<TensorFile> file = read_safetensors(path);
  EXPECT_LT(peak_bytes - before, 65536U);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.error().message, path.string() + ": bytes 0 to 68719476726 of the data belong to no tensor");
}

TEST_F(Files, FailedWritesNameTheReasonAndLeaveNothing) {
  const fs::path plain = put("plain", to_bytes("kept"));
  const auto reason = [](const fs::path& path) {
    const Status status = write_safetensors(path, example());
    if (status) return std::string("written");
    EXPECT_EQ(status.error().kind, ErrorKind::io);
    EXPECT_TRUE(status.error().message.starts_with(path.string() + ": ")) << status.error().message;
    return status.error().message.substr(path.string().size() + 2);
  };
  EXPECT_EQ(reason(plain / "x"), "cannot be written: Not a directory");
  EXPECT_EQ(reason(directory_ / "missing" / "x"), "cannot be written: No such file or directory");
  EXPECT_EQ(reason(directory_), "cannot be written: Is a directory");
  EXPECT_EQ(reason("/dev/null"), "cannot be written: not a regular file");
  EXPECT_NE(reason("/proc/x"), "written");
  EXPECT_EQ(reason(directory_ / std::string(300, 'n')), "cannot be written: File name too long");
  EXPECT_FALSE(write_safetensors("", example()).ok());
  EXPECT_EQ(names(), std::vector<std::string>{"plain"});
  EXPECT_EQ(read_bytes(plain), to_bytes("kept"));
}

/// Files of this process end at `bytes` for a while, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit low{bytes, limit_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &low);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    EXPECT_NE(std::signal(SIGXFSZ, handler_), SIG_ERR);
  }

 private:
  rlimit limit_{};
  void (*handler_)(int);
};

TEST_F(Files, AFullDiskLeavesTheTargetAsItWas) {
  const fs::path path = put("out", to_bytes("kept"));
  TensorFile file;
  file.tensors["x"] = Tensor::zeros(DType::u8, {100'000});
  Status status;
  {
    const FullDisk full(4096);
    status = write_safetensors(path, file);
  }
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message, path.string() + ": cannot be written: File too large");
  EXPECT_EQ(read_bytes(path), to_bytes("kept"));
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
  EXPECT_TRUE(write_safetensors(path, file).ok());
}

TEST_F(Files, WriteReplacesAFileAndFollowsALink) {
  const fs::path path = put("real", to_bytes("old"));
  fs::create_symlink("real", directory_ / "link");
  ASSERT_TRUE(write_file(directory_ / "link", to_bytes("new")).ok());
  EXPECT_TRUE(fs::is_symlink(directory_ / "link"));
  EXPECT_EQ(read_bytes(path), to_bytes("new"));
  ASSERT_TRUE(write_file(path, {}).ok());
  EXPECT_TRUE(read_bytes(path).empty());
  EXPECT_EQ(names(), (std::vector<std::string>{"link", "real"}));
}

TEST_F(Files, WriteKeepsOutOfTheWayOfLeftTemporaries) {
  // A crashed process of the same id left these; they are neither used nor removed.
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(fs::exists(put(fmt::format(".mxflash-{}-{}.tmp", ::getpid(), i), to_bytes("left"))));
  }
  ASSERT_TRUE(write_file(directory_ / "out", to_bytes("new")).ok());
  EXPECT_EQ(names().size(), 61U);
  EXPECT_EQ(read_bytes(directory_ / "out"), to_bytes("new"));
}

TEST_F(Files, WriteUsesTheUsualMode) {
  const mode_t mask = ::umask(0027);
  ASSERT_TRUE(write_file(directory_ / "out", to_bytes("new")).ok());
  ::umask(mask);
  EXPECT_EQ(fs::status(directory_ / "out").permissions(),
            fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
}

TEST_F(Files, WriteWithoutADirectoryGoesToTheCurrentOne) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_);
  const Status status = write_file("out", to_bytes("new"));
  fs::current_path(before);
  ASSERT_TRUE(status.ok()) << status.error().message;
  EXPECT_EQ(names(), std::vector<std::string>{"out"});
}

}  // namespace
}  // namespace mxflash

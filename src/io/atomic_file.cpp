#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "mxflash/safetensors.hpp"

namespace mxflash {
namespace {

Error cannot_write(const std::filesystem::path& path, int error) {
  return io_error(fmt::format("{}: cannot be written: {}", path.string(), std::generic_category().message(error)));
}

/// A file under its temporary name until commit(); removed if that never happens.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::filesystem::path target) : target_(std::move(target)) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (exists_) ::unlink(name_.c_str());
  }

  Status open() {
    static std::atomic<unsigned> counter{0};
    constexpr int kAttempts = 100;  // A crashed run of the same process id may have left its file behind.
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      name_ = (target_.parent_path() / fmt::format(".mxflash-{}-{}.tmp", ::getpid(), counter++)).string();
      descriptor_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ >= 0) {
        exists_ = true;
        return {};
      }
      if (errno != EEXIST) break;
    }
    return cannot_write(target_, errno);
  }

  Status append(std::span<const std::byte> bytes) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // write() takes less than 2 GiB at a time.
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMost));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return cannot_write(target_, errno);
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return {};
  }

  Status commit() {
    if (::fsync(descriptor_) != 0) return cannot_write(target_, errno);
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) return cannot_write(target_, errno);
    if (::rename(name_.c_str(), target_.c_str()) != 0) return cannot_write(target_, errno);
    exists_ = false;
    sync_directory();
    return {};
  }

 private:
  /// Makes the rename durable. The file is whole either way, so a file system that cannot do it is no failure.
  void sync_directory() const {
    const std::filesystem::path parent = target_.parent_path();
    const int directory = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return;
    static_cast<void>(::fsync(directory));
    ::close(directory);
  }

  std::filesystem::path target_;
  std::string name_;
  int descriptor_ = -1;
  bool exists_ = false;
};

/// Where to write: the file behind a symbolic link, so that the link survives. rename() would replace a device, and
/// would not mind a read-only file: both are refused here.
Result<std::filesystem::path> resolve_target(const std::filesystem::path& path) {
  if (path.empty()) return io_error("output path: empty, a file name allowed");
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return path;
    return cannot_write(path, errno);
  }
  if (S_ISDIR(status.st_mode)) return cannot_write(path, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    return io_error(fmt::format("{}: cannot be written: not a regular file", path.string()));
  }
  if (::access(path.c_str(), W_OK) != 0) return cannot_write(path, errno);
  std::error_code error;
  std::filesystem::path resolved = std::filesystem::canonical(path, error);
  if (error) return cannot_write(path, error.value());
  return resolved;
}

Status write_parts_to(const std::filesystem::path& target, std::span<const std::span<const std::byte>> parts) {
  TemporaryFile file(target);
  if (Status status = file.open(); !status) return status;
  for (const std::span<const std::byte> part : parts) {
    if (Status status = file.append(part); !status) return status;
  }
  return file.commit();
}

}  // namespace

Status write_parts(const std::filesystem::path& path, std::span<const std::span<const std::byte>> parts) {
  try {
    const Result<std::filesystem::path> target = resolve_target(path);
    if (!target) return target.error();
    return write_parts_to(*target, parts);
  } catch (const std::bad_alloc&) {
    return io_error("output path: out of memory");
  } catch (const std::exception& exception) {
    return io_error(fmt::format("output path: {}", exception.what()));
  }
}

Status write_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  return write_parts(path, std::span(&bytes, 1));
}

}  // namespace mxflash

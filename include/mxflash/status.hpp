// Errors are values: what failed, with a message that names the argument, what was given and what is allowed.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace mxflash {

enum class ErrorKind {
  invalid_argument,  ///< The caller's input or recipe is refused (exit code 2 of the command line).
  unsupported,       ///< The engine asked for cannot run this here (exit code 3).
  io,                ///< A file cannot be read or written (exit code 2).
};

struct Error {
  ErrorKind kind = ErrorKind::invalid_argument;
  std::string message;
};

inline Error invalid(std::string message) { return {ErrorKind::invalid_argument, std::move(message)}; }
inline Error unsupported(std::string message) { return {ErrorKind::unsupported, std::move(message)}; }
inline Error io_error(std::string message) { return {ErrorKind::io, std::move(message)}; }

/// Success, or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor): `return invalid(...)`

  [[nodiscard]] bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  /// Precondition: !ok().
  [[nodiscard]] const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

/// A value, or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT(google-explicit-constructor): `return value`
  Result(Error error) : state_(std::move(error)) {}  // NOLINT(google-explicit-constructor): `return invalid(...)`

  [[nodiscard]] bool ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return ok(); }
  /// Precondition: ok().
  [[nodiscard]] const T& value() const& { return *std::get_if<T>(&state_); }
  [[nodiscard]] T& value() & { return *std::get_if<T>(&state_); }
  [[nodiscard]] T&& value() && { return std::move(*std::get_if<T>(&state_)); }
  const T& operator*() const& { return value(); }
  T& operator*() & { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  const T* operator->() const { return &value(); }
  T* operator->() { return &value(); }
  /// Precondition: !ok().
  [[nodiscard]] const Error& error() const { return *std::get_if<Error>(&state_); }

 private:
  std::variant<T, Error> state_;
};

}  // namespace mxflash

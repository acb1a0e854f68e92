#include "cpu/features.hpp"

#include "hwy/highway.h"
#include "hwy/targets.h"

#if HWY_ARCH_X86_64 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mxflash::cpu {
namespace {

struct Leaf7 {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
};

/// All zero where AVX-512 is missing or the system does not save it.
Leaf7 leaf7() {
  Leaf7 leaf;
  if ((hwy::SupportedTargets() & HWY_AVX3) == 0) return {};
  if (__get_cpuid_count(7, 0, &leaf.a, &leaf.b, &leaf.c, &leaf.d) == 0) return {};
  return leaf;
}

bool ask_for_amx() {
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  const Leaf7 leaf = leaf7();
  if ((leaf.d & kAmxBf16) == 0 || (leaf.d & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_amx() {
  static const bool has = ask_for_amx();
  return has;
}

bool has_vnni() {
  constexpr unsigned kVnni = 1U << 11;
  static const bool has = (leaf7().c & kVnni) != 0;
  return has;
}

bool has_bf16() {
  constexpr unsigned kBf16 = 1U << 5;
  static const bool has = [] {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return has_vnni() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBf16) != 0;
  }();
  return has;
}

}  // namespace mxflash::cpu
#else
namespace mxflash::cpu {
bool has_amx() { return false; }
bool has_vnni() { return false; }
bool has_bf16() { return false; }
}  // namespace mxflash::cpu
#endif

#include "cpu/amx.hpp"

#include "hwy/highway.h"
#include "hwy/targets.h"

#if HWY_ARCH_X86_64 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mxflash::cpu {
namespace {

bool ask() {
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if ((hwy::SupportedTargets() & HWY_AVX3) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_amx() {
  static const bool has = ask();
  return has;
}

}  // namespace mxflash::cpu
#else
namespace mxflash::cpu {
bool has_amx() { return false; }
}  // namespace mxflash::cpu
#endif

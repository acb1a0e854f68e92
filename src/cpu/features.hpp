// What Highway's own detection does not know.
#pragma once

namespace mxflash::cpu {

/// Whether the CPU has AMX-BF16 and AVX-512 and the system lets this process use the tiles; asks it the first time.
bool has_amx();
/// Whether the CPU has AVX-512 VNNI.
bool has_vnni();
/// Whether it has AVX-512 BF16 as well.
bool has_bf16();

}  // namespace mxflash::cpu

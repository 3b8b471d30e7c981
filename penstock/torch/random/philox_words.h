// Many Philox blocks at once, in the vectors of this processor. Internal to penstock/torch.
#pragma once

#include "penstock/base/philox.h"

namespace penstock::random {

// Instruction sets that the loops on the processor are compiled for. All give the same bits.
enum class CpuPath { Portable, Avx2, Avx512 };
bool supported(CpuPath path);
CpuPath best_cpu_path();

// Blocks are made in whole groups: room for this many words behind the last block asked for is written to.
inline constexpr long long kWordsSlack = 128;

// The words of `blocks` consecutive blocks of the stream.
void fill_words(CpuPath path, const philox::Stream& stream, philox::u64 first_block, long long blocks, philox::u32* words);

}  // namespace penstock::random

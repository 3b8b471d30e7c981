// Computes many Philox blocks at once with vector instructions. Internal to penstock/torch.
#pragma once

#include "penstock/base/philox.h"

namespace penstock::random {

// Instruction sets that the CPU loops are compiled for. All produce the same bits.
enum class CpuPath { Portable, Avx2, Avx512 };
bool supported(CpuPath path);
CpuPath best_cpu_path();

// Blocks are computed in whole groups: up to this many words after the last requested block are overwritten.
inline constexpr long long kWordsSlack = 128;

// Writes the words of `blocks` consecutive blocks of the stream.
void fill_words(CpuPath path, const philox::Stream& stream, philox::u64 first_block, long long blocks,
                philox::u32* words);

}  // namespace penstock::random

// The text of the headers that the CUDA kernels are compiled from, embedded when this library is built
// (random_text.cpp.in).
#pragma once

namespace penstock::random {

extern const char* const kPhiloxText;
extern const char* const kRandomMathText;
extern const char* const kRandomKernelText;

}  // namespace penstock::random

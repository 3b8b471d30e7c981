// The headers that are also source text of the CUDA kernels, as they were when this library was built (random_text.cpp.in).
#pragma once

namespace penstock::random {

extern const char* const kPhiloxText;
extern const char* const kRandomMathText;
extern const char* const kRandomKernelText;

}  // namespace penstock::random

// The end of a program that has loaded LibTorch.
#pragma once

namespace penstock {

// Flushes what C and C++ streams still hold and ends the process without running destructors of static
// objects. LibTorch's take its operators out of the dispatcher one by one, a tenth of a second of processor
// time that nobody waits for. To be called at the end of `main`, when the program's own objects are destroyed
// and its threads joined.
[[noreturn]] void leave_process(int exit_code);

}  // namespace penstock

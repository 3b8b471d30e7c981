// Runs a fuzz target without libFuzzer: first every file of the corpus, then seeded random mutations of them.
//
//   <target> [--mutations=N] [--seed=S] [--max-bytes=B] <corpus folder or file> ...
//
// The same seed produces the same inputs. If the target crashes, its input is written to <target>.failure,
// which can be passed as a corpus file.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

// Plain memory that the signal handler can read.
const std::uint8_t* current_data = nullptr;
std::size_t current_size = 0;
char failure_path[4096];

extern "C" void save_and_die(int signal_number) {
  const int file = ::open(failure_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const bool saved =
      file >= 0 && ::write(file, current_data, current_size) == static_cast<ssize_t>(current_size);
  const char* text =
      saved ? "fuzz: the target crashed; its input is in " : "fuzz: the target crashed; could not write ";
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0 ||
      ::write(STDERR_FILENO, failure_path, std::strlen(failure_path)) < 0 ||
      ::write(STDERR_FILENO, "\n", 1) < 0)
    std::_Exit(3);
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

void run(const Input& input) {
  // A copy of exactly this size, so that AddressSanitizer detects reads past the end.
  const auto bytes = std::make_unique<std::uint8_t[]>(input.size());
  std::copy(input.begin(), input.end(), bytes.get());
  current_data = bytes.get();
  current_size = input.size();
  LLVMFuzzerTestOneInput(bytes.get(), input.size());
}

std::size_t below(Random& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

void mutate_once(Input& input, const std::vector<Input>& corpus, Random& random) {
  static constexpr std::uint8_t kOddBytes[] = {0x00, 0x01, 0x7f, 0x80, 0xff, ' ', '"', '-', '0'};
  const std::size_t at = below(random, input.size());
  switch (below(random, 7)) {
    case 0:  // flip a bit
      if (!input.empty()) input[at] = static_cast<std::uint8_t>(input[at] ^ (1u << below(random, 8)));
      break;
    case 1:  // a random byte
      if (!input.empty()) input[at] = static_cast<std::uint8_t>(random());
      break;
    case 2:  // a run of an extreme byte, to hit counts and lengths
      for (std::size_t i = at, end = std::min(input.size(), at + 1 + below(random, 4)); i < end; ++i)
        input[i] = kOddBytes[below(random, std::size(kOddBytes))];
      break;
    case 3: {  // insert random bytes
      Input extra(1 + below(random, 8));
      std::generate(extra.begin(), extra.end(), [&] { return static_cast<std::uint8_t>(random()); });
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), extra.begin(), extra.end());
      break;
    }
    case 4: {  // erase
      const std::size_t count = std::min(input.size() - at, 1 + below(random, 8));
      input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                  input.begin() + static_cast<std::ptrdiff_t>(at + count));
      break;
    }
    case 5:  // cut
      input.resize(at);
      break;
    case 6: {  // the head of this input and the tail of another
      const Input& other = corpus[below(random, corpus.size())];
      const std::size_t from = below(random, other.size() + 1);
      input.resize(at);
      input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      break;
    }
  }
}

Input read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "fuzz: cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return Input(std::istreambuf_iterator<char>(file), {});
}

std::uint64_t number(const std::string& argument, std::size_t prefix) {
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(argument.c_str() + prefix, &end, 10);
  if (argument.size() == prefix || *end != '\0') {
    std::fprintf(stderr, "fuzz: %s: expected a whole number\n", argument.c_str());
    std::exit(2);
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t mutations = 0;
  std::uint64_t seed = 1;
  std::size_t max_bytes = 4096;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--mutations=")) {
      mutations = number(argument, 12);
    } else if (argument.starts_with("--seed=")) {
      seed = number(argument, 7);
    } else if (argument.starts_with("--max-bytes=")) {
      max_bytes = number(argument, 12);
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) files.push_back(entry.path());
    } else {
      files.emplace_back(argument);
    }
  }
  std::sort(files.begin(), files.end());  // directory order differs between machines
  if (files.empty()) {
    std::fprintf(stderr, "fuzz: no corpus; pass at least one file or a folder that contains one\n");
    return 2;
  }

  const std::string failure = std::filesystem::path(argv[0]).filename().string() + ".failure";
  std::snprintf(failure_path, sizeof failure_path, "%s", failure.c_str());
  for (const int signal_number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL})
    std::signal(signal_number, save_and_die);

  std::vector<Input> corpus;
  for (const auto& file : files) corpus.push_back(read_file(file));
  const auto begin = std::chrono::steady_clock::now();
  for (const Input& input : corpus) run(input);
  Random random(seed);
  for (std::uint64_t i = 0; i < mutations; ++i) {
    Input input = corpus[below(random, corpus.size())];
    for (std::size_t rounds = 1 + below(random, 4); rounds > 0; --rounds) mutate_once(input, corpus, random);
    if (input.size() > max_bytes) input.resize(max_bytes);
    run(input);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::uint64_t runs = corpus.size() + mutations;
  std::printf("fuzz: %llu corpus files, %llu mutations, seed %llu: %.0f runs/s\n",
              static_cast<unsigned long long>(corpus.size()), static_cast<unsigned long long>(mutations),
              static_cast<unsigned long long>(seed), static_cast<double>(runs) / std::max(seconds, 1e-9));
  return 0;
}

// Runs a fuzz target without a fuzzing engine: every file named on the command line, a built-in corpus, and random
// mutations of these. PENSTOCK_FUZZ_RUNS bounds the mutations; PENSTOCK_FUZZ_SEED repeats a run. A failing input is
// written to fuzz_failure.bin by the abort handler before the program ends.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

std::string current;  // the input under test, for the handler

void save_and_end(int signal) {
  std::FILE* file = std::fopen("fuzz_failure.bin", "wb");
  if (file != nullptr) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
  }
  std::fprintf(stderr, "input written to fuzz_failure.bin (%zu bytes)\n", current.size());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

std::vector<std::string> built_in_corpus() {
  return {
      "",
      "0F0,0B0\n1F0,1B0\n",
      "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
      "0F0,,0I0,0W0\n,1F0,1I0,1W0\n",
      "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",
      "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
      "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n",
      "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n",
      "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
      " 0F0 , ( 0F1 ; 0B0 )OVERLAP_F_B\r\n\n",
      "16777215F1073741823,2F0junk",
  };
}

std::string mutated(std::string input, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  static const std::vector<std::string> pieces = {",", "\n", "0", "1", "2", "9999999999", "F", "B", "I", "W", "SEND_F", "RECV_F",
                                                  "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "(", ")", ";",
                                                  "OVERLAP_F_B", " ", "0F0", "1B0", "\r", std::string(1, '\0')};
  const auto below = [&](std::size_t bound) { return bound == 0 ? 0 : static_cast<std::size_t>(random() % bound); };
  for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
    const std::size_t at = below(input.size() + 1);
    switch (below(5)) {
      case 0: input.insert(at, pieces[below(pieces.size())]); break;
      case 1: input.erase(at, 1 + below(6)); break;
      case 2:
        if (at < input.size()) input[at] = static_cast<char>(random());
        break;
      case 3: {
        const std::string& other = corpus[below(corpus.size())];
        const std::size_t from = below(other.size() + 1);
        input.insert(at, other.substr(from, below(24)));
        break;
      }
      default: {
        const std::string part = input.substr(at, below(12));
        input.insert(below(input.size() + 1), part);
        break;
      }
    }
  }
  if (input.size() > 4096) input.resize(4096);
  return input;
}

unsigned long long number_from(const char* variable, unsigned long long fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, save_and_end);
  std::signal(SIGSEGV, save_and_end);
  std::vector<std::string> corpus = built_in_corpus();
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 2;
    }
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (const std::string& input : corpus) run(input);
  std::mt19937_64 random(number_from("PENSTOCK_FUZZ_SEED", 1));
  const unsigned long long runs = number_from("PENSTOCK_FUZZ_RUNS", 20000);
  std::string input;
  for (unsigned long long i = 0; i < runs; ++i) {
    // Half of the mutations build on the last one, so that inputs drift away from the corpus.
    if (random() % 2 == 0) input = corpus[random() % corpus.size()];
    input = mutated(std::move(input), corpus, random);
    run(input);
  }
  std::printf("%zu inputs and %llu mutations\n", corpus.size(), runs);
  return 0;
}

// harness [cases [seed [check]]]: every check, or one of them, on so many random cases.
#include <string>

#include "harness.h"

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 300;
  harness::Random random(argc > 2 ? std::stoull(argv[2]) : 0);
  struct Check {
    const char* name;
    void (*run)(harness::Random&);
  };
  for (const Check& check : {Check{"linear", harness::check_linear}, Check{"integers", harness::check_integers},
                             Check{"rounded_weight", harness::check_rounded_weight}, Check{"attention", harness::check_attention}, Check{"division", harness::check_division},
                             Check{"elementwise", harness::check_elementwise}, Check{"layer", harness::check_layer}, Check{"sample", harness::check_sample},
                             Check{"rank", harness::check_rank}}) {
    if (argc > 3 && std::string(argv[3]) != check.name) continue;
    for (int64_t i = 0; i < cases; ++i) check.run(random);
    std::printf("%s: %lld cases agree with the reference\n", check.name, static_cast<long long>(cases));
  }
}

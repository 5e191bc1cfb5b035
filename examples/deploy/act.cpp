// Acts without Python, by a policy that `cebm export RUN --format aoti --out policy.pt2` wrote.
//
// Build with the headers and libraries that come with torch (TORCH is the folder of the Python package):
//   g++ -O1 -std=c++20 act.cpp -o act -I$TORCH/include -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10
// Run:  ./act policy.pt2 < observations.txt
// A line is one observation (with a history: oldest first), its action is printed. Random numbers are drawn here; a line
// may instead bring its own behind the observation: the columns of `normal`, then those of `uniform`.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <sstream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: " << argv[0] << " policy.pt2 < observations.txt\n";
    return 2;
  }
  c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader policy(argv[1]);
  auto metadata = policy.get_metadata();
  const int64_t obs = std::stol(metadata.at("obs")), normal = std::stol(metadata.at("normal")),
                uniform = std::stol(metadata.at("uniform"));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/0);

  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::vector<float> numbers{std::istream_iterator<float>(words), {}};
    const auto count = static_cast<int64_t>(numbers.size());
    if (count != obs && count != obs + normal + uniform) {
      std::cerr << "a line has " << obs << " numbers, or " << obs + normal + uniform << ", not " << count << "\n";
      return 1;
    }
    auto row = at::from_blob(numbers.data(), {1, count}, at::kFloat).clone();
    auto noise = count > obs ? row.narrow(1, obs, normal + uniform)
                             : at::cat({at::randn({1, normal}, generator, at::TensorOptions(at::kFloat)),
                                        at::rand({1, uniform}, generator, at::TensorOptions(at::kFloat))}, 1);
    std::vector<at::Tensor> inputs{row.narrow(1, 0, obs).contiguous()};
    if (normal > 0) inputs.push_back(noise.narrow(1, 0, normal).contiguous());
    if (uniform > 0) inputs.push_back(noise.narrow(1, normal, uniform).contiguous());
    auto action = policy.run(inputs)[0];
    if (!action.isfinite().all().item<bool>()) {
      std::cerr << "no candidate has a finite energy here\n";
      return 1;
    }
    for (int64_t i = 0; i < action.size(1); ++i) std::cout << (i ? " " : "") << action[0][i].item<float>();
    std::cout << std::endl;
  }
}

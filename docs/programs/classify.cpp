// Classifies pictures with libtorch, with model.pt that was exported with preprocess=true softmax=true.
// jq -r '.class_names[]' model.pt.json > names.txt
// convert cat.jpg -resize 224x224^ -gravity center -extent 224x224 cat.ppm
// ./classify model.pt names.txt cat.ppm

#include <torch/script.h>

#include <fstream>
#include <iostream>

torch::Tensor read_ppm(const std::string& path) {  // P6 with colours of 8 bits, or P5 with greys
  std::ifstream file(path, std::ios::binary);
  std::string format;
  int width, height, white;
  file >> format >> width >> height >> white;
  file.get();
  auto pixels = torch::empty({1, height, width, format == "P5" ? 1 : 3}, torch::kUInt8);
  file.read(reinterpret_cast<char*>(pixels.data_ptr<uint8_t>()), pixels.numel());
  return pixels.permute({0, 3, 1, 2}).contiguous();
}

int main(int count, char** arguments) {
  torch::InferenceMode guard;
  auto model = torch::jit::load(arguments[1]);
  std::vector<std::string> names;
  std::ifstream lines(arguments[2]);
  for (std::string name; std::getline(lines, name);) names.push_back(name);
  for (int i = 3; i < count; ++i) {
    auto probabilities = model.forward({read_ppm(arguments[i])}).toTensor();
    auto [best, number] = probabilities[0].max(0);
    std::cout << arguments[i] << " " << names[number.item<int64_t>()] << " " << best.item<float>() << "\n";
  }
}

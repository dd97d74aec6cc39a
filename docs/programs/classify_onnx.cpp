// Classifies pictures with onnxruntime, with model.onnx that was exported with preprocess=true softmax=true.
// jq -r '.class_names[]' model.onnx.json > names.txt
// convert cat.jpg -resize 224x224^ -gravity center -extent 224x224 cat.ppm
// ./classify_onnx model.onnx names.txt cat.ppm

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <fstream>
#include <iostream>

int main(int count, char** arguments) {
  Ort::Env environment;
  Ort::Session session(environment, arguments[1], Ort::SessionOptions());
  Ort::AllocatorWithDefaultOptions allocator;
  auto input = session.GetInputNameAllocated(0, allocator), output = session.GetOutputNameAllocated(0, allocator);
  const char *inputs[] = {input.get()}, *outputs[] = {output.get()};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<std::string> names;
  std::ifstream lines(arguments[2]);
  for (std::string name; std::getline(lines, name);) names.push_back(name);
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    std::string format;  // P6 with colours of 8 bits, or P5 with greys
    int64_t width, height, white;
    file >> format >> width >> height >> white;
    file.get();
    int64_t shape[] = {1, format == "P5" ? 1 : 3, height, width}, size = width * height;
    std::vector<uint8_t> pixels(shape[1] * size), planes(pixels.size());
    file.read(reinterpret_cast<char*>(pixels.data()), pixels.size());
    for (size_t k = 0; k < pixels.size(); ++k) planes[k % shape[1] * size + k / shape[1]] = pixels[k];
    auto tensor = Ort::Value::CreateTensor<uint8_t>(memory, planes.data(), planes.size(), shape, 4);
    auto results = session.Run(Ort::RunOptions(), inputs, &tensor, 1, outputs, 1);
    const float* probabilities = results[0].GetTensorData<float>();
    auto best = std::max_element(probabilities, probabilities + names.size());
    std::cout << arguments[i] << " " << names[best - probabilities] << " " << *best << "\n";
  }
}

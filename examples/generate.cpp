// Generate tokens from a qsample package with ONNX Runtime's C++ API: the sampler is in the graph.
//
//     g++ -std=c++17 -O2 -I ORT/include examples/generate.cpp -L ORT/lib -l onnxruntime -o generate
//     ./generate PACKAGE "5 12 8" --temperature 0.8 --seed 7      # ids of the prompt; prints the ids that follow it
//     ./generate PACKAGE "5 12 8" --grammar person.safetensors    # an answer that follows a file of `qsample grammar`
//
// ORT is a release of ONNX Runtime, 1.23 or newer. docs/contract.md defines the graph's inputs, outputs and states. The
// tokens are those of generate_onnxruntime.py.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <onnxruntime_cxx_api.h>

enum { RUNNING = 0, INVALID = 3 };  // values of the state `status`
enum { FIRST_STATE = 1 };           // of a grammar, in the state `grammar_state`
using Numbers = std::vector<double>;
constexpr auto FLOAT = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, INT32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr auto INT64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, BOOL = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

// A tensor that owns its memory; each element is the next of `values`, or the last one again.
Ort::Value tensor(ONNXTensorElementDataType type, const std::vector<int64_t>& shape, const Numbers& values) {
  static Ort::AllocatorWithDefaultOptions allocator;
  auto made = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type);
  const size_t count = made.GetTensorTypeAndShapeInfo().GetElementCount();
  for (size_t i = 0; i < count; ++i) {
    const double value = values[std::min(i, values.size() - 1)];
    if (type == FLOAT) made.GetTensorMutableData<float>()[i] = static_cast<float>(value);
    else if (type == INT32) made.GetTensorMutableData<int32_t>()[i] = static_cast<int32_t>(value);
    else if (type == INT64) made.GetTensorMutableData<int64_t>()[i] = static_cast<int64_t>(value);
    else if (type == BOOL) made.GetTensorMutableData<bool>()[i] = value != 0;
    else fail("the graph has an input of a type that this program does not know");
  }
  return made;
}

// The output that holds the next value of a state.
std::string retained(const std::string& state) {
  const std::string past = "past_key_values";
  return state.rfind(past, 0) == 0 ? "present" + state.substr(past.size()) : state + "_RetainedState";
}

Numbers numbers(std::string text) {
  std::replace(text.begin(), text.end(), ',', ' ');
  std::istringstream stream(text);
  return {std::istream_iterator<double>(stream), {}};
}

const std::string LIST = "\\[([^\\]]*)\\]", OBJECT = "\\{([^}]*)\\}";

// The value of a key in the manifest, or in the header of a grammar; "" if there is none. Enough for the keys that are
// read here, whose names are unique; a program that has a JSON library takes that.
std::string entry(const std::string& manifest, const std::string& key, const std::string& value = "\"?([^\",}]*)") {
  std::smatch found;
  return std::regex_search(manifest, found, std::regex("\"" + key + "\"\\s*:\\s*" + value)) ? found[1].str() : "";
}

std::string read(const std::string& path, const std::string& message) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(message);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A tensor of int32 in a file that `qsample grammar` wrote. The file has the format safetensors: the length of a header
// of JSON, the header, and the numbers. The length and the numbers are little-endian, as this program's processor.
Ort::Value table(const std::string& file, const std::string& name) {
  uint64_t header_size = 0;
  const size_t size_bytes = std::min(file.size(), sizeof header_size);
  std::memcpy(&header_size, file.data(), size_bytes);
  const std::string about = entry(file.substr(size_bytes, header_size), name, OBJECT);
  const Numbers shape = numbers(entry(about, "shape", LIST));
  const Numbers range = numbers(entry(about, "data_offsets", LIST));
  if (entry(about, "dtype") != "I32" || range.size() != 2) fail("the grammar's file has no " + name + " of int32");
  const auto begin = size_bytes + header_size + static_cast<size_t>(range[0]);
  const auto bytes = static_cast<size_t>(range[1] - range[0]);
  if (begin > file.size() || bytes > file.size() - begin) fail("the grammar's file is cut off");
  std::vector<int32_t> values(bytes / sizeof(int32_t));
  std::memcpy(values.data(), file.data() + begin, bytes);
  return tensor(INT32, {shape.begin(), shape.end()}, {values.begin(), values.end()});
}

void generate(const std::string& folder, const Numbers& prompt, std::map<std::string, std::string> given) {
  const std::string missing = folder + " has no qsample.json; give a folder that qsample wrote";
  const std::string manifest = read(folder + "/qsample.json", missing);
  const auto version = entry(manifest, "contract_version");
  if (version != "2.0" && version != "2.4")
    fail("the package follows contract " + version + ", this program 2.0 and 2.4");
  // A package of 2.4 may have features of the versions between.
  for (const auto* feature : {"num_speculative_tokens", "max_loras", "image"})
    if (!entry(manifest, feature).empty())
      fail("the package has " + std::string(feature) + ", which this program does not know");
  if (entry(manifest, "sampler") != "true") fail("the package was exported without its sampler; this program needs it");
  Numbers stops = numbers(entry(manifest, "eos", "\\[([^\\]]*)\\]"));
  if (stops.empty()) stops = {-1};

  // T, the tokens that the states hold: fixed in a compiled package, otherwise no more than needed.
  const auto fixed = numbers(entry(manifest, "ctx_len")), limit = numbers(entry(manifest, "max_position_embeddings"));
  const double longest = static_cast<double>(prompt.size()) + std::stod(given["--max-new-tokens"]);
  const double capacity = !fixed.empty() ? fixed[0] : limit.empty() ? longest : std::min(longest, limit[0]);
  if (prompt.empty() || static_cast<double>(prompt.size()) >= capacity)
    fail("the prompt has " + std::to_string(prompt.size()) + " tokens; give at least 1, and fewer than " +
         std::to_string(static_cast<int64_t>(capacity)));

  // The tables of a grammar; without one, those with which every token is allowed.
  std::map<std::string, Ort::Value> tables;
  if (const std::string path = given["--grammar"]; !path.empty()) {
    if (entry(manifest, "grammars") != "true") fail("the package takes no grammars; export the model with --grammars");
    const std::string file = read(path, path + " cannot be read; give a file that qsample grammar wrote");
    for (const std::string name : {"classes", "transitions", "distances", "maps", "late"})
      tables.emplace("grammar_" + name, table(file, "grammar_" + name));
    const auto vocab_size = tables.at("grammar_classes").GetTensorTypeAndShapeInfo().GetShape().back();
    if (numbers(entry(manifest, "vocab_size")) != Numbers{static_cast<double>(vocab_size)})
      fail("the grammar is for " + std::to_string(vocab_size) +
           " tokens, which is not the package's number; write it with qsample grammar for this package");
    const int shortest = tables.at("grammar_distances").GetTensorData<int32_t>()[FIRST_STATE];
    const double room = std::min(capacity, longest) - static_cast<double>(prompt.size());
    if (room < shortest)
      fail("the shortest answer of the grammar has " + std::to_string(shortest) + " tokens, and " +
           std::to_string(static_cast<int>(room)) + " are left; give --max-new-tokens " + std::to_string(shortest) +
           " or more, and a shorter prompt if the context is full");
  }

  // ONNX Runtime warns of inputs that have a default, such as those for scores of prompts.
  Ort::Env environment(ORT_LOGGING_LEVEL_ERROR);
  const auto open = [&](const std::string& name) {
    const std::string path = folder + "/" + name;
    return Ort::Session(environment, std::basic_string<ORTCHAR_T>(path.begin(), path.end()).c_str(), {});
  };
  Ort::Session decoder = open("decoder.onnx"), initial_state = open("initial_state.onnx");
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);

  // 1. The starting state. Its outputs have the names of the decoder's inputs.
  const auto state_names = initial_state.GetOutputNames();
  Ort::IoBinding start(initial_state);
  Ort::Value seed = tensor(INT64, {1}, {0});
  *seed.GetTensorMutableData<int64_t>() = std::stoll(given["--seed"]);  // a double has 53 bits, a seed 63
  start.BindInput("seed", seed);
  start.BindInput("capacity", tensor(INT64, {}, {capacity}));
  for (const auto& name : state_names) start.BindOutput(name.c_str(), memory);
  initial_state.Run({}, start);
  std::vector<Ort::Value> states = start.GetOutputValues();
  for (size_t i = 0; i < states.size(); ++i)
    if (state_names[i] == "grammar_state" && !tables.empty()) *states[i].GetTensorMutableData<int32_t>() = FIRST_STATE;

  // 2. The sampling parameters, a value per row. What is not named here is off: with 0, or with -1 in place of tokens.
  const std::map<std::string, Numbers> parameters = {
      {"temperature", numbers(given["--temperature"])}, {"top_k", numbers(given["--top-k"])},
      {"top_p", numbers(given["--top-p"])}, {"typical_p", {1}}, {"adaptive_target", {-1}}, {"repetition_penalty", {1}}, {"logit_bias", {0}},
      {"stop_ids", stops}, {"max_length", {std::min(capacity, longest)}}, {"emit", {1}},
      {"grammar_deadline", {2147483647}}, {"grammar_classes", {0}}, {"grammar_transitions", {0}}};
  Ort::IoBinding binding(decoder);
  const auto inputs = decoder.GetInputNames();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto type = decoder.GetInputTypeInfo(i);  // owns `about`
    const auto about = type.GetTensorTypeAndShapeInfo();
    auto shape = about.GetShape();
    for (auto& size : shape) size = std::max<int64_t>(size, 1);  // -1 is an axis of any size
    if (inputs[i] == "stop_ids") shape = {1, static_cast<int64_t>(stops.size())};
    const auto known = parameters.find(inputs[i]);
    const Numbers values = known != parameters.end() ? known->second : Numbers{shape.size() > 1 ? -1.0 : 0.0};
    const auto state = std::find(state_names.begin(), state_names.end(), inputs[i]) - state_names.begin();
    if (tables.count(inputs[i])) binding.BindInput(inputs[i].c_str(), tables.at(inputs[i]));
    else if (state < static_cast<long>(states.size())) binding.BindInput(inputs[i].c_str(), states[state]);
    else if (inputs[i] != "input_ids" && inputs[i] != "input_lengths")
      binding.BindInput(inputs[i].c_str(), tensor(about.GetElementType(), shape, values));
  }

  // 3. Each new state goes to the memory of the old one, so that no step copies it.
  std::map<std::string, const Ort::Value*> written;
  for (size_t i = 0; i < states.size(); ++i) written[retained(state_names[i])] = &states[i];
  for (const auto& output : decoder.GetOutputNames())
    if (written.count(output)) binding.BindOutput(output.c_str(), *written[output]);
    else binding.BindOutput(output.c_str(), memory);  // next_ids, and optional outputs
  const int32_t* status = written.at("status_RetainedState")->GetTensorData<int32_t>();

  // 4. Run until the row's status is no longer RUNNING. next_ids is the first output.
  for (Numbers fed = prompt; *status == RUNNING;) {
    binding.BindInput("input_ids", tensor(INT64, {1, static_cast<int64_t>(fed.size())}, fed));
    binding.BindInput("input_lengths", tensor(INT32, {1}, {static_cast<double>(fed.size())}));
    decoder.Run({}, binding);
    if (*status == INVALID) fail("the model returned NaN or infinite logits");
    fed = {static_cast<double>(*binding.GetOutputValues()[0].GetTensorData<int64_t>())};
    std::printf("%.0f%c", fed[0], *status == RUNNING ? ' ' : '\n');
    std::fflush(stdout);
  }
}

int main(int count, char** words) try {
  if (count < 3 || count % 2 == 0) fail("usage: generate PACKAGE \"ID ID ...\" [--seed N] [--temperature X] ...");
  std::map<std::string, std::string> given = {
      {"--max-new-tokens", "64"}, {"--temperature", "0.8"}, {"--top-k", "0"}, {"--top-p", "0.95"}, {"--seed", "0"},
      {"--grammar", ""}};
  for (int i = 3; i < count; i += 2) {
    if (!given.count(words[i])) fail("unknown option " + std::string(words[i]));
    given[words[i]] = words[i + 1];
  }
  generate(words[1], numbers(words[2]), given);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

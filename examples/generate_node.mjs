// Generate text from a qsample package with Node: onnxruntime-node and a tokenizer; the sampler is in the graph.
//
//     npm install onnxruntime-node @huggingface/tokenizers        # in this folder, or one above it
//     node examples/generate_node.mjs PACKAGE --prompt "In the beginning" --temperature 0.8
//
// docs/contract.md defines the graph's inputs, outputs and states. The tokens are those of generate_onnxruntime.py.
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { Tokenizer } from "@huggingface/tokenizers";
import ort from "onnxruntime-node";

const RUNNING = 0, INVALID = 3; // values of the state `status`
const ARRAYS = { float32: Float32Array, int32: Int32Array, int64: BigInt64Array, bool: Uint8Array };

const option = value => ({ type: "string", default: value });
const { values: given, positionals: [folder] } = parseArgs({
  allowPositionals: true,
  options: {
    prompt: option("In the beginning"), "max-new-tokens": option("64"), seed: option("0"),
    temperature: option("0.8"), // 0 is greedy
    "top-k": option("0"), // 0 is off
    "top-p": option("0.95"), // 1 is off
    grammar: { type: "string" }, // a file of `qsample grammar` for this package: the answer follows it
  },
});
const fail = message => { console.error(message); process.exit(1); };
if (!folder) fail("give a folder that `qsample export`, `bake` or `compile` wrote");
const read = async name => JSON.parse(await readFile(join(folder, name), "utf8"));
const manifest = await read("qsample.json");
const { interface: graph, token_ids, compilation, max_position_embeddings: limit } = manifest;
const version = manifest.contract_version;
const versions = { "2.0": "", "2.4": "for grammars", "2.5": "for captured graphs" };
if (!(version in versions)) fail(`the package follows contract ${version}, this program ${Object.entries(versions).map(one => one.join(" ")).join(", ")}`);
// What else packages of 2.4 and 2.5 may have.
if (graph.image || graph.features.max_loras || graph.features.num_speculative_tokens) {
  fail("the package reads images, takes adapters or draws several tokens a step, which this program does not");
}
if (!graph.features.sampler) fail("the package was exported without its sampler; this program needs it");
const tokenizer = new Tokenizer(await read("tokenizer.json"), await read("tokenizer_config.json").catch(() => ({})));
const { ids } = tokenizer.encode(given.prompt);
if (!ids.length) ids.push(token_ids.bos);

// T, the tokens that the states hold: fixed in a compiled package, otherwise no larger than needed, as all of it is
// allocated.
const longest = ids.length + Number(given["max-new-tokens"]);
const capacity = compilation?.ctx_len ?? Math.min(limit ?? longest, longest);
if (ids.length >= capacity) fail(`the prompt has ${ids.length} tokens and the context holds ${capacity}`);

const tensor = (type, numbers, shape = [numbers.length]) =>
  new ort.Tensor(type, ARRAYS[type].from(numbers, type === "int64" ? BigInt : Number), shape);
// Only errors: ONNX Runtime warns of inputs that have a default, such as those for scores of prompts.
const open = name => ort.InferenceSession.create(join(folder, name), { executionProviders: ["cpu"], logSeverityLevel: 3 });
const decoder = await open("decoder.onnx"), initialState = await open("initial_state.onnx");
const seed = new ort.Tensor("int64", [BigInt(given.seed)], [1]); // as BigInt: a seed has 63 bits

// The tables of a grammar: a header's length in 8 bytes, the header in JSON, and the numbers.
async function readGrammar(file) {
  const content = new Uint8Array(await readFile(file)); // a copy of its own, so that its buffer holds nothing else
  const start = 8 + Number(new DataView(content.buffer).getBigUint64(0, true));
  const { __metadata__, ...tables } = JSON.parse(new TextDecoder().decode(content.subarray(8, start)));
  return Object.fromEntries(Object.entries(tables).map(([name, { shape, data_offsets: [begin, end] }]) =>
    [name, new ort.Tensor("int32", new Int32Array(content.slice(start + begin, start + end).buffer), shape)]));
}
// Without a grammar, a single state, which allows every token and stays.
let grammar = { grammar_classes: tensor("int32", new Array(graph.vocab_size).fill(0), [1, graph.vocab_size]),
  grammar_transitions: tensor("int32", [0], [1, 1]) };
if (given.grammar) {
  if (!graph.features.grammars) fail("the package was exported without grammars; export the model again with --grammars");
  grammar = await readGrammar(given.grammar);
  const grammarTokens = grammar.grammar_classes.dims[1], shortest = grammar.grammar_distances.data[1];
  if (grammarTokens !== graph.vocab_size) fail(`the grammar is for ${grammarTokens} tokens, and the model has ${graph.vocab_size}`);
  const room = Math.min(capacity, longest) - ids.length;
  if (room < shortest) fail(`an answer may have ${room} tokens, and the shortest of the grammar has ${shortest}; raise --max-new-tokens`);
}

// 1. The starting state. Its outputs have the names of the decoder's inputs. An answer of a grammar begins in state 1.
const states = await initialState.run({ seed, capacity: tensor("int64", [capacity], []) });
if (given.grammar) states.grammar_state = tensor("int32", [1]);
// A captured graph records sampled tokens alone. The unused tail has any token of the row.
if (graph.captured) states.tokens = tensor("int32", [...ids, ...new Array(capacity - ids.length).fill(ids[0])], [1, capacity]);

// 2. The sampling parameters, a value per row. What is not named here is off: with 0, or with -1 in place of tokens.
const words = Math.ceil(graph.vocab_size / 32), stops = token_ids.eos.length ? token_ids.eos : [-1];
const parameters = {
  temperature: tensor("float32", [given.temperature]), top_k: tensor("int32", [given["top-k"]]),
  top_p: tensor("float32", [given["top-p"]]), typical_p: tensor("float32", [1]),
  adaptive_target: tensor("float32", [-1]),
  repetition_penalty: tensor("float32", [1]), max_length: tensor("int32", [Math.min(capacity, longest)]),
  stop_ids: tensor("int32", stops, [1, stops.length]),
  logit_bias: tensor("float32", [0], [1, 1]), emit: tensor("bool", [1]),
  // A captured graph leaves nothing out for the row.
  processed_rows: tensor("int64", [0]), vocabulary_rows: tensor("int64", [0]), searched_rows: tensor("int64", [0]),
  allowed_tokens: tensor("int32", new Array(words).fill(-1), [1, words]),
  grammar_deadline: tensor("int32", [2 ** 31 - 1]), ...grammar, // and no limit to thoughts
};
const off = ({ type, shape }) => tensor(type, [shape.length > 1 ? -1 : 0], shape.map(() => 1));
const known = { ...parameters, ...states };
const inputs = Object.fromEntries(decoder.inputMetadata.map(one => [one.name, known[one.name] ?? off(one)]));

// 3. Run until the row's status is no longer RUNNING. A new state is written to the memory of the old one: otherwise each
// step would copy the cache twice. Once is onnxruntime-node's own way: it copies what it returns.
const retained = name => name.startsWith("past_") ? name.replace("past_key_values", "present") : `${name}_RetainedState`;
const written = Object.keys(states).filter(name => decoder.outputNames.includes(retained(name))); // not `noise`
const tokens = [...ids];
for (let fed = ids; inputs.status.data[0] === RUNNING; fed = tokens.slice(-1)) {
  inputs.input_ids = tensor("int64", fed, [1, fed.length]);
  inputs.input_lengths = tensor("int32", [fed.length]);
  const outputs = Object.fromEntries(decoder.outputNames.map(name => [name, null])); // null: ONNX Runtime allocates it
  for (const name of written) outputs[retained(name)] = inputs[name];
  const results = await decoder.run(inputs, outputs);
  for (const name of written) inputs[name] = results[retained(name)];
  if (inputs.status.data[0] === INVALID) fail("the model returned NaN or infinite logits");
  tokens.push(Number(results.next_ids.data[0]));
}
console.log(tokenizer.decode(tokens, { skip_special_tokens: true }));

// The parameters of rows → the tensors that the graph reads, padded as the contract says.
import type { Tensor } from "onnxruntime-web";
import { ALLOWED_TOKENS, CANDIDATES, EXTRA_PARAMETERS, GRAMMAR_INPUTS, LOGIT_BIAS_INPUTS, PARAMETERS, type TensorSpec } from "./contract.js";
import { ArgumentError, shown } from "./errors.js";
import { checkGrammar, checkRoom, type Grammar } from "./grammars.js";
import type { Manifest } from "./manifest.js";
import { checkFilters, INT32_MAX, lengthsOf, type Params } from "./options.js";
import type { Ort, Tensors } from "./runtime.js";
import type { Tokenizer } from "./text.js";

/** A prompt and how to continue it. `values`: a number, [n] or [q, l] for each parameter of the graph. */
export interface Row {
  index: number;
  prompt: number[];
  seed: bigint;
  stop: string[];
  stopIds: readonly number[];
  maxLength: number;
  grammar: Grammar | null;
  values: Record<string, number | readonly number[] | readonly (readonly number[])[] | Int32Array>;
}

/** The tokens that may come: a bitmask of 32-bit words, their ids, or null for all. */
export type AllowedTokens = Int32Array | readonly number[] | null;

/** The parameters of a package's graph, but for the seed. */
export function parameterSpecs(manifest: Manifest): TensorSpec[] {
  const { features } = manifest.interface;
  return [
    ...PARAMETERS,
    ...(features.logit_bias ? LOGIT_BIAS_INPUTS : []),
    ...(features.allowed_tokens ? ALLOWED_TOKENS : []),
    ...(features.grammars ? GRAMMAR_INPUTS : []),
    ...features.filters.flatMap((name) => EXTRA_PARAMETERS[name] ?? []),
  ];
}

/** A row's values of every parameter. `capacity`: the most tokens that its buffers may have in the end. */
export function makeRow(
  manifest: Manifest, tokenizer: Tokenizer | null, params: Params, index: number, prompt: number[], seed: bigint, capacity: number,
): Row {
  const { features, vocab_size: vocabulary } = manifest.interface;
  const { grammar, thinkingTokenBudget } = params;
  checkFilters(params, features.filters);
  checkGrammar(manifest, grammar, thinkingTokenBudget);
  const [least, most] = lengthsOf(params, prompt.length, capacity);
  const check = (ids: readonly number[], option: string): readonly number[] => {
    const wrong = ids.find((id) => id >= vocabulary);
    if (wrong !== undefined) throw new ArgumentError(`${option} has the token id ${wrong}; the model's ids are 0 to ${vocabulary - 1}`, option);
    return ids;
  };
  if (params.bias.length && !features.logit_bias) {
    throw new ArgumentError("logitBias needs a package that was exported with logit_bias (--logit-bias)", "logitBias");
  }
  const encode = (text: string, option: string): number[] => {
    if (!tokenizer) throw new ArgumentError(`${option} has texts, and the package has no tokenizer; give token ids`, option);
    return tokenizer.encode(text, { addSpecialTokens: false });
  };
  const breakers = params.breakers.map((item) => {
    if (typeof item === "number") return item;
    const ids = encode(item, "drySequenceBreakers");
    if (ids.length === 1) return ids[0];
    throw new ArgumentError(
      `drySequenceBreakers has ${shown(item)}, which is ${ids.length} tokens; give texts of a single token each, or token ids`, "drySequenceBreakers");
  });
  const forbidden: (readonly number[])[] = [...params.badWordsIds];
  for (const word of params.badWords) {
    const alone = encode(word.trimStart(), "badWords");
    const spaced = encode(` ${word.trimStart()}`, "badWords");
    if (!alone.length) throw new ArgumentError(`badWords has ${shown(word)}, which has no tokens; leave it out`, "badWords");
    forbidden.push(alone);
    if (spaced.slice(-alone.length).join() !== alone.join()) forbidden.push(spaced);
  }
  const stops = check(params.eos ?? manifest.token_ids.eos, "eosTokenId");
  if (grammar) checkRoom(grammar, prompt.length, least, most, stops.length);
  const apart: Row["values"] = {
    min_length: least,
    max_length: most,
    stop_ids: stops,
    logit_bias_ids: check(params.bias.map(([token]) => token), "logitBias"),
    logit_bias: params.bias.map(([, amount]) => amount),
    dry_sequence_breakers: check(breakers, "drySequenceBreakers"),
    bad_words_ids: forbidden.map((ids) => check(ids, "badWordsIds")),
    allowed_tokens: everyToken(manifest),
    grammar_deadline: thinkingTokenBudget === null ? INT32_MAX : Math.min(prompt.length + thinkingTokenBudget, INT32_MAX),
  };
  const values: Row["values"] = {};
  for (const spec of parameterSpecs(manifest)) values[spec.name] = apart[spec.name] ?? params.values[spec.name] ?? spec.off!;
  return { index, prompt, seed, stop: params.stop, stopIds: stops, maxLength: most, grammar, values };
}

const everyToken = (manifest: Manifest): Int32Array => new Int32Array(Math.ceil(manifest.interface.vocab_size / 32)).fill(-1);

/** Allowed tokens as the bitmask that the graph reads. */
export function maskOf(manifest: Manifest, allowed: AllowedTokens): Int32Array {
  const mask = everyToken(manifest);
  if (allowed === null) return mask;
  if (allowed instanceof Int32Array) {
    if (allowed.length === mask.length) return allowed;
    throw new ArgumentError(`allowedTokens is a mask of ${allowed.length} words; give ${mask.length}, bit i of word w for token 32 w + i`, "allowedTokens");
  }
  if (!Array.isArray(allowed)) {
    throw new ArgumentError(`allowedTokens is ${shown(allowed)}; give token ids, an Int32Array of ${mask.length} words, null for all, or a function that returns one of these`, "allowedTokens");
  }
  mask.fill(0);
  for (const id of allowed) {
    if (!Number.isInteger(id) || id < 0 || id >= manifest.interface.vocab_size) {
      throw new ArgumentError(`allowedTokens has ${shown(id)}; the model's ids are 0 to ${manifest.interface.vocab_size - 1}`, "allowedTokens");
    }
    mask[id >> 5] |= 1 << (id & 31);
  }
  return mask;
}

const ARRAYS = { float32: Float32Array, int32: Int32Array } as const;

/** The parameter `spec` of some rows: [B], or [B, n] and [B, q, l] as wide as the widest row needs. */
export function parameterTensor(ort: Ort, spec: TensorSpec, rows: readonly Row[]): Tensor {
  const type = spec.dtype as keyof typeof ARRAYS;
  const inner = spec.axes.length - 1;
  const values = rows.map(({ values }) => values[spec.name]) as any[];
  const widths: number[] = [];
  if (inner >= 1) widths.push(Math.max(1, ...values.map((value) => value.length)));
  if (inner === 2) widths.push(Math.max(1, ...values.flatMap((value: number[][]) => value.map((ids) => ids.length))));
  const size = widths.reduce((product, width) => product * width, 1);
  const data = new ARRAYS[type](rows.length * size).fill(spec.off ?? 0);
  values.forEach((value, row) => {
    if (inner === 0) data[row] = value;
    else if (inner === 1) data.set(value, row * size);
    else value.forEach((ids: number[], place: number) => data.set(ids, row * size + (place + 1) * widths[1] - ids.length)); // padded in front
  });
  return new ort.Tensor(type, data as Float32Array, [rows.length, ...widths]);
}

/** The tensors of every parameter, and what else a call needs to know about its rows. */
export function parameterTensors(ort: Ort, manifest: Manifest, rows: readonly Row[]): Tensors {
  const tensors: Tensors = {};
  for (const spec of parameterSpecs(manifest)) tensors[spec.name] = parameterTensor(ort, spec, rows);
  return manifest.interface.captured ? { ...tensors, ...replayLists(ort, manifest, rows) } : tensors;
}

export function seedTensor(ort: Ort, rows: readonly { seed: bigint }[]): Tensor {
  return new ort.Tensor("int64", BigInt64Array.from(rows, ({ seed }) => seed), [rows.length]);
}

/** The rows that a graph for replay does more for: an empty list leaves a part of it out. */
function replayLists(ort: Ort, manifest: Manifest, rows: readonly Row[]): Tensors {
  const parts = rows.map((row) => neededPart(manifest, row));
  const listed = (chosen: readonly number[]): Tensor =>
    new ort.Tensor("int64", BigInt64Array.from(chosen, BigInt), [chosen.length]);
  const everyRow = rows.map((_, place) => place);
  // The first two lists have all rows or none.
  const allIf = (part: number): Tensor => listed(parts.some((needed) => needed >= part) ? everyRow : []);
  return {
    processed_rows: allIf(PROCESSED),
    vocabulary_rows: allIf(VOCABULARY),
    searched_rows: listed(everyRow.filter((place) => parts[place] >= SEARCHED)),
  };
}

// The parts of a graph for replay; each needs those before it.
const PLAIN = 0;
const PROCESSED = 1;
const VOCABULARY = 2;
const SEARCHED = 3;

// A row with any of these does not take the largest of the model's logits.
const CHANGE_LOGITS = [
  "repetition_penalty", "presence_penalty", "frequency_penalty", "min_length", "logit_bias_ids", "allowed_tokens",
  "bad_words_ids", "no_repeat_ngram_size", "dry_multiplier",
];

/** The last part that a row needs. */
function neededPart(manifest: Manifest, { values, grammar }: Row): number {
  const number = (name: string): number => (values[name] ?? 1) as number;
  if (number("temperature") === 0) {
    const specs = parameterSpecs(manifest).filter(({ name }) => CHANGE_LOGITS.includes(name));
    const isChanged = specs.some(({ name, off }) => numbersOf(values[name]).some((value) => value !== off));
    return grammar !== null || isChanged ? PROCESSED : PLAIN;
  }
  const topK = number("top_k");
  // The tokens that a small top-k keeps are among the candidates.
  if (topK > 0 && topK <= CANDIDATES) return PROCESSED;
  const hasNucleus = number("top_p") < 1 || number("typical_p") < 1;
  return topK > 0 || hasNucleus ? SEARCHED : VOCABULARY;
}

const numbersOf = (value: Row["values"][string]): number[] => (typeof value === "number" ? [value] : Array.from(value as number[]).flat());


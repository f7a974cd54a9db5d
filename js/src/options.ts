// The options of a call → the checked parameters of a row, with the model's generation_config.json below them.
import {
  DEFAULT_NEW_TOKENS, EXTRA_PARAMETERS, HF_DEFAULT_TOP_K, LONGEST_MATCH, NUMBERS, SAMPLING_FIELDS,
} from "./contract.js";
import { ArgumentError, checkObject, shown } from "./errors.js";
import { type Grammar, isGrammar } from "./grammars.js";

/** A seed: an integer from 0 to 2^63 - 1. Numbers are exact up to 2^53; beyond, give a bigint or its digits. */
export type Seed = number | bigint | string;

type Numbers = { [name in keyof typeof NUMBERS]?: number | null };

/** How to choose tokens. Names are Hugging Face's, in camelCase; null switches an option off. */
export interface SamplingOptions extends Numbers {
  /** false: the likeliest token each time. Implied by the options below it. */
  doSample?: boolean | null;
  /** Tokens that end a row, in place of the model's own; null or []: none. */
  eosTokenId?: number | readonly number[] | null;
  /** The same seed gives the same tokens. Several prompts take the numbers after it, or one each of a list. */
  seed?: Seed | readonly Seed[] | null;
  /** Token id → a number added to its logit; -Infinity forbids the token. */
  logitBias?: Readonly<Record<number, number>> | ReadonlyMap<number, number> | null;
  /** transformers' logitBias, for single tokens: a list of [[token id], number]. The biases of a token add up. */
  sequenceBias?: readonly (readonly [readonly [number], number])[] | null;
  /** Token ids that are never sampled. */
  suppressTokens?: readonly number[] | null;
  /** 2: Mirostat 2.0, after the other filters; 0: off. */
  mirostat?: number | null;
  /** Token ids, or texts of a single token each, that end a repetition of DRY. */
  drySequenceBreakers?: readonly (number | string)[] | null;
  /** Sequences of token ids that may not come. */
  badWordsIds?: readonly (readonly number[])[] | null;
  /** The same as texts: forbidden at the beginning of a text and after a space. */
  badWords?: readonly string[] | null;
  /** Texts that end a row; the text is cut off before them. */
  stop?: string | readonly string[] | null;
  /** The form that the answer follows, from loadGrammar; null: any text. Needs the feature. The answer is complete within its
   * limit, whatever is drawn. */
  grammar?: Grammar | null;
  /** The most tokens of the model's thoughts; null: no limit. Needs a grammar that was made with --thoughts. */
  thinkingTokenBudget?: number | null;
}

/** The checked options of a row, by Hugging Face's names. */
export interface Params {
  values: Record<string, number | null>;
  eos: number[] | null;
  bias: [number, number][];
  breakers: (number | string)[];
  badWordsIds: number[][];
  badWords: string[];
  stop: string[];
  grammar: Grammar | null;
  thinkingTokenBudget: number | null;
}

export const INT32_MAX = 2 ** 31 - 1;
const SEEDS = 2n ** 63n;
const OWN: Record<string, string> = {
  do_sample: "doSample", eos_token_id: "eosTokenId", seed: "seed", logit_bias: "logitBias", sequence_bias: "sequenceBias",
  suppress_tokens: "suppressTokens", mirostat: "mirostat",
  dry_sequence_breakers: "drySequenceBreakers", bad_words_ids: "badWordsIds", bad_words: "badWords", stop_strings: "stop",
  grammar: "grammar", thinking_token_budget: "thinkingTokenBudget",
};
const SPECS = Object.entries(NUMBERS).map(([option, spec]) => ({ option, ...spec }));
/** Hugging Face's name → the option's. */
const OPTIONS: Record<string, string> = { ...OWN, ...Object.fromEntries(SPECS.map((spec) => [spec.name, spec.option])) };
const NAMES = Object.fromEntries(Object.entries(OPTIONS).map(([name, option]) => [option, name]));
export const isSamplingOption = (option: string): boolean => Object.hasOwn(NAMES, option);

export const isInteger = (value: unknown, least = 0, most = INT32_MAX): value is number =>
  Number.isInteger(value) && (value as number) >= least && (value as number) <= most;

/** Raise an error for what is no object of options, and for an option that does not exist. */
export function checkNames(given: object, others: readonly string[], param = "options"): void {
  checkObject(given, param);
  for (const option of Object.keys(given)) {
    if (isSamplingOption(option) || others.includes(option)) continue;
    const close = [...Object.keys(NAMES), ...others].find((name) => name.toLowerCase() === option.replaceAll("_", "").toLowerCase());
    const hint = close ? `did you mean ${close}?` : `the options are ${[...Object.keys(NAMES), ...others].join(", ")}`;
    throw new ArgumentError(`there is no option ${option}; ${hint}`, option);
  }
}

/** The parameters of a call, with a model's own settings below them, field by field as in transformers. */
export function resolve(config: Readonly<Record<string, unknown>>, options: SamplingOptions): Params {
  const given: Record<string, unknown> = {};
  for (const [option, value] of Object.entries(options)) {
    if (value !== undefined && isSamplingOption(option)) given[NAMES[option]] = value;
  }
  const settings: Record<string, any> = layered(config, given);
  const sample = doSample(config, given);
  if (!sample) {
    for (const name of Object.keys(SAMPLING_FIELDS)) settings[name] = null;
    settings.temperature = 0;
  } else if (settings.top_k == null && !("top_k" in given)) {
    settings.top_k = HF_DEFAULT_TOP_K;
  }
  const read = <T>(name: string, check: (value: unknown, what: string) => T, off: T): T => {
    const value = settings[name];
    if (value == null) return off;
    return check(value, OPTIONS[name]);
  };
  const values: Record<string, number | null> = {};
  for (const spec of SPECS) {
    values[spec.name] = read<number | null>(spec.name, (value, what) => {
      if (spec.integer ? isInteger(value, spec.least, spec.most) : isWithin(value, spec.least, spec.most)) return value as number;
      throw new ArgumentError(`${what} is ${shown(value)}; give ${spec.accepted}`, spec.option);
    }, spec.off);
  }
  const { min_new_tokens: least, max_new_tokens: most, temperature } = values;
  if (least !== null && most !== null && least > most) {
    throw new ArgumentError(`minNewTokens is ${least}, more than maxNewTokens (${most})`, "minNewTokens");
  }
  if (sample && temperature === 0) {
    throw new ArgumentError("doSample is true and temperature is 0; give a temperature > 0, or doSample: false", "temperature");
  }
  const mirostat = read("mirostat", (value, what) => {
    if (value === 0 || value === 2) return value;
    throw new ArgumentError(`${what} is ${shown(value)}; give 0 (off) or 2 (Mirostat 2.0)`, "mirostat");
  }, 0);
  if (!mirostat) values.mirostat_tau = 0; // which is how the graph has it off
  if (values.adaptive_target! < 0) values.adaptive_target = -1;
  const eos = read<number[] | null>("eos_token_id", (value, what) => unique(idList(value, what, "eosTokenId")), null);
  return {
    values,
    eos: given.eos_token_id === null ? [] : eos,
    bias: [
      ...read("logit_bias", biases, []),
      ...read("sequence_bias", (value, what) => {
        const accepted = "a list of [[token id], number], for single tokens, or null";
        const pairs = listOf(value, what, accepted, "sequenceBias", (item): item is [[number], number] =>
          Array.isArray(item) && item.length === 2 && Array.isArray(item[0]) && item[0].length === 1);
        return biases(new Map(pairs.map(([[token], amount]) => [token, amount])), what, "sequenceBias");
      }, []),
      ...read("suppress_tokens", (value, what) =>
        unique(idList(value, what, "suppressTokens")).map((token): [number, number] => [token, -Infinity]), []),
    ],
    breakers: read("dry_sequence_breakers", (value, what) => {
      const accepted = "a list of token ids, and of texts that are a single token, or null";
      return listOf(value, what, accepted, "drySequenceBreakers", (item): item is number | string => isInteger(item) || isText(item));
    }, []),
    badWordsIds: read("bad_words_ids", (value, what) => {
      const accepted = `a list of lists of 1 to ${LONGEST_MATCH} token ids, or null`;
      const lists = listOf(value, what, accepted, "badWordsIds", (item): item is number[] =>
        Array.isArray(item) && item.length >= 1 && item.length <= LONGEST_MATCH && item.every((id) => isInteger(id)));
      return lists.map((list) => [...list]);
    }, []),
    badWords: read("bad_words", (value, what) => listOf(value, what, "a list of texts that are not empty, or null", "badWords", isText), []),
    stop: read("stop_strings", (value, what) =>
      listOf(typeof value === "string" ? [value] : value, what, "a text that is not empty, or a list of them", "stop", isText), []),
    grammar: givenGrammar(given.grammar),
    thinkingTokenBudget: givenBudget(given.thinking_token_budget),
  };
}

function givenGrammar(value: unknown): Grammar | null {
  if (value == null) return null;
  if (isGrammar(value)) return value;
  throw new ArgumentError(`grammar is ${shown(value)}; give a result of loadGrammar, or null; for a grammar of each prompt, give rows`, "grammar");
}

function givenBudget(value: unknown): number | null {
  if (value == null) return null;
  if (isInteger(value)) return value;
  throw new ArgumentError(`thinkingTokenBudget is ${shown(value)}; give an integer >= 0, or null for no limit`, "thinkingTokenBudget");
}

/** Settings of several layers. A total length beats the number of new tokens of an earlier layer. */
function layered(...layers: Readonly<Record<string, unknown>>[]): Record<string, unknown> {
  const settings: Record<string, unknown> = {};
  for (const layer of layers) {
    if (layer.max_length != null) delete settings.max_new_tokens;
    if (layer.min_length != null) delete settings.min_new_tokens;
    Object.assign(settings, layer);
  }
  return settings;
}

/** Whether to sample, from doSample and the options that imply it. */
function doSample(config: Readonly<Record<string, unknown>>, given: Record<string, unknown>): boolean {
  const wanted = given.do_sample;
  for (const value of [config.do_sample, wanted]) {
    if (value != null && typeof value !== "boolean") throw new ArgumentError(`doSample is ${shown(value)}; give true or false`, "doSample");
  }
  let sampling = Object.keys(SAMPLING_FIELDS).filter((name) => given[name] != null);
  const greedy = given.temperature === 0;
  if (wanted === false) {
    sampling = sampling.filter((name) => !SAMPLING_FIELDS[name].includes(given[name] as number));
    if (sampling.length && !greedy) {
      const listed = sampling.map((name) => `${OPTIONS[name]}: ${shown(given[name])}`).join(", ");
      throw new ArgumentError(`doSample: false chooses greedily, yet ${listed} is given; drop either`, "doSample");
    }
  }
  if (wanted === true && greedy) {
    throw new ArgumentError("doSample: true and temperature: 0 contradict each other; temperature 0 is greedy", "doSample");
  }
  if (greedy) return false;
  return (wanted as boolean | null | undefined) ?? (sampling.length > 0 || Boolean(config.do_sample));
}

function isWithin(value: unknown, least: number, most: number): boolean {
  return typeof value === "number" && value >= least && value <= most; // false for NaN
}

const isText = (value: unknown): value is string => typeof value === "string" && value.length > 0;
const unique = <T>(items: T[]): T[] => [...new Set(items)];

function listOf<T>(value: unknown, what: string, accepted: string, param: string, is: (item: unknown) => item is T): T[] {
  if (!Array.isArray(value) || !value.every(is)) throw new ArgumentError(`${what} is ${shown(value)}; give ${accepted}`, param);
  return value as T[];
}

function idList(value: unknown, what: string, param: string): number[] {
  if (isInteger(value)) return [value];
  return listOf(value, what, "a token id >= 0, or a list of them", param, (item): item is number => isInteger(item));
}

function biases(value: unknown, what: string, param = "logitBias"): [number, number][] {
  const entries = value instanceof Map ? [...value] : typeof value === "object" ? Object.entries(value as object) : null;
  if (!entries) throw new ArgumentError(`${what} is ${shown(value)}; give an object of token ids and numbers, or null`, param);
  return entries.map(([key, amount]) => {
    const token = Number(key);
    if (!isInteger(token)) throw new ArgumentError(`${what} has the token id ${shown(key)}; give an integer >= 0`, param);
    if (typeof amount !== "number" || Number.isNaN(amount) || amount > 3.4028235e38 || (amount < -3.4028235e38 && amount !== -Infinity)) {
      throw new ArgumentError(`${what} of token ${token} is ${shown(amount)}; give a finite number, or -Infinity to forbid it`, param);
    }
    return [token, amount];
  });
}

/** A seed for each row: given, counted on from the first, or fresh. */
export function seedsOf(seed: SamplingOptions["seed"], rows: number): bigint[] {
  if (Array.isArray(seed)) {
    if (seed.length !== rows) throw new ArgumentError(`${seed.length} seeds were given for ${rows} rows; give a seed for each row, or a single seed`, "seed");
    return seed.map(checkedSeed);
  }
  if (seed == null) return Array.from({ length: rows }, freshSeed);
  const first = checkedSeed(seed as Seed);
  return Array.from({ length: rows }, (_, row) => (first + BigInt(row)) % SEEDS);
}

function checkedSeed(seed: Seed): bigint {
  const valid = typeof seed === "bigint" || (typeof seed === "number" ? Number.isSafeInteger(seed) : typeof seed === "string" && /^\d{1,19}$/.test(seed));
  const value = valid ? BigInt(seed) : -1n;
  if (value >= 0n && value < SEEDS) return value;
  throw new ArgumentError(`seed is ${shown(seed)}; give an integer from 0 to 2^63 - 1 (beyond 2^53 as a bigint or as text), or null for a fresh seed`, "seed");
}

/** Below 2^53, so that it is exact as a number, in JSON and in an address. */
function freshSeed(): bigint {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (BigInt(high & 0x1fffff) << 32n) | BigInt(low);
}

/** A seed as its caller reads it: a number if that is exact. */
export const readableSeed = (seed: bigint): number | bigint => (seed <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(seed) : seed);

/** The filters that a row uses, each with the option that asks for it. */
export function usedFilters(params: Params): [filter: string, option: string][] {
  const used: [filter: string, option: string][] = [];
  for (const [filter, specs] of Object.entries(EXTRA_PARAMETERS)) {
    const name = filter in OPTIONS ? filter : specs[0].name;
    const spec = SPECS.find((item) => item.name === name);
    if (filter === "mirostat" ? params.values.mirostat_tau !== 0 : spec && params.values[name] !== spec.off) used.push([filter, OPTIONS[name]]);
  }
  if (params.badWords.length) used.push(["bad_words_ids", "badWords"]);
  if (params.badWordsIds.length) used.push(["bad_words_ids", "badWordsIds"]);
  return used;
}

/** Raise an error if the options ask for a filter that the package lacks. */
export function checkFilters(params: Params, there: readonly string[]): void {
  for (const [filter, option] of usedFilters(params)) {
    if (!there.includes(filter)) {
      const has = there.length ? `with the filters ${there.join(", ")}` : "without filters";
      throw new ArgumentError(`${option} is given, and the package was exported ${has}; export the model again with --filter ${filter}, or leave ${option} out`, option);
    }
  }
}

/** The most tokens of a row in the end, prompt included, whatever the capacity. */
export function totalLength(params: Params, promptLength: number): number {
  const { max_new_tokens: most, max_length: total } = params.values;
  if (most !== null) return promptLength + most;
  return total ?? promptLength + DEFAULT_NEW_TOKENS;
}

/** The contract's min_length and max_length of a row in buffers of `capacity` tokens. */
export function lengthsOf(params: Params, promptLength: number, capacity: number): [least: number, most: number] {
  if (promptLength >= capacity) {
    throw new ArgumentError(
      `the prompt has ${promptLength} tokens and the context length is ${capacity}; give at most ${capacity - 1}, or use ` +
        "a package with a larger ctx_len", "prompts");
  }
  const total = totalLength(params, promptLength);
  if (total <= promptLength) {
    throw new ArgumentError(
      `maxLength is ${total} and the prompt already has ${promptLength} tokens; raise maxLength, or give maxNewTokens, ` +
        "which does not count the prompt", "maxLength");
  }
  const { min_new_tokens: fresh, min_length: whole } = params.values;
  const least = fresh === null ? (whole ?? 0) : promptLength + fresh;
  return [Math.min(least, INT32_MAX), Math.min(total, capacity, INT32_MAX)];
}

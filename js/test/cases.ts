// Packages, calls and the Python runtime's results; tests/js/test_npm_package.py writes them.
import { readFileSync } from "node:fs";
import { type Grammar, loadGrammar } from "../src/grammars.js";

export interface Case {
  package: string;
  prompts: any;
  options: Record<string, any>;
  seed: string;
  expected: {
    tokenIds: number[][];
    texts: string[];
    finishReasons: string[];
    promptLengths: number[];
    logprobs?: number[][];
    topIds?: number[][];
  };
}

const path = process.env.QSAMPLE_CASES;
export const given: { packages: Record<string, string>; grammars: Record<string, string>; cases: Case[] } | undefined = path ? JSON.parse(readFileSync(path, "utf8")) : undefined;
export const vectors = JSON.parse(readFileSync(new URL("../../docs/vectors/package.json", import.meta.url), "utf8"));

/** The bytes of a grammar's file. */
export const grammarBytes = (name: string): Uint8Array => new Uint8Array(readFileSync(given!.grammars[name]));

/** A grammar by its name in a case. */
const grammarOf = (name: string | null): Grammar | null => (name === null ? null : loadGrammar(grammarBytes(name)));

/** Options whose grammar has a name, with that grammar. */
const withGrammar = (options: Record<string, any>): Record<string, any> =>
  options.grammar === undefined ? options : { ...options, grammar: grammarOf(options.grammar) };

/** The options of a case, with the infinities and the grammars that JSON lacks. */
export function optionsOf({ options: named, seed }: Case): Record<string, any> {
  const options = withGrammar(named);
  if (named.rows) options.rows = named.rows.map(withGrammar);
  const bias = options.logitBias && Object.fromEntries(Object.entries(options.logitBias).map(([token, value]) => [token, value === "-inf" ? -Infinity : value]));
  return { ...options, seed, ...(bias ? { logitBias: bias } : {}) };
}

/** The options of a vector: a parameter that it lacks is off, whatever the model recommends. */
export function optionsOfVector({ parameters: given, seed }: any): Record<string, any> {
  return {
    temperature: given.temperature, topP: given.top_p ?? null, topK: given.top_k ?? null, minP: given.min_p ?? null,
    repetitionPenalty: given.repetition_penalty ?? null, frequencyPenalty: given.frequency_penalty ?? null,
    presencePenalty: given.presence_penalty ?? null, minLength: given.min_length ?? null,
    maxLength: given.max_length, eosTokenId: given.stop_ids, seed,
  };
}

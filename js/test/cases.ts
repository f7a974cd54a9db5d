// Packages, calls and the Python runtime's results; tests/js/test_npm_package.py writes them.
import { readFileSync } from "node:fs";

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
export const given: { packages: Record<string, string>; cases: Case[] } | undefined = path ? JSON.parse(readFileSync(path, "utf8")) : undefined;
export const vectors = JSON.parse(readFileSync(new URL("../../docs/vectors/package.json", import.meta.url), "utf8"));

/** The options of a case, with the infinities that JSON lacks. */
export function optionsOf({ options, seed }: Case): Record<string, any> {
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

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

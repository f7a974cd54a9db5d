// The settings that come with a model, in its generation_config.json. A caller's settings are followed or refused; a model's own
// are followed or named, and the run goes on: whoever runs the model did not write them.
import { UNSUPPORTED } from "./contract.js";
import { ArgumentError, shown } from "./errors.js";
import type { Manifest } from "./manifest.js";
import { isInteger, type Params, resolve, usedFilters } from "./options.js";

type Settings = Readonly<Record<string, unknown>>;

/** The settings that a package applies; `leftOut`: a sentence that names the others, and says what to do, or null. */
export interface AppliedSettings {
  settings: Settings;
  leftOut: string | null;
}

export function appliedSettings(file: Settings, { interface: { features, vocab_size: vocabulary } }: Manifest): AppliedSettings {
  const applied: [name: string, value: unknown][] = [];
  const lacking: string[] = [];
  const undone: string[] = [];
  const wrong: [name: string, value: unknown][] = [];
  for (const [name, value] of Object.entries(inOwnWords(file, vocabulary))) {
    const params = paramsOf(name, value);
    if (isUndone(name, value)) undone.push(name);
    else if (!params || namedTokens(params).some((token) => token >= vocabulary)) wrong.push([name, value]);
    else if (params.bias.length && !features.logit_bias) lacking.push(name);
    else if (usedFilters(params).some(([filter]) => !features.filters.includes(filter))) lacking.push(name);
    else applied.push([name, value]);
  }
  const settings = Object.fromEntries(applied);
  const { min_new_tokens: least, max_new_tokens: most } = settings as Record<string, number | null | undefined>; // resolve has checked them
  if (least != null && most != null && least > most) {
    wrong.push(["min_new_tokens", least]);
    delete settings.min_new_tokens;
  }
  const sentences: string[] = [];
  if (lacking.length) {
    sentences.push(
      `${quoted(lacking)}, which the package was made without (export or bake the model again: the package then has what its settings need)`);
  }
  if (undone.length) sentences.push(`${quoted(undone)}, which qsample does not do (the tokens differ from transformers')`);
  if (wrong.length) {
    const values = wrong.map(([name, value]) => `"${name}": ${shown(value)}`).join(", ");
    sentences.push(`${values}, which is outside the accepted range (it is left out)`);
  }
  const leftOut = sentences.length ? `the model's generation_config.json asks for ${sentences.join(". It also asks for ")}` : null;
  return { settings, leftOut };
}

const quoted = (names: readonly string[]): string => names.map((name) => `"${name}"`).join(", ");

/** The settings, in qsample's words for what other tools say in theirs: a top_k of -1 is off, and a temperature of 0 is greedy. */
function inOwnWords(file: Settings, vocabulary: number): Settings {
  const settings = { ...file };
  if (settings.top_k === -1) settings.top_k = 0;
  if (settings.do_sample && settings.temperature === 0) settings.do_sample = false;
  if (Array.isArray(settings.suppress_tokens)) {
    // No row can sample the others.
    settings.suppress_tokens = settings.suppress_tokens.filter((token) => isInteger(token, 0, vocabulary - 1));
  }
  return settings;
}

/** The parameters of a row with a single setting; null for a value outside its range. */
function paramsOf(name: string, value: unknown): Params | null {
  const isGreedy = name === "temperature" && value === 0;
  try {
    return resolve({ do_sample: !isGreedy, [name]: value }, {});
  } catch (error) {
    if (error instanceof ArgumentError) return null;
    throw error;
  }
}

function namedTokens({ eos, bias, badWordsIds, breakers }: Params): number[] {
  const ids = breakers.filter((breaker) => typeof breaker === "number");
  return [...(eos ?? []), ...bias.map(([token]) => token), ...badWordsIds.flat(), ...ids];
}

/** Whether no package applies a setting. */
function isUndone(name: string, value: unknown): boolean {
  if (value == null) return false;
  if (name === "sequence_bias") return paramsOf(name, value) === null;
  if (name === "stop_strings" || !Object.hasOwn(UNSUPPORTED, name)) return false;
  return !UNSUPPORTED[name].some((neutral) => JSON.stringify(neutral) === JSON.stringify(value));
}

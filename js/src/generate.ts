// Rows → their tokens, step by step: the loop of docs/contract.md.
import type { InferenceSession } from "onnxruntime-web";
import { RUNNING, STATUS_NAMES, STOPPED } from "./contract.js";
import { QsampleError } from "./errors.js";
import { bindGrammars } from "./grammars.js";
import type { Manifest } from "./manifest.js";
import { readableSeed } from "./options.js";
import { type AllowedTokens, maskOf, parameterTensors, type Row } from "./parameters.js";
import type { Runtime, Tensors } from "./runtime.js";
import type { Memory, Run, States, StepOutputs, Widths } from "./states.js";
import { GeneratedText, type Tokenizer } from "./text.js";

/** Why a row ended: a stop token or a stop string, its length, or logits without a finite value. */
export type FinishReason = "stop" | "length" | "invalid";

/** A likely token: its log-probability by the model's own logits. */
export interface Alternative {
  token: number;
  text: string;
  logprob: number;
}

/** A token as it comes. */
export interface Piece {
  /** The number of its prompt. */
  index: number;
  /** null: the row ended without one, because its logits were invalid. */
  token: number | null;
  /** The text that the token makes certain; "" if it completes no character. */
  text: string;
  /** Of the last piece of a row; null before. */
  finishReason: FinishReason | null;
  /** Reproduces the row. */
  seed: number | bigint;
  /** Of packages with the feature, like those below it. */
  logprob?: number;
  topLogprobs?: Alternative[];
  /** The distribution that the token was drawn from, [V]. */
  probs?: Float32Array;
}

/** Says before each token of a row which tokens may come. `tokens`: those that it sampled so far. */
export type AllowedTokensFn = (row: { index: number; tokens: readonly number[] }) => AllowedTokens | Promise<AllowedTokens>;

/** What generation needs of a model. */
export interface Engine {
  manifest: Manifest;
  tokenizer: Tokenizer | null;
  runtime: Runtime;
  decoder: InferenceSession;
  memory: Memory;
  run: Run;
  /** Whether the capacity may grow while a text does. */
  grows: boolean;
}

export interface LoopOptions {
  /** The most tokens of a row's buffers. */
  capacity: number;
  allowedTokens?: AllowedTokens | AllowedTokensFn;
  outputs?: readonly OutputName[];
  flushEvery?: number;
  signal?: AbortSignal;
}

/** The fields of a piece that a package may lack, and the graph's outputs that they come from. */
export const OUTPUT_NAMES = { logprob: ["logprobs"], topLogprobs: ["top_logprob_ids", "top_logprobs"], probs: ["probs"] } as const;
export type OutputName = keyof typeof OUTPUT_NAMES;

/** Times in milliseconds. `steps`: runs of the graph after the prompts. `reads`: how often tokens came to the host. */
export interface Timing {
  prefillMs: number;
  decodeMs: number;
  steps: number;
  reads: number;
}

const PIECE = 64; // tokens of a prompt that are read in a call, as the Python runtime reads them
const LATE = 1024; // tokens after which pieces are longer, because each reads the cache
const LATE_PIECE = 256;
const FIRST_ROOM = 64; // tokens of the first buffers after the longest prompt
const MULTIPLE = 64; // capacities are multiples of this
const FLUSH_EVERY = 4; // steps between two reads, if a read waits for the device

const roundedUp = (tokens: number): number => Math.ceil(tokens / MULTIPLE) * MULTIPLE;

/** A row with what is known of it. */
interface Active {
  row: Row;
  tokens: number[];
  text: GeneratedText | null;
  ended: boolean;
}

/** A piece that waits for its optional outputs: of a row of a step that was not read yet. */
interface Late {
  piece: Piece;
  step: number;
  place: number;
}

/** Yields the tokens of the rows as they are read. `timing` is filled in on the way. */
export async function* generateRows(engine: Engine, rows: readonly Row[], options: LoopOptions, timing: Timing): AsyncGenerator<Piece, void, undefined> {
  const { manifest, runtime, tokenizer } = engine;
  const { ort } = runtime;
  const { signal } = options;
  const active: Active[] = rows.map((row) => ({
    row, tokens: [], text: tokenizer && new GeneratedText(tokenizer, row.prompt, row.stop), ended: false,
  }));
  const guided = typeof options.allowedTokens === "function";
  const flushEvery = options.flushEvery ?? (runtime.gpu ? FLUSH_EVERY : 1);
  const window = guided ? 1 : flushEvery;
  const widths = widthsOf(engine, options.outputs);
  const late: Late[] = [];
  const parametersOf = (some: readonly Row[]): Tensors => parameterTensors(ort, manifest, some);
  const needed = Math.max(...rows.map(({ maxLength }) => maxLength));
  const longest = Math.max(...rows.map(({ prompt }) => prompt.length));
  const fixed = manifest.compilation !== null && !engine.grows;
  const whole = fixed ? options.capacity : Math.min(roundedUp(needed), options.capacity);
  // A grammar leads an answer to its end within the buffers that it sees, so these have their last size from the start.
  const grows = engine.grows && rows.every(({ grammar }) => !grammar);
  let capacity = grows ? Math.min(whole, roundedUp(longest + FIRST_ROOM)) : whole;
  const started = performance.now();

  const mask = async (one: Active): Promise<void> => {
    const { allowedTokens } = options;
    if (allowedTokens === undefined) return;
    const allowed = guided ? await (allowedTokens as AllowedTokensFn)({ index: one.row.index, tokens: [...one.tokens] }) : (allowedTokens as AllowedTokens);
    one.row.values.allowed_tokens = maskOf(manifest, allowed);
  };
  const call = async (states: States, inputs: Tensors, emitted = true): Promise<void> => {
    signal?.throwIfAborted();
    const given: Tensors = { ...bound.tensors, ...inputs, ...states.feeds(), ...(inputs.input_ids ? { input_ids: inputs.input_ids } : {}) };
    const feeds = Object.fromEntries(engine.decoder.inputNames.map((name) => [name, given[name]]));
    const results = await engine.run(engine.decoder, feeds, states.fetches());
    states.accept(results, emitted);
  };
  const callInputs = (count: number, emit: boolean): Tensors => ({
    input_lengths: new ort.Tensor("int32", new Int32Array(count).fill(1), [count]),
    emit: new ort.Tensor("bool", new Uint8Array(count).fill(Number(emit)), [count]),
  });
  /** Take the tokens over that were read: of the rows that still run, in the rows of `states`. A guided row needs each
   * token at once, but the optional outputs wait for `most` steps, or for the end of a row. */
  const take = async function* (states: States, some: readonly Active[], count: number, most: number): AsyncGenerator<Piece> {
    const first = states.late - count;
    const due = !guided || states.late >= most || !Object.keys(widths).length;
    const before = some.filter(({ ended }) => ended).length;
    const { status, tokens, outputs } = await states.read(some.map(({ row, tokens }) => row.prompt.length + tokens.length), count, due);
    timing.reads += 1;
    for (const [place, one] of some.entries()) {
      if (one.ended) continue;
      const news = tokens[place];
      for (const [order, token] of news.entries()) {
        one.tokens.push(token);
        const last = order === news.length - 1 && status[place] !== RUNNING;
        // Without a stop token, an answer of a grammar stops with a token of its own.
        const isStopToken = last && status[place] === STOPPED && one.row.stopIds.includes(token);
        let text = one.text?.put(token, { isStopToken }) ?? "";
        const stopped = one.text?.stopped ?? false;
        one.ended = stopped || last;
        if (one.ended) text += one.text?.end() ?? "";
        const finishReason = stopped ? STATUS_NAMES[STOPPED] : last ? STATUS_NAMES[status[place]] : null;
        late.push({ piece: piece(one, token, text, finishReason), step: first + order, place });
        if (stopped) break;
      }
      if (!one.ended && status[place] !== RUNNING) {
        one.ended = true;
        late.push({ piece: piece(one, null, one.text?.end() ?? "", STATUS_NAMES[status[place]]), step: -1, place });
      }
      if (one.ended && status[place] === RUNNING) states.stop(place);
      if (!one.ended && news.length !== count) {
        throw new QsampleError(`a row still runs with ${news.length} new tokens of ${count} steps; the graph does not follow the decode contract`);
      }
    }
    const ended = some.filter(({ ended }) => ended).length > before;
    if (!due && !ended) return;
    const read = due ? outputs : (await states.read([], 0, true)).outputs;
    for (const { piece, step, place } of late.splice(0)) yield { ...piece, ...optionalOutputs(tokenizer, widths, read[step], place) };
  };

  const { tables, startStates } = bindGrammars(ort, manifest, rows.map(({ grammar }) => grammar));
  const bound = engine.memory.hold(tables);
  let states: States | undefined;
  const alone: States[] = [];
  try {
    // 1. Each prompt by itself, in pieces.
    for (const [place, one] of active.entries()) {
      await mask(one);
      const { prompt, seed } = one.row;
      const own = await engine.memory.start([seed], capacity, widths);
      alone.push(own);
      if (one.row.grammar) own.begin(0, startStates[place]);
      if (manifest.interface.captured) own.record([prompt]); // such a graph records sampled tokens alone
      const parameters = parametersOf([one.row]);
      for (let start = 0; start < prompt.length; ) {
        const end = Math.min(prompt.length, start + (start < LATE ? PIECE : LATE_PIECE));
        const ids = prompt.slice(start, end);
        // A single token would run kernels of its own, which round otherwise.
        const width = Math.max(ids.length, Math.min(2, capacity - start));
        const padded = BigInt64Array.from({ length: width }, (_, place) => BigInt(ids[Math.min(place, ids.length - 1)]));
        await call(own, {
          ...parameters,
          ...callInputs(1, end === prompt.length),
          input_ids: new ort.Tensor("int64", padded, [1, width]),
          input_lengths: new ort.Tensor("int32", Int32Array.of(ids.length), [1]),
        }, end === prompt.length);
        start = end;
      }
      yield* take(own, [one], 1, 1);
    }
    states = alone.length > 1 ? engine.memory.join(alone) : alone[0];
    alone.length = 0;
    const decoding = performance.now();
    timing.prefillMs += decoding - started;

    // 2. All rows together, a token a step.
    let parameters = parametersOf(rows);
    const inputs = callInputs(rows.length, true);
    while (active.some(({ ended }) => !ended)) {
      const running = active.filter(({ ended }) => !ended);
      // Before a call whose token would fill the buffers of a row, and end it.
      const most = Math.max(...running.map(({ row, tokens }) => row.prompt.length + tokens.length));
      if (most + 1 >= capacity && capacity < whole) {
        capacity = Math.min(whole, 2 * capacity);
        await states.grow(capacity, active.map(({ row, tokens }) => [...row.prompt, ...tokens]));
      }
      if (guided) {
        for (const one of running) await mask(one);
        parameters = parametersOf(rows);
      }
      const left = Math.max(...running.map(({ row, tokens }) => row.maxLength - row.prompt.length - tokens.length));
      const room = capacity < whole ? capacity - 1 - most : Infinity;
      const steps = Math.max(1, Math.min(window, left, room));
      for (let step = 0; step < steps; step += 1) await call(states, { ...parameters, ...inputs });
      timing.steps += steps;
      yield* take(states, active, steps, flushEvery);
      timing.decodeMs = performance.now() - decoding;
    }
  } finally {
    for (const own of alone) own.free();
    states?.free();
    bound.free();
  }
}

function piece(one: Active, token: number | null, text: string, reason: string | null): Piece {
  return { index: one.row.index, token, text, finishReason: reason as FinishReason | null, seed: readableSeed(one.row.seed) };
}

/** The numbers a row of the optional outputs that are read: by default, all that the package returns. */
function widthsOf({ decoder, manifest }: Engine, wanted: readonly OutputName[] = Object.keys(OUTPUT_NAMES) as OutputName[]): Widths {
  const { features, vocab_size: vocabulary } = manifest.interface;
  const names: string[] = wanted.flatMap((name) => OUTPUT_NAMES[name]).filter((name) => decoder.outputNames.includes(name));
  return Object.fromEntries(names.map((name) => [name, name === "logprobs" ? 1 : name === "probs" ? vocabulary : features.top_logprobs]));
}

/** The optional outputs of a row in a step. */
function optionalOutputs(tokenizer: Tokenizer | null, widths: Widths, outputs: StepOutputs | undefined, place: number): Partial<Piece> {
  const found: Partial<Piece> = {};
  const of = (name: string): any => outputs?.[name]?.slice(place * widths[name], (place + 1) * widths[name]);
  const [logprob, ids, likeliest, probs] = ["logprobs", "top_logprob_ids", "top_logprobs", "probs"].map(of);
  if (logprob) found.logprob = logprob[0];
  if (ids) {
    const all = Array.from(ids as Int32Array, (token, rank) => ({ token, logprob: likeliest[rank] as number }));
    // Filters may leave fewer tokens than the package reports.
    const drawable = all.filter(({ token }) => token >= 0);
    found.topLogprobs = drawable.map(({ token, logprob }) => ({
      token, text: tokenizer?.decode([token], { skipSpecialTokens: false }) ?? "", logprob,
    }));
  }
  if (probs) found.probs = probs;
  return found;
}

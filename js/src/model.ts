// A loaded package: prompts in, tokens and text out.
import type { InferenceSession } from "onnxruntime-web";
import { type ChatOptions, CHAT_OPTIONS, ChatTemplates, isChat, type Message } from "./chat.js";
import { ArgumentError, checkObject, checkSignal, DeviceError, PackageError, QsampleError, shown, translated } from "./errors.js";
import { type FileOptions, hasFile, Meter, type PackageFiles, readJson } from "./files.js";
import { type AllowedTokensFn, type Engine, type FinishReason, generateRows, OUTPUT_NAMES, type OutputName, type Piece, type Timing } from "./generate.js";
import type { Manifest } from "./manifest.js";
import { checkNames, type Params, readableSeed, resolve, type SamplingOptions, seedsOf, totalLength } from "./options.js";
import { appliedSettings } from "./own_settings.js";
import { type AllowedTokens, makeRow, maskOf, type Row } from "./parameters.js";
import { checkDevice, compiledFor, type Device, openSession, type Runtime, type Tensors, WEBGPU } from "./runtime.js";
import { openMemory, type Run } from "./states.js";
import { Tokenizer } from "./text.js";
import { inTurn } from "./turns.js";

/** A text, token ids, or chat messages. */
export type Prompt = string | readonly number[] | readonly Message[];

export interface GenerateOptions extends SamplingOptions, ChatOptions {
  /** The sampling options of each prompt, on top of the others. */
  rows?: readonly SamplingOptions[];
  /** The tokens that may come: ids, a bitmask, or a function that returns these before each token. Needs the feature. */
  allowedTokens?: AllowedTokens | AllowedTokensFn;
  /** Which optional fields pieces have, for instance ["logprob"]; by default all that the package returns. */
  outputs?: readonly OutputName[];
  /** Steps between two reads of tokens and optional outputs: 1, on a GPU 4. It changes no token, only how many come at once. */
  flushEvery?: number;
  /** Ends the generation with the signal's reason. */
  signal?: AbortSignal;
}

/** The result of a generation; entry i belongs to prompt i. */
export interface Output {
  /** The text of each row, a continuation of its prompt; null without a tokenizer. */
  texts: string[] | null;
  /** The sampled tokens, a stop token included. */
  tokenIds: number[][];
  finishReasons: FinishReason[];
  /** Each reproduces its row. */
  seeds: (number | bigint)[];
  promptLengths: number[];
  timing: Timing;
}

/** A generation: its pieces as they come, or its output at the end. It starts when either is asked for. */
export interface Generation extends AsyncIterable<Piece> {
  /** The result, once all rows have ended. Pieces may be read before, but need not. */
  output(): Promise<Output>;
}

/** What `load` gives, in this thread or in a worker. */
export interface Model {
  readonly device: Device;
  readonly manifest: Manifest;
  /** Continue a prompt, or each of a list of prompts. */
  generate(prompts: Prompt | readonly Prompt[], options?: GenerateOptions): Generation;
  /** Token ids of a text. */
  encode(text: string, options?: { addSpecialTokens?: boolean }): Promise<number[]>;
  decode(ids: readonly number[], options?: { skipSpecialTokens?: boolean }): Promise<string>;
  /** Whether it takes chat messages. */
  readonly hasChatTemplate: boolean;
  /** The defaults of the options, from the model's generation_config.json. */
  readonly generationConfig: Readonly<Record<string, unknown>>;
  /** Give the memory back. */
  dispose(): Promise<void>;
}

const CALL_OPTIONS = [...CHAT_OPTIONS, "rows", "allowedTokens", "outputs", "flushEvery", "signal"];
const NEEDED = /^(decoder(-\d+)?\.onnx|initial_state\.onnx|tokenizer\.json|tokenizer_config\.json|config\.json|generation_config\.json|.*\.jinja)/;

/** Open the graphs of a package. */
export async function openModel(files: PackageFiles, runtime: Runtime, options: FileOptions, meter: Meter): Promise<LocalModel> {
  const { manifest } = files;
  checkDevice(files, runtime.device);
  meter.expect(manifest, Object.keys(manifest.files).filter((name) => NEEDED.test(name)));
  const config = (await readJson(files, "tokenizer_config.json")) ?? {};
  const description = await readJson(files, "tokenizer.json");
  const tokenizer = description && new Tokenizer(description, config, manifest.interface.vocab_size, files.where);
  const templates = await ChatTemplates.of(files, config);
  const generationConfig = (await readJson(files, "generation_config.json")) ?? {};
  const modelConfig = hasFile(files, "config.json") ? await readJson(files, "config.json") : {};
  options.signal?.throwIfAborted();
  const initial = await openSession(runtime, files, "initial_state.onnx", { onHost: true });
  const decoder = await openSession(runtime, files, "decoder.onnx");
  if (options.signal?.aborted) {
    await Promise.all([initial.release(), decoder.release()]);
    options.signal.throwIfAborted();
  }
  // LongRoPE chooses its frequencies by the capacity.
  const grows = (manifest.compilation === null || compiledFor(manifest) === WEBGPU) && !/"(longrope|su)"/.test(JSON.stringify(modelConfig));
  return new LocalModel(runtime, manifest, tokenizer ?? null, templates, generationConfig, initial, decoder, grows);
}

export class LocalModel implements Model {
  private readonly engine: Engine;
  private readonly settings: Readonly<Record<string, unknown>>;
  private lost: Promise<never> | null = null;
  private disposed = false;

  constructor(
    private readonly runtime: Runtime,
    readonly manifest: Manifest,
    private readonly tokenizer: Tokenizer | null,
    private readonly templates: ChatTemplates,
    readonly generationConfig: Readonly<Record<string, unknown>>,
    private readonly initial: InferenceSession,
    private readonly decoder: InferenceSession,
    grows: boolean,
  ) {
    const run: Run = (session, feeds, fetches) => this.call(session, feeds, fetches);
    const memory = openMemory(runtime, initial, decoder, run, compiledFor(manifest) === WEBGPU);
    const { settings, leftOut } = appliedSettings(generationConfig, manifest);
    this.settings = settings;
    if (leftOut) console.warn(`qsample: ${leftOut}`);
    this.engine = { manifest, tokenizer, runtime, decoder, memory, run, grows };
    if (runtime.gpu) {
      this.lost = runtime.gpu.lost.then(({ reason, message }) => {
        throw new DeviceError(`the GPU was lost (${message || reason}); load the model again, or load it with device: "wasm"`);
      });
      this.lost.catch(() => undefined); // reported by the call that meets it
    }
  }

  get device(): Device {
    return this.runtime.device;
  }

  get hasChatTemplate(): boolean {
    return this.tokenizer !== null && this.templates.any;
  }

  generate(prompts: Prompt | readonly Prompt[], options: GenerateOptions = {}): Generation {
    return new PieceStream(() => this.pieces(prompts, options));
  }

  async encode(text: string, options: { addSpecialTokens?: boolean } = {}): Promise<number[]> {
    if (typeof text !== "string") throw new ArgumentError(`text is ${shown(text)}; give a text`, "text");
    checkObject(options, "options");
    return this.needed().encode(text, options);
  }

  async decode(ids: readonly number[], options: { skipSpecialTokens?: boolean } = {}): Promise<string> {
    if (!isIds(ids)) throw new ArgumentError(`ids is ${shown(ids)}; give a list of token ids`, "ids");
    checkObject(options, "options");
    return this.needed().decode(ids, options);
  }

  async dispose(): Promise<void> {
    if (this.disposed) return;
    this.disposed = true;
    const release = async (): Promise<void> => {
      await this.initial.release();
      await this.decoder.release();
    };
    await (this.runtime.native ? release() : inTurn(release));
    this.runtime.gpu?.destroy();
  }

  /** The rows of a call, checked. */
  private rows(given: Prompt | readonly Prompt[], options: GenerateOptions): Row[] {
    checkNames(options, CALL_OPTIONS);
    const { flushEvery, outputs } = options;
    if (outputs !== undefined && !(Array.isArray(outputs) && outputs.every((name) => Object.hasOwn(OUTPUT_NAMES, name)))) {
      throw new ArgumentError(`outputs is ${shown(outputs)}; give a list of ${Object.keys(OUTPUT_NAMES).join(", ")}`, "outputs");
    }
    if (flushEvery !== undefined && !(Number.isInteger(flushEvery) && flushEvery >= 1)) {
      throw new ArgumentError(`flushEvery is ${shown(flushEvery)}; give an integer >= 1`, "flushEvery");
    }
    const items = listed(given);
    const prompts = items.map((prompt, index) => this.ids(prompt, index, options));
    const own: readonly SamplingOptions[] = options.rows ?? prompts.map(() => ({}));
    if (!Array.isArray(own) || own.length !== prompts.length) {
      throw new ArgumentError(`rows is ${shown(own)}; give a list with the options of each of the ${prompts.length} prompts`, "rows");
    }
    own.forEach((one, index) => checkNames(one, [], `rows[${index}]`));
    const params: Params[] = own.map((one, index) => {
      const resolved = resolve(this.settings, { ...options, ...one });
      const hasStops = options.eosTokenId !== undefined || one.eosTokenId !== undefined;
      // A chat also ends at the tokenizer's end of a text, which the manifest adds to those of the generation_config.
      return !hasStops && isChat(items[index]) ? { ...resolved, eos: null } : resolved;
    });
    const seeds = seedsOf(options.seed, prompts.length).map((seed, index) => (own[index].seed == null ? seed : seedsOf(own[index].seed, 1)[0]));
    if (options.allowedTokens !== undefined && !this.manifest.interface.features.allowed_tokens) {
      throw new ArgumentError("allowedTokens needs a package that was exported with allowed_tokens (--allowed-tokens)", "allowedTokens");
    }
    if (options.allowedTokens !== undefined && typeof options.allowedTokens !== "function") maskOf(this.manifest, options.allowedTokens);
    if (params.some(({ stop }) => stop.length) && !this.tokenizer) {
      throw new ArgumentError("stop is found in the text, and the package has no tokenizer; give eosTokenId", "stop");
    }
    const longest = Math.max(...prompts.map((ids, index) => totalLength(params[index], ids.length)));
    return prompts.map((ids, index) => {
      try {
        return makeRow(this.manifest, this.tokenizer, params[index], index, ids, seeds[index], Math.min(this.capacity, Math.max(longest, ids.length + 1)));
      } catch (error) {
        if (prompts.length > 1 && error instanceof ArgumentError) throw new ArgumentError(`prompt ${index}: ${error.message}`, error.param);
        throw error;
      }
    });
  }

  /** The most tokens that a row may have. */
  get capacity(): number {
    return this.manifest.compilation?.ctx_len ?? this.manifest.max_position_embeddings ?? 2 ** 31 - 1;
  }

  private async *pieces(prompts: Prompt | readonly Prompt[], options: GenerateOptions): AsyncGenerator<Piece, Output, undefined> {
    this.checkOpen();
    checkObject(options, "options");
    const { allowedTokens, outputs, flushEvery, signal } = options;
    checkSignal(signal);
    signal?.throwIfAborted();
    const rows = this.rows(prompts, options);
    const collected = new Collected(rows.length);
    const timing: Timing = { prefillMs: 0, decodeMs: 0, steps: 0, reads: 0 };
    const most = this.manifest.compilation?.batch_size ?? rows.length;
    for (let start = 0; start < rows.length; start += most) {
      const group = generateRows(this.engine, rows.slice(start, start + most), { capacity: this.capacity, allowedTokens, outputs, flushEvery, signal }, timing);
      for await (const piece of group) {
        collected.add(piece);
        yield piece;
      }
    }
    const { texts, tokenIds, finishReasons } = collected;
    return {
      texts: this.tokenizer ? texts : null,
      tokenIds,
      finishReasons,
      seeds: rows.map(({ seed }) => readableSeed(seed)),
      promptLengths: rows.map(({ prompt }) => prompt.length),
      timing,
    };
  }

  private checkOpen(): void {
    if (this.disposed) throw new QsampleError("the model was disposed of; load it again");
  }

  private needed(): Tokenizer {
    if (!this.tokenizer) throw new PackageError("the package has no tokenizer.json, so it takes no text; give token ids, or export it with its tokenizer");
    return this.tokenizer;
  }

  private ids(prompt: Prompt, index: number, options: GenerateOptions): number[] {
    const { vocab_size: vocabulary } = this.manifest.interface;
    let ids: number[];
    if (typeof prompt === "string") ids = this.needed().encode(prompt);
    else if (isChat(prompt)) ids = this.needed().encode(this.templates.render(prompt, options), { addSpecialTokens: false });
    else if (isIds(prompt)) ids = [...prompt];
    else throw new ArgumentError(`prompt ${index} is ${shown(prompt)}; ${ACCEPTED}`, "prompts");
    if (!ids.length) {
      const { bos } = this.manifest.token_ids;
      if (bos === null) throw new ArgumentError(`prompt ${index} is empty and the model has no beginning-of-text token; give a token`, "prompts");
      ids = [bos];
    }
    const wrong = ids.findIndex((id) => !Number.isInteger(id) || id < 0 || id >= vocabulary); // undefined, too, of a list with holes
    if (wrong >= 0) throw new ArgumentError(`prompt ${index} has the token id ${ids[wrong]}; the model's ids are 0 to ${vocabulary - 1}`, "prompts");
    return ids;
  }

  private async call(session: InferenceSession, feeds: Tensors, fetches?: Parameters<Run>[2]): Promise<Tensors> {
    const work = async (): Promise<Tensors> => {
      this.checkOpen();
      try {
        const running = fetches ? session.run(feeds, fetches as InferenceSession.OnnxValueMapType) : session.run(feeds);
        return (await (this.lost ? Promise.race([running, this.lost]) : running)) as Tensors;
      } catch (error) {
        if (this.lost) await Promise.race([this.lost, new Promise((done) => setTimeout(done, 0))]); // the cause, if that is it
        this.checkOpen();
        throw translated(error, `a step on ${this.device}`, "load the model again, or give another device");
      }
    };
    return this.runtime.native ? work() : inTurn(work);
  }
}

const ACCEPTED = 'give a text, token ids, chat messages [{role: "user", content: "..."}], or a list of these';

function isIds(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((item) => typeof item === "number");
}

/** Each prompt as it was given. */
function listed(prompts: Prompt | readonly Prompt[]): Prompt[] {
  if (typeof prompts === "string" || isChat(prompts) || (isIds(prompts) && prompts.length)) return [prompts];
  if (!Array.isArray(prompts)) throw new ArgumentError(`prompts is ${shown(prompts)}; ${ACCEPTED}`, "prompts");
  if (!prompts.length) throw new ArgumentError("no prompt was given; give at least a single prompt", "prompts");
  return prompts as Prompt[];
}

/** Collects the output of a generation from its pieces. */
class Collected {
  readonly tokenIds: number[][];
  readonly texts: string[];
  readonly finishReasons: FinishReason[];

  constructor(rows: number) {
    this.tokenIds = Array.from({ length: rows }, () => []);
    this.texts = new Array(rows).fill("");
    this.finishReasons = new Array(rows).fill("length");
  }

  add({ index, token, text, finishReason }: Piece): void {
    if (token !== null) this.tokenIds[index].push(token);
    this.texts[index] += text;
    if (finishReason) this.finishReasons[index] = finishReason;
  }
}

function withResolvers<T>(): { promise: Promise<T>; resolve: (value: T) => void; reject: (reason: unknown) => void } {
  let [resolve, reject] = [(_: T): void => undefined, (_: unknown): void => undefined];
  const promise = new Promise<T>((yes, no) => {
    resolve = yes;
    reject = no;
  });
  return { promise, resolve, reject };
}

/** A generation that a generator of pieces runs: its return value is the output. */
export class PieceStream implements Generation {
  private iterator: AsyncIterator<Piece> | null = null;
  private readonly ended = withResolvers<Output>();

  constructor(private readonly make: () => AsyncGenerator<Piece, Output, undefined>) {
    this.ended.promise.catch(() => undefined); // a caller who reads the pieces gets the error there
  }

  [Symbol.asyncIterator](): AsyncIterator<Piece> {
    if (this.iterator) throw new QsampleError("this generation was read already; call generate again");
    this.iterator = this.run();
    return this.iterator;
  }

  async output(): Promise<Output> {
    if (!this.iterator) {
      this.iterator = this.run();
      while (!(await this.iterator.next()).done);
    }
    return this.ended.promise;
  }

  private async *run(): AsyncGenerator<Piece, void, undefined> {
    try {
      this.ended.resolve(yield* this.make());
    } catch (error) {
      this.ended.reject(error);
      throw error;
    } finally {
      this.ended.reject(new QsampleError("the pieces were not read to their end, so there is no output")); // unless it is there
    }
  }
}

// A model whose computations are in a worker; the other end is worker.ts.
import { checkObject, checkSignal, type ErrorData, fromData, QsampleError } from "./errors.js";
import type { Progress } from "./files.js";
import type { AllowedTokensFn, Piece } from "./generate.js";
import type { LoadOptions } from "./load.js";
import type { Manifest } from "./manifest.js";
import { type GenerateOptions, type Generation, type Model, type Output, type Prompt, PieceStream } from "./model.js";
import type { Device } from "./runtime.js";

/** To the worker: a call, the end of a call, the answer to a question. */
export type ToWorker =
  | { id: number; call: "load" | "generate" | "encode" | "decode" | "dispose"; values: unknown[] }
  | { id: number; abort: true }
  | { id: number; question: number; answer: unknown };
/** From the worker: the result or the error of a call, and what comes before these. */
export type FromWorker =
  | { id: number; value: unknown }
  | { id: number; error: ErrorData }
  | { id: number; progress: Progress }
  | { id: number; piece: Piece }
  | { id: number; question: number; row: unknown };

interface Pending {
  resolve: (value: any) => void;
  reject: (error: unknown) => void;
  progress?: (progress: Progress) => void;
  piece?: (piece: Piece) => void;
  ask?: (row: any) => unknown;
}

class Connection {
  private readonly pending = new Map<number, Pending>();
  private calls = 0;
  private ended: Error | null = null;

  constructor(readonly worker: Worker) {
    worker.onmessage = ({ data }: { data: FromWorker }) => this.receive(data);
    worker.onerror = (event) => {
      event.preventDefault();
      this.end(new QsampleError(`the worker ended: ${event.message || "it could not be loaded"}; load the model again`));
    };
  }

  call<T>(call: Extract<ToWorker, { call: string }>["call"], values: unknown[], signal?: AbortSignal, handlers: Omit<Pending, "resolve" | "reject"> = {}): Promise<T> {
    signal?.throwIfAborted();
    if (this.ended) throw this.ended;
    const id = (this.calls += 1);
    const abort = (): void => this.worker.postMessage({ id, abort: true } satisfies ToWorker);
    signal?.addEventListener("abort", abort, { once: true });
    const answered = new Promise<T>((resolve, reject) => this.pending.set(id, { resolve, reject, ...handlers }));
    this.worker.postMessage({ id, call, values } satisfies ToWorker);
    return answered
      .catch((error: unknown) => { throw signal?.aborted && (error as Error).name === "AbortError" ? signal.reason : error; })
      .finally(() => signal?.removeEventListener("abort", abort));
  }

  /** Reject what waits, and all that comes. */
  end(error: Error): void {
    this.ended = error;
    this.worker.terminate();
    for (const { reject } of this.pending.values()) reject(error);
    this.pending.clear();
  }

  private receive(data: FromWorker): void {
    const pending = this.pending.get(data.id);
    if (!pending) return;
    if ("progress" in data) pending.progress?.(data.progress);
    else if ("piece" in data) pending.piece?.(data.piece);
    else if ("question" in data) {
      const { id, question } = data;
      Promise.resolve(data.row).then(pending.ask).then(
        (answer) => this.worker.postMessage({ id, question, answer } satisfies ToWorker),
        (error: unknown) => {
          this.worker.postMessage({ id, abort: true } satisfies ToWorker);
          this.worker.postMessage({ id, question, answer: null } satisfies ToWorker);
          pending.reject(error);
        },
      );
    } else {
      this.pending.delete(data.id);
      if ("error" in data) pending.reject(fromData(data.error));
      else pending.resolve(data.value);
    }
  }
}

/** Open a package in a worker. */
export async function loadRemote(source: string, { worker, signal, progress, ...options }: LoadOptions): Promise<Model> {
  const own = worker === true ? new Worker(new URL("./worker.js", import.meta.url), { type: "module" }) : (worker as Worker);
  const connection = new Connection(own);
  try {
    return new RemoteModel(connection, await connection.call("load", [source, options], signal, { progress }));
  } catch (error) {
    own.terminate();
    throw error;
  }
}

interface Description {
  device: Device;
  manifest: Manifest;
  generationConfig: Readonly<Record<string, unknown>>;
  hasChatTemplate: boolean;
}

class RemoteModel implements Model {
  readonly device: Device;
  readonly manifest: Manifest;
  readonly generationConfig: Readonly<Record<string, unknown>>;
  readonly hasChatTemplate: boolean;

  constructor(private readonly connection: Connection, { device, manifest, generationConfig, hasChatTemplate }: Description) {
    this.device = device;
    this.manifest = manifest;
    this.generationConfig = generationConfig;
    this.hasChatTemplate = hasChatTemplate;
  }

  generate(prompts: Prompt | readonly Prompt[], given: GenerateOptions = {}): Generation {
    return new PieceStream(() => {
      checkObject(given, "options");
      const { signal, ...options } = given;
      checkSignal(signal);
      return this.pieces(prompts, options, signal);
    });
  }

  encode(text: string, options?: object): Promise<number[]> {
    return this.connection.call("encode", [text, options]);
  }

  decode(ids: readonly number[], options?: object): Promise<string> {
    return this.connection.call("decode", [ids, options]);
  }

  async dispose(): Promise<void> {
    this.connection.end(new QsampleError("the model was disposed of; load it again"));
  }

  private async *pieces(prompts: unknown, { allowedTokens, ...options }: GenerateOptions, signal?: AbortSignal): AsyncGenerator<Piece, Output, undefined> {
    const gone = new AbortController(); // the reader went away
    const signals = signal ? AbortSignal.any([signal, gone.signal]) : gone.signal;
    const waiting: Piece[] = [];
    let [wake, output, ended] = [(): void => undefined, undefined as Output | undefined, false];
    let error: unknown;
    const guided = typeof allowedTokens === "function";
    const call = this.connection.call<Output>("generate", [prompts, guided ? options : { ...options, ...(allowedTokens === undefined ? {} : { allowedTokens }) }, guided], signals, {
      piece: (piece) => {
        waiting.push(piece);
        wake();
      },
      ...(guided ? { ask: allowedTokens as AllowedTokensFn } : {}),
    });
    call.then((value) => { output = value; }, (reason: unknown) => { error = reason; }).finally(() => {
      ended = true;
      wake();
    });
    try {
      for (;;) {
        while (waiting.length) {
          signal?.throwIfAborted();
          yield waiting.shift()!;
        }
        if (ended) break;
        await new Promise<void>((resolve) => { wake = resolve; });
      }
    } finally {
      if (!ended) gone.abort();
    }
    if (error !== undefined) throw error;
    return output!;
  }
}

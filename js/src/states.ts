// The retained states of some rows: in the host's memory, or on the GPU, where they stay.
import type { InferenceSession, Tensor } from "onnxruntime-web";
import { OUTPUTS, STATES, STOPPED } from "./contract.js";
import { OutOfMemoryError } from "./errors.js";
import { seedTensor } from "./parameters.js";
import type { Ort, Runtime, Tensors } from "./runtime.js";

/** Numbers a row of each optional output that is read, by its name. */
export type Widths = Readonly<Record<string, number>>;
/** The values of these outputs of all rows, of a step. */
export type StepOutputs = Record<string, Float32Array | Int32Array>;

/** What is read after some steps. `tokens`: of each row, those from the position on that was asked for. */
export interface Snapshot {
  status: Int32Array;
  tokens: number[][];
  /** Of each step since they were read last; none unless asked for. */
  outputs: StepOutputs[];
}

/** States of the same rows in every call. */
export interface States {
  readonly capacity: number;
  /** The inputs of a call, with the tokens that the call before it sampled. */
  feeds(): Tensors;
  /** Where each output goes; null: new memory. */
  fetches(): Record<string, Tensor | null>;
  /** Take the outputs of a call over. emitted: whether it sampled tokens; otherwise, it has no optional outputs. */
  accept(results: Tensors, emitted: boolean): void;
  /** Steps whose optional outputs were not read yet. */
  readonly late: number;
  /** The new tokens of each row, from `positions` on, at most `count`; and the optional outputs. */
  read(positions: readonly number[], count: number, outputs: boolean): Promise<Snapshot>;
  /** Write the tokens of each row. A graph for replay records sampled tokens alone. */
  record(history: readonly (readonly number[])[]): void;
  /** Let a row's answer begin in a state of the bound grammars; before the first call. */
  begin(row: number, grammarState: number): void;
  /** Keep a row from advancing. */
  stop(row: number): void;
  /** Give every row more room. `history`: its tokens. */
  grow(capacity: number, history: readonly (readonly number[])[]): Promise<void>;
  free(): void;
}

/** Inputs that are the same in many calls, where the graph reads them. */
export interface Constants {
  readonly tensors: Tensors;
  free(): void;
}

/** Makes the states of a package's rows. */
export interface Memory {
  hold(constants: Tensors): Constants;
  start(seeds: readonly bigint[], capacity: number, widths: Widths): Promise<States>;
  /** Rows next to each other; frees the states of each. */
  join(rows: readonly States[]): States;
}

const PAST = "past_key_values.";
/** The output that holds the next value of a state. */
export const retainedName = (state: string): string =>
  state.startsWith(PAST) ? `present.${state.slice(PAST.length)}` : `${state}_RetainedState`;
const READ_ONLY = new Set(STATES.filter((spec) => spec.readOnly).map((spec) => spec.name));
const NEXT = "next_ids";
const OPTIONAL = new Map(OUTPUTS.filter(({ name }) => name !== NEXT).map(({ name, dtype }) => [name, dtype]));
/** New memory for every output that is read. */
const fetched = ({ decoder }: Shared, widths: Widths): Record<string, Tensor | null> =>
  Object.fromEntries(decoder.outputNames.filter((name) => name in widths || !OPTIONAL.has(name)).map((name) => [name, null]));

/** Axis T of a state; -1: its size is fixed. */
function capacityAxis(name: string): number {
  if (name.startsWith(PAST)) return /\.(key|value)$/.test(name) ? 2 : -1;
  return STATES.find((spec) => spec.name === name)?.axes.indexOf("T") ?? -1;
}

const product = (sizes: readonly number[]): number => sizes.reduce((result, size) => result * size, 1);

/** compiled: for WebGPU. */
export function openMemory(runtime: Runtime, initial: InferenceSession, decoder: InferenceSession, run: Run, compiled: boolean): Memory {
  const shared = { runtime, initial, decoder, run };
  return runtime.gpu ? new GpuMemory(shared, runtime.gpu, compiled) : new HostMemory(shared);
}

/** Calls a session; calls take turns. */
export type Run = (session: InferenceSession, feeds: Tensors, fetches?: Record<string, Tensor | null> | string[]) => Promise<Tensors>;

interface Shared {
  runtime: Runtime;
  initial: InferenceSession;
  decoder: InferenceSession;
  run: Run;
}

function initialFeeds(ort: Ort, seeds: readonly bigint[], capacity: number): Tensors {
  return {
    seed: seedTensor(ort, seeds.map((seed) => ({ seed }))),
    capacity: new ort.Tensor("int64", BigInt64Array.of(BigInt(capacity)), []),
  };
}

class HostMemory implements Memory {
  constructor(private readonly shared: Shared) {}

  hold(constants: Tensors): Constants {
    return { tensors: constants, free: () => undefined };
  }

  async start(seeds: readonly bigint[], capacity: number, widths: Widths): Promise<States> {
    const tensors = await this.shared.run(this.shared.initial, initialFeeds(this.shared.runtime.ort, seeds, capacity));
    return new HostStates(this.shared, seeds, capacity, { ...tensors }, widths);
  }

  join(rows: readonly States[]): States {
    const states = rows as HostStates[];
    const [first] = states;
    const joined: Tensors = {};
    for (const [name, { type, data, dims }] of Object.entries(first.tensors)) {
      const parts = states.map((one) => one.tensors[name].data as Float32Array);
      const whole = new (data.constructor as Float32ArrayConstructor)(parts.reduce((sum, part) => sum + part.length, 0));
      let place = 0;
      for (const part of parts) {
        whole.set(part, place);
        place += part.length;
      }
      joined[name] = new this.shared.runtime.ort.Tensor(type, whole, [states.length, ...dims.slice(1)]);
    }
    return new HostStates(this.shared, states.flatMap((one) => one.seeds), first.capacity, joined, first.widths);
  }
}

class HostStates implements States {
  private readonly names: string[];
  private outputs: StepOutputs[] = [];

  /** tensors: by the states' names, and `next_ids` after the first call. */
  constructor(
    private readonly shared: Shared, readonly seeds: readonly bigint[], public capacity: number, public tensors: Tensors, readonly widths: Widths,
  ) {
    this.names = Object.keys(tensors).filter((name) => !READ_ONLY.has(name) && name !== NEXT);
  }

  feeds(): Tensors {
    const { [NEXT]: next, ...states } = this.tensors;
    return next ? { ...states, input_ids: next } : states;
  }

  get late(): number {
    return this.outputs.length;
  }

  fetches(): Record<string, Tensor | null> {
    const fetches = fetched(this.shared, this.widths);
    // In place, where the binding can: otherwise ONNX Runtime copies the cache inside as well.
    if (this.shared.runtime.native) for (const name of this.names) fetches[retainedName(name)] = this.tensors[name];
    return fetches;
  }

  accept(results: Tensors, emitted: boolean): void {
    for (const name of this.names) this.tensors[name] = results[retainedName(name)];
    this.tensors[NEXT] = results[NEXT];
    if (emitted) this.outputs.push(Object.fromEntries(Object.keys(this.widths).map((name) => [name, results[name].data as Float32Array])));
  }

  async read(positions: readonly number[], count: number, outputs: boolean): Promise<Snapshot> {
    const [status, lengths, tokens] = ["status", "lengths", "tokens"].map((name) => this.tensors[name].data as Int32Array);
    const news = positions.map((position, row) => {
      const end = Math.min(lengths[row] + 1, position + count);
      return Array.from(tokens.subarray(row * this.capacity + position, row * this.capacity + Math.max(position, end)));
    });
    return { status: status.slice(), tokens: news, outputs: outputs ? this.outputs.splice(0) : [] };
  }

  record(history: readonly (readonly number[])[]): void {
    fillTokens(this.tensors.tokens.data as Int32Array, this.capacity, history);
  }

  begin(row: number, grammarState: number): void {
    (this.tensors.grammar_state.data as Int32Array)[row] = grammarState;
  }

  stop(row: number): void {
    (this.tensors.status.data as Int32Array)[row] = STOPPED;
  }

  async grow(capacity: number, history: readonly (readonly number[])[]): Promise<void> {
    const { ort } = this.shared.runtime;
    const fresh: Tensors = { ...(await this.shared.run(this.shared.initial, initialFeeds(ort, this.seeds, capacity))) };
    for (const name of this.names) {
      const axis = capacityAxis(name);
      const old = this.tensors[name];
      if (axis < 0) fresh[name] = old;
      else if (name === "tokens") fillTokens(fresh[name].data as Int32Array, capacity, history);
      else {
        const from = old.data as Float32Array;
        const into = fresh[name].data as Float32Array;
        const blocks = product(old.dims.slice(0, axis));
        const [short, long] = [from.length / blocks, into.length / blocks];
        for (let block = 0; block < blocks; block += 1) into.set(from.subarray(block * short, (block + 1) * short), block * long);
      }
    }
    this.tensors = { ...fresh, [NEXT]: this.tensors[NEXT] };
    this.capacity = capacity;
  }

  free(): void {
    this.tensors = {};
  }
}

/** Each row's tokens, and its first token in the places after them. */
function fillTokens(into: Int32Array, capacity: number, history: readonly (readonly number[])[]): void {
  history.forEach((tokens, row) => {
    into.fill(tokens[0], row * capacity, (row + 1) * capacity);
    into.set(tokens, row * capacity);
  });
}

const BYTES: Record<string, number> = { float32: 4, int32: 4, int64: 8, float16: 2, int8: 1, uint8: 1 };

/** A tensor over a buffer of the GPU. */
interface Held {
  buffer: GPUBuffer;
  tensor: Tensor;
  bytes: number;
}

class GpuMemory implements Memory {
  constructor(readonly shared: Shared, readonly gpu: GPUDevice, private readonly compiled: boolean) {}

  /** Whether a state is updated in its buffer: a cache always, and in packages for WebGPU all but the smallest. */
  inPlace(name: string): boolean {
    return /^past_key_values\..*\.(key|value)$/.test(name) || (this.compiled && (name === "tokens" || name === "output_counts"));
  }

  hold(constants: Tensors): Constants {
    const held = Object.entries(constants).map(([name, value]) => [name, this.upload(value)] as const);
    return {
      tensors: Object.fromEntries(held.map(([name, { tensor }]) => [name, tensor])),
      free: () => held.forEach(([, { buffer }]) => buffer.destroy()),
    };
  }

  async start(seeds: readonly bigint[], capacity: number, widths: Widths): Promise<GpuStates> {
    return new GpuStates(this, seeds, capacity, await this.initial(seeds, capacity), widths);
  }

  /** The starting states: zeros, which new buffers hold, and the small states of `initial_state.onnx`. */
  async initial(seeds: readonly bigint[], capacity: number): Promise<Record<string, Held>> {
    const { ort } = this.shared.runtime;
    const names = this.shared.initial.outputNames;
    const small = await this.shared.run(this.shared.initial, initialFeeds(ort, seeds, capacity), names.filter((name) => !name.startsWith(PAST)));
    const made: Record<string, Held> = {};
    this.gpu.pushErrorScope("out-of-memory");
    for (const name of names) {
      const value = small[name];
      if (value) made[name] = this.upload(value);
      else {
        const metadata = this.shared.decoder.inputMetadata.find((item) => item.name === name);
        if (!metadata?.isTensor) continue; // never read
        const dims = metadata.shape.map((size, axis) => (axis === 0 ? seeds.length : typeof size === "number" && size > 0 ? size : capacity));
        made[name] = this.allocate(metadata.type, dims);
      }
    }
    const error = await this.gpu.popErrorScope();
    if (error) {
      for (const { buffer } of Object.values(made)) buffer.destroy();
      throw new OutOfMemoryError(
        `the GPU has too little memory for ${seeds.length} rows of ${capacity} tokens (${error.message}); give fewer prompts, ` +
          "compile the package with a smaller --ctx-len, or close other pages");
    }
    return made;
  }

  allocate(type: Tensor.Type, dims: readonly number[]): Held {
    const bytes = product(dims) * BYTES[type];
    const most = Math.min(this.gpu.limits.maxBufferSize, this.gpu.limits.maxStorageBufferBindingSize);
    if (bytes > most) {
      throw new OutOfMemoryError(
        `a state of ${dims.join(" x ")} takes ${bytes} bytes, and a buffer of this GPU ${most}; give fewer prompts, or compile ` +
          "the package with a smaller --ctx-len");
    }
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const buffer = this.gpu.createBuffer({ size: Math.ceil(bytes / 16) * 16, usage });
    const tensor = this.shared.runtime.ort.Tensor.fromGpuBuffer(buffer, { dataType: type as "float32", dims });
    return { buffer, tensor, bytes };
  }

  private upload(value: Tensor): Held {
    const held = this.allocate(value.type, value.dims);
    this.gpu.queue.writeBuffer(held.buffer, 0, value.data as Float32Array<ArrayBuffer>);
    return held;
  }

  join(rows: readonly States[]): States {
    const states = rows as GpuStates[];
    const [first] = states;
    const encoder = this.gpu.createCommandEncoder();
    const joined: Record<string, Held> = {};
    for (const [name, { tensor, bytes }] of Object.entries(first.all())) {
      joined[name] = this.allocate(tensor.type, [states.length, ...tensor.dims.slice(1)]);
      states.forEach((one, row) => encoder.copyBufferToBuffer(one.all()[name].buffer, 0, joined[name].buffer, row * bytes, bytes));
    }
    this.gpu.queue.submit([encoder.finish()]);
    for (const one of states) one.free();
    return new GpuStates(this, states.flatMap((one) => one.seeds), first.capacity, joined, first.widths);
  }
}

class GpuStates implements States {
  private readonly names: string[];
  private next: [Held, Held];
  private started: boolean;
  // The new values of states that are not updated in place: a kernel may not read and write the same buffer.
  private turns: Record<string, Held> = {};
  // The optional outputs of the newest steps stay on the GPU until they are read: an entry a step, used again.
  private readonly places: Record<string, Held>[] = [];
  late = 0;

  constructor(
    private readonly memory: GpuMemory, readonly seeds: readonly bigint[], public capacity: number, private held: Record<string, Held>, readonly widths: Widths,
  ) {
    const { [NEXT]: next, ...states } = held;
    this.held = states;
    this.started = next !== undefined;
    this.next = [next ?? memory.allocate("int64", [seeds.length, 1]), memory.allocate("int64", [seeds.length, 1])];
    this.names = Object.keys(states).filter((name) => !READ_ONLY.has(name));
    this.makeTurns();
  }

  private makeTurns(): void {
    for (const { buffer } of Object.values(this.turns)) buffer.destroy();
    const others = this.names.filter((name) => !this.memory.inPlace(name));
    this.turns = Object.fromEntries(others.map((name) => [name, this.memory.allocate(this.held[name].tensor.type, this.held[name].tensor.dims)]));
  }

  /** Everything that belongs to the rows, with the tokens that they sampled last. */
  all(): Record<string, Held> {
    return { ...this.held, [NEXT]: this.next[0] };
  }

  feeds(): Tensors {
    const feeds = Object.fromEntries(Object.entries(this.held).map(([name, { tensor }]) => [name, tensor]));
    return this.started ? { ...feeds, input_ids: this.next[0].tensor } : feeds;
  }

  fetches(): Record<string, Tensor | null> {
    const fetches = fetched(this.memory.shared, this.widths);
    this.places[this.late] ??= Object.fromEntries(
      Object.entries(this.widths).map(([name, width]) => [name, this.memory.allocate(OPTIONAL.get(name) as Tensor.Type, [this.seeds.length, width])]));
    for (const [name, { tensor }] of Object.entries(this.places[this.late])) fetches[name] = tensor;
    for (const name of this.names) fetches[retainedName(name)] = (this.turns[name] ?? this.held[name]).tensor;
    fetches[NEXT] = this.next[1].tensor;
    return fetches;
  }

  accept(_: Tensors, emitted: boolean): void {
    this.next.reverse();
    for (const name of Object.keys(this.turns)) [this.held[name], this.turns[name]] = [this.turns[name], this.held[name]];
    this.started = true;
    this.late += Number(emitted);
  }

  async read(positions: readonly number[], count: number, outputs: boolean): Promise<Snapshot> {
    const rows = positions.length;
    const { gpu } = this.memory;
    const places = outputs ? this.places.slice(0, this.late) : [];
    const size = 4 * rows * (2 + count);
    const whole = size + places.flatMap((place) => Object.values(place)).reduce((sum, { bytes }) => sum + bytes, 0);
    const staging = gpu.createBuffer({ size: whole, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
    try {
      const encoder = gpu.createCommandEncoder();
      encoder.copyBufferToBuffer(this.held.status.buffer, 0, staging, 0, 4 * rows);
      encoder.copyBufferToBuffer(this.held.lengths.buffer, 0, staging, 4 * rows, 4 * rows);
      positions.forEach((position, row) => {
        const some = Math.min(count, this.capacity - position);
        if (some > 0) {
          const from = 4 * (row * this.capacity + position);
          encoder.copyBufferToBuffer(this.held.tokens.buffer, from, staging, 4 * (2 * rows + row * count), 4 * some);
        }
      });
      let end = size;
      for (const { buffer, bytes } of places.flatMap((place) => Object.values(place))) {
        encoder.copyBufferToBuffer(buffer, 0, staging, end, bytes);
        end += bytes;
      }
      gpu.queue.submit([encoder.finish()]);
      await staging.mapAsync(GPUMapMode.READ);
      const words = new Int32Array(staging.getMappedRange().slice(0));
      end = size;
      const values = places.map((place) => Object.fromEntries(Object.entries(place).map(([name, { bytes }]) => {
        const numbers = new (OPTIONAL.get(name) === "int32" ? Int32Array : Float32Array)(words.buffer, end, bytes / 4);
        end += bytes;
        return [name, numbers];
      })));
      if (outputs) this.late = 0;
      const tokens = positions.map((position, row) => {
        const start = 2 * rows + row * count;
        const fresh = Math.min(count, Math.max(0, words[rows + row] + 1 - position));
        return Array.from(words.subarray(start, start + fresh));
      });
      return { status: words.slice(0, rows), tokens, outputs: values };
    } finally {
      staging.destroy();
    }
  }

  record(history: readonly (readonly number[])[]): void {
    const tokens = new Int32Array(history.length * this.capacity);
    fillTokens(tokens, this.capacity, history);
    this.memory.gpu.queue.writeBuffer(this.held.tokens.buffer, 0, tokens);
  }

  begin(row: number, grammarState: number): void {
    this.memory.gpu.queue.writeBuffer(this.held.grammar_state.buffer, 4 * row, Int32Array.of(grammarState));
  }

  stop(row: number): void {
    this.memory.gpu.queue.writeBuffer(this.held.status.buffer, 4 * row, Int32Array.of(STOPPED));
  }

  async grow(capacity: number, history: readonly (readonly number[])[]): Promise<void> {
    const { gpu } = this.memory;
    const fresh = await this.memory.initial(this.seeds, capacity);
    const encoder = gpu.createCommandEncoder();
    for (const name of this.names) {
      const [old, into, axis] = [this.held[name], fresh[name], capacityAxis(name)];
      if (name === "tokens") continue;
      const blocks = axis < 0 ? 1 : product(old.tensor.dims.slice(0, axis));
      const [short, long] = [old.bytes / blocks, into.bytes / blocks];
      for (let block = 0; block < blocks; block += 1) encoder.copyBufferToBuffer(old.buffer, block * short, into.buffer, block * long, short);
    }
    gpu.queue.submit([encoder.finish()]);
    for (const { buffer } of Object.values(this.held)) buffer.destroy();
    this.held = fresh;
    this.capacity = capacity;
    this.record(history);
    this.makeTurns();
  }

  free(): void {
    const all = [this.held, this.turns, ...this.places].flatMap((some) => Object.values(some));
    for (const { buffer } of [...all, ...this.next]) buffer.destroy();
    this.held = this.turns = {};
  }
}
